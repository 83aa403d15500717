"""Every tensor with its shape, in released names; how each is stored comes from the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from deepinfer_core.api import CheckpointError, ExpertShare, TensorSpec, quantised_name

from .config import LayerKind, V4Config
from .names import draft_prefix, layer_prefix, stored_names

FP4_BLOCK = (1, 32)


@attrs.frozen
class StoredFormats:
    """Where released names lie in a checkpoint and in which dtype.

    Attributes:
        names: released name -> stored name. dtypes: stored name -> dtype.
        block: of FP8 weights. default: dtype assumed of what is not stored.
    """

    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    block: tuple[int, int]
    default: str

    @classmethod
    def read(cls, stored: Mapping[str, str], config: V4Config, default: str) -> StoredFormats:
        return cls(stored_names(stored), stored, config.weight_block, default)

    def stored(self, name: str) -> str:
        """Name in the checkpoint; the released one when it is not there, for the error about it."""
        return self.names.get(name, name)

    def dtype(self, name: str) -> str:
        return self.dtypes.get(self.stored(name), self.default)

    def packing(self, name: str) -> str:
        """``"fp8:e4m3"``, ``"fp4:e2m1"`` or ``""`` for a plain weight.

        Raises:
            CheckpointError: packed data without scales; a number is never read from bytes alone.
        """
        dtype = self.dtype(name)
        packed = {"float8_e4m3fn": "fp8:e4m3", "int8": "fp4:e2m1"}.get(dtype, "")
        if packed:
            scale = scale_name(name)
            if scale not in self.names:
                raise CheckpointError(f"tensor {self.stored(name)!r} is {dtype} but {scale!r} is missing")
            if self.dtype(scale) != "float8_e8m0fnu":
                raise CheckpointError(f"tensor {scale!r} is {self.dtype(scale)}: expected float8_e8m0fnu")
        return packed

    def weight_dtype(self, name: str) -> str:
        """For an operator's request."""
        match self.packing(name):
            case "fp8:e4m3":
                return quantised_name("fp8:e4m3", self.block)
            case "fp4:e2m1":
                return quantised_name("fp4:e2m1", FP4_BLOCK)
        return self.dtype(name)


def scale_name(weight: str) -> str:
    """Name of the scales beside a packed weight."""
    return weight.removesuffix("weight") + "scale"


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def main_tensors(c: V4Config) -> Shapes:
    """(released name, logical shape) of the main model, packed weights counted in elements."""
    yield "embed.weight", (c.vocab, c.hidden)
    for layer, (kind, hashed) in enumerate(zip(c.kinds, c.hashed, strict=True)):
        yield from block_tensors(c, layer_prefix(layer), kind, hashed)
    yield from head_tensors(c, "")
    yield "norm.weight", (c.hidden,)
    yield "head.weight", (c.vocab, c.hidden)


def tensors_here(c: V4Config, share: ExpertShare | None) -> tuple[Shapes, Shapes]:
    """Those of the main model that this process reads, and those of experts that only others hold."""
    held = set(range(c.experts)) if share is None else {max(expert, 0) for expert in share.held}
    owner = re.compile(r"\.experts\.(\d+)\.")
    parts: tuple[list[tuple[str, tuple[int, ...]]], ...] = ([], [])
    for name, shape in main_tensors(c):
        found = owner.search(name)
        parts[found is not None and int(found[1]) not in held].append((name, shape))
    return iter(parts[0]), iter(parts[1])


def head_tensors(c: V4Config, prefix: str) -> Shapes:
    """The streams' last sum."""
    yield f"{prefix}hc_head_fn", (c.streams, c.streams * c.hidden)
    yield f"{prefix}hc_head_base", (c.streams,)
    yield f"{prefix}hc_head_scale", (1,)


def block_tensors(c: V4Config, p: str, kind: LayerKind, hashed: bool) -> Shapes:
    """One layer, or one draft stage."""
    rows = (2 + c.streams) * c.streams
    for part in ("attn", "ffn"):
        yield f"{p}{part}_norm.weight", (c.hidden,)
        yield f"{p}hc_{part}_fn", (rows, c.streams * c.hidden)
        yield f"{p}hc_{part}_base", (rows,)
        yield f"{p}hc_{part}_scale", (3,)
    yield from _attention_tensors(c, f"{p}attn.", kind)
    yield from _expert_tensors(c, f"{p}ffn.", hashed)


