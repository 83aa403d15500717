"""Models: how an architecture declares what it needs, loads its weights, and runs a step.

A model is written against operator contracts alone. It declares its operators as named *slots*; the
engine chooses a provider for each, freezes them into a table with one attribute per slot, and hands
that table to :meth:`ModelDefinition.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

from .expert_parallel import ExpertShare
from .fused import Region
from .kv_layout import CacheGroupSpec
from .provider import LazyRef, OpRequest

if TYPE_CHECKING:
    import torch

    from .attention import StepLayout
    from .kv_layout import LayerCache


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Declared by ``deepinfer_models``: which ``architectures`` entries of config.json a class serves.

    ``definition`` names a :class:`ModelDefinition`; it is imported only when chosen.
    """

    architectures: tuple[str, ...]
    definition: LazyRef


@attrs.frozen(kw_only=True)
class TensorSpec:
    """A tensor the model reads from the checkpoint.

    Attributes:
        shape: as stored.
        optional: it may be missing.
        slot: of ``ModelSpec.ops``: the operator that packs it; ``""`` for a tensor kept as it is.
        loaded: False for one that is known, and checked if it is there, but that only a draft module reads.
    """

    shape: tuple[int, ...]
    optional: bool = False
    slot: str = ""
    loaded: bool = True


@attrs.frozen(kw_only=True)
class TensorInfo:
    """A tensor as it is stored. ``dtype`` is a torch dtype's name, or a packed format's (``"gguf:q4_1"``)."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    num_bytes: int


class WeightSource(Protocol):
    """A checkpoint opened for reading, one tensor at a time."""

    def names(self) -> Iterable[str]:
        """Tensor names, in Hugging Face spelling."""
        ...

    def describe(self, name: str) -> TensorInfo:
        """Stored shape, dtype and file. Raises CheckpointError for an unknown name."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the host: memory-mapped where the format allows, dequantised to float32 where packed."""
        ...


@attrs.frozen(kw_only=True)
class ModelOptions:
    """What the user decided about a model before it is described.

    Attributes:
        dtype: compute dtype name, resolved from ``"auto"`` by the engine.
        max_model_len: tokens, or None for the checkpoint's own limit.
        block_size: tokens per cache block.
        device_type: torch device type.
        demands: demands added to every operator request.
        stored: dtype name of each checkpoint tensor (``TensorInfo.dtype``), for weight operators' requests.
        qdq: simulated quantisation of cached values; ``auto``: on iff the checkpoint has a quantization_config.
        fp8_activations: round inputs of linear layers with packed weights (``LinearRequest.activations``).
        cache_dtype: of plain keys and values, or ``""`` for the compute dtype. A model with no such cache ignores it,
            and the engine then refuses the setting.
        experts: what this process holds where several share the experts; None: all of them. A model that does not
            know it holds all, which is right in every process.
    """

    dtype: str
    max_model_len: int | None
    block_size: int
    device_type: str
    demands: frozenset[str] = frozenset()
    stored: Mapping[str, str] = attrs.field(factory=dict)
    qdq: Literal["auto", "on", "off"] = "auto"
    fp8_activations: bool = False
    cache_dtype: str = ""
    experts: ExpertShare | None = None


@attrs.frozen(kw_only=True)
class DraftModuleSpec:
    """What makes a model a draft module: one that a drafter runs beside a target.

    Attributes:
        taps: layers of the target whose output the module reads (``TappedModel.forward_tapped``). A module with a
            method ``keep`` reads what that makes of it; others read it as it is.
        max_drafts: drafts it can make at once; None: as many as wanted.
    """

    taps: tuple[int, ...] = ()
    max_drafts: int | None = None


@attrs.frozen(kw_only=True)
class ModelSpec:
    """All that the engine must know before weights are loaded.

    Attributes:
        architecture: entry of ``architectures`` that was matched.
        vocab_size: width of the logits (padding ids included).
        max_model_len: longest context, tokens.
        dtype: compute dtype name.
        num_layers, hidden_size: for display.
        cache_groups: state kept per token.
        block_alignment: block_size must be a multiple of this (lcm of compression rates).
        ops: slot name (an identifier) -> request.
        regions: slot name -> what may take the place of some of ``ops``.
        tensors: every tensor read, by checkpoint name.
        host_token_ids: True if an operator needs token ids on the host, which makes the loop synchronous.
        draft: set for a draft module.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    num_layers: int
    hidden_size: int
    cache_groups: tuple[CacheGroupSpec, ...]
    ops: Mapping[str, OpRequest]
    tensors: Mapping[str, TensorSpec]
    block_alignment: int = 1
    host_token_ids: bool = False
    regions: Mapping[str, Region] = attrs.field(factory=dict)
    draft: DraftModuleSpec | None = None


@attrs.frozen(kw_only=True)
class ModelContext:
    """What a model gets to build itself.

    Attributes:
        spec: what :meth:`ModelDefinition.describe` returned.
        config: the checkpoint's config.json.
        ops: frozen table, one attribute per slot of ``spec.ops`` and ``spec.regions``: the regions that were chosen,
            and no operator that chosen regions replace. ``getattr(ops, slot, None)`` says which.
        weights: the checkpoint, already checked against ``spec.tensors``.
        device: torch device.
        progress: called with a tensor name after each tensor that was loaded.
        target: for a draft module whose ``embedding`` and ``head`` are served by the target's own operators: the
            target, so that these weights need not be read again. None otherwise.
        experts: as in :class:`ModelOptions`.
    """

    spec: ModelSpec
    config: Mapping[str, Any]
    ops: Any
    weights: WeightSource
    device: torch.device
    progress: Callable[[str], None]
    target: Any = None
    experts: ExpertShare | None = None


@attrs.define(kw_only=True)
class ModelBatch:
    """One step's rows: T query rows of R requests, token-major.

    Attributes:
        token_ids, positions: ``[T]`` int64.
        layouts: cache group name -> :class:`StepLayout`.
        caches: cache group name -> one cache per layer of the group.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    layouts: Mapping[str, StepLayout]
    caches: Mapping[str, Sequence[LayerCache]]


class Model(Protocol):
    """A loaded model. Stateless between steps: everything kept lies in the caches."""

    def plan(self, batch: ModelBatch) -> Any:
        """Host-side preparation of a step (attention plans, rotary tables)."""
        ...

    def forward(self, batch: ModelBatch, plan: Any) -> torch.Tensor:
        """``[T, hidden]``: final hidden state of every row, before the output head. T may be 0."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden]`` -> ``[N, vocab_size]`` float32."""
        ...


class TappedModel(Model, Protocol):
    """A model whose layers a draft module can read."""

    def forward_tapped(
        self, batch: ModelBatch, plan: Any, taps: Sequence[int], keep: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """What :meth:`forward` returns, and ``keep`` of what leaves each layer named in ``taps``, ``[T, ...]``.

        ``keep``: of what it is given, which is overwritten later, gives a tensor of its own: a copy, or less.
        """
        ...


class ModelDefinition(Protocol):
    """An architecture."""

    @classmethod
    def describe(cls, config: Mapping[str, Any], options: ModelOptions) -> ModelSpec:
        """Check ``config`` (raising ConfigError that names the field) and declare needs. No weights, no device."""
        ...

    @classmethod
    def build(cls, context: ModelContext) -> Model:
        """Load the weights through ``context.ops`` and return the model."""
        ...
