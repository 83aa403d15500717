"""How GGUF names and orders what Hugging Face checkpoints hold."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

_MODEL: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def hugging_face_name(name: str) -> str | None:
    """The Hugging Face name of GGUF tensor ``name``; None when it has none here."""
    if name in _MODEL:
        return _MODEL[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        return None
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"


def half_split_rows(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """``[rows]``: for each row in Hugging Face order, the row that llama-type GGUF files store it at.

    They keep the two halves of a head interleaved (rotary pairs adjacent), ``[heads, d/2, 2]``; Hugging Face keeps
    them apart, ``[heads, 2, d/2]``.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)