def _attention_tensors(c: V4Config, p: str, kind: LayerKind) -> Shapes:
    yield f"{p}attn_sink", (c.heads,)
    yield f"{p}wq_a.weight", (c.q_rank, c.hidden)
    yield f"{p}q_norm.weight", (c.q_rank,)
    yield f"{p}wq_b.weight", (c.heads * c.head_dim, c.q_rank)
    yield f"{p}wkv.weight", (c.head_dim, c.hidden)
    yield f"{p}kv_norm.weight", (c.head_dim,)
    yield f"{p}wo_a.weight", (c.o_groups * c.o_rank, c.heads // c.o_groups * c.head_dim)
    yield f"{p}wo_b.weight", (c.hidden, c.o_groups * c.o_rank)
    if kind == "csa":
        yield from _compressor_tensors(c, f"{p}compressor.", c.csa_rate, 2 * c.head_dim, c.head_dim)
        yield f"{p}indexer.wq_b.weight", (c.index_heads * c.index_dim, c.q_rank)
        yield f"{p}indexer.weights_proj.weight", (c.index_heads, c.hidden)
        yield from _compressor_tensors(c, f"{p}indexer.compressor.", c.csa_rate, 2 * c.index_dim, c.index_dim)
    elif kind == "hca":
        yield from _compressor_tensors(c, f"{p}compressor.", c.hca_rate, c.head_dim, c.head_dim)


def _compressor_tensors(c: V4Config, p: str, rate: int, width: int, head_dim: int) -> Shapes:
    yield f"{p}wkv.weight", (width, c.hidden)
    yield f"{p}wgate.weight", (width, c.hidden)
    yield f"{p}ape", (rate, width)
    yield f"{p}norm.weight", (head_dim,)


def _expert_tensors(c: V4Config, p: str, hashed: bool) -> Shapes:
    yield f"{p}gate.weight", (c.experts, c.hidden)
    if hashed:
        yield f"{p}gate.tid2eid", (c.vocab, c.experts_per_token)
    else:
        yield f"{p}gate.bias", (c.experts,)
    for owner in (*(f"experts.{e}" for e in range(c.experts)), "shared_experts"):
        yield f"{p}{owner}.w1.weight", (c.expert_width, c.hidden)
        yield f"{p}{owner}.w3.weight", (c.expert_width, c.hidden)
        yield f"{p}{owner}.w2.weight", (c.hidden, c.expert_width)


def draft_tensors(c: V4Config) -> Shapes:
    """The draft stages' own tensors; embedding and output head are the main model's."""
    for stage in range(c.drafts):
        p = draft_prefix(stage)
        yield from block_tensors(c, p, "window", False)
        last = stage + 1 == c.drafts
        if c.dspark is None:
            yield f"{p}e_proj.weight", (c.hidden, c.hidden)
            yield f"{p}h_proj.weight", (c.hidden, c.hidden)
            yield f"{p}enorm.weight", (c.hidden,)
            yield f"{p}hnorm.weight", (c.hidden,)
        elif stage == 0:
            yield f"{p}main_proj.weight", (c.hidden, len(c.dspark.target_layers) * c.hidden)
            yield f"{p}main_norm.weight", (c.hidden,)
        if c.dspark is None or last:
            yield f"{p}norm.weight", (c.hidden,)
            yield from head_tensors(c, p)
        if c.dspark is not None and c.dspark.markov_rank and last:
            yield f"{p}markov_head.markov_w1.weight", (c.vocab, c.dspark.markov_rank)
            yield f"{p}markov_head.markov_w2.weight", (c.vocab, c.dspark.markov_rank)
            yield f"{p}confidence_head.proj.weight", (1, c.hidden + c.dspark.markov_rank)


def tensor_specs(
    shapes: Shapes, formats: StoredFormats, slot: Callable[[str], str] | None = None, **more: Any
) -> dict[str, TensorSpec]:
    """Stored name -> spec: packed shapes where the checkpoint packs, and the scales beside them.

    ``slot``: of a released name; ``more``: fields of every spec.
    """
    specs: dict[str, TensorSpec] = {}
    for name, shape in shapes:
        packing = formats.packing(name) if name.endswith("weight") else ""
        if packing:
            block = formats.block if packing == "fp8:e4m3" else FP4_BLOCK
            scales = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
            specs[formats.stored(scale_name(name))] = TensorSpec(shape=scales, slot=slot(name) if slot else "", **more)
            if packing == "fp4:e2m1":
                shape = (shape[0], shape[1] // 2)
        specs[formats.stored(name)] = TensorSpec(shape=shape, slot=slot(name) if slot else "", **more)
    return specs
