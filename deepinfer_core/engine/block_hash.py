"""Content keys of cache blocks.

A block's key covers everything its rows depend on: the keys of all blocks before it (through the parent),
its own tokens, and the domain: model, numerics, cache format and the user's salt. The parts are hashed with
their lengths, so that no two different inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

DIGEST_BYTES = 16


def domain_key(*parts: str) -> bytes:
    """Root key for requests that agree on every part (model, cache format, salt, ...)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"deepinfer-root")
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()


def extend_keys(
    keys: list[bytes], root: bytes, tokens: np.ndarray[Any, Any], num_tokens: int, block_size: int
) -> list[bytes]:
    """Append to ``keys`` the key of every block filled by ``tokens[:num_tokens]`` (int32); returns ``keys``."""
    parent = keys[-1] if keys else root
    for block in range(len(keys), num_tokens // block_size):
        data = tokens[block * block_size : (block + 1) * block_size].tobytes()
        parent = hashlib.blake2b(parent + data, digest_size=DIGEST_BYTES, person=b"deepinfer-block").digest()
        keys.append(parent)
    return keys
