"""Draft modules: what a drafter needs, the module described, its operators chosen, and the module built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core.api import (
    CacheGroupSpec,
    CheckpointError,
    Choice,
    ConfigError,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    LayerCache,
    Model,
    ModelContext,
    ModelDefinition,
    ModelSpec,
    PluginError,
    TensorInfo,
    WeightSource,
)
from deepinfer_core.checkpoint import Checkpoint, check_tensors, open_checkpoint
from deepinfer_core.config import EngineConfig
from deepinfer_core.plugins import OpTable, guarded

if TYPE_CHECKING:
    import torch

PREFIX = "draft_"
"""Of a module's operator slots and cache groups, among the target's."""


@attrs.frozen(kw_only=True)
class PlannedModule:
    """A draft module that was decided on.

    Attributes:
        path: of its checkpoint. choices: its operators, by its own slots.
        overlaid: tensors that its checkpoint lacks are the target's.
    """

    path: str
    definition: type[ModelDefinition]
    spec: ModelSpec
    choices: tuple[Choice, ...]
    overlaid: bool

    @property
    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """Its groups under the engine's names. Windows are one token wider: the next step is planned, and slides them,
        before the module has run behind this one."""
        return tuple(
            attrs.evolve(g, name=PREFIX + g.name, window=None if g.window is None else g.window + 1)
            for g in self.spec.cache_groups
        )


@attrs.frozen(kw_only=True)
class PlannedDrafter:
    """The drafter that was asked for, with its plugin's settings."""

    plugin: str
    info: DrafterInfo
    needs: DrafterNeeds
    settings: Any
    module: PlannedModule | None

    @property
    def on_host(self) -> bool:
        return self.needs.reads == "tokens"

    def named(self, method: str | None, target: str) -> str:
        """Which module this is about, for messages: what the user set, or that it is the target's."""
        if self.needs.checkpoint and self.needs.setting:
            return f"{self.needs.setting} = {self.needs.checkpoint!r}, for speculation.method = {method!r}"
        return f"speculation.method = {method!r}, module of {self.needs.checkpoint or target}"

    def facts(self, config: EngineConfig) -> Mapping[str, str]:
        """For ``explain``."""
        speculation, module = config.speculation, self.module
        rule = "exact for every request"
        if speculation.verify == "rejection":
            rule = "rejection sampling for requests without a seed, exact for all others"
        elif speculation.verify == "auto" and not self.on_host:
            rule = (
                "rejection sampling for requests without a seed whose drafts have a distribution, exact for all others"
            )
        same = "bitwise" if config.features.batch_invariant else "up to near-ties of the target's logits"
        kind = {"tokens": "tokens on the host", "history": "the device's token history", "module": "a draft module"}
        facts = {
            "drafter": f"{self.plugin}:{self.info.name}, reads {kind[self.needs.reads]}",
            "verification": f"{rule}; seeded and greedy output is that without drafts, {same}",
            "draft schedule": f"{speculation.schedule}, at most {speculation.max_draft_tokens} drafts of a request",
        }
        if speculation.schedule == "confidence":
            facts["cost table"] = "measured when the engine starts, or read from where an earlier start kept it"
        if module is not None:
            facts["draft module"] = f"{module.spec.architecture} from {module.path}"
        return facts


def read_needs(
    plugin: str, info: DrafterInfo, settings: Any, config: EngineConfig, target: Mapping[str, Any]
) -> DrafterNeeds:
    """What the drafter of ``plugin`` asks for.

    Raises:
        ConfigError: the target has no such head, or the configuration asks what the drafter cannot do.
        PluginError: the plugin cannot say.
    """
    needs = DrafterNeeds()
    if info.needs is not None:
        what, asked = f"needs of speculation.method {info.name!r}", info.needs
        needs = guarded(what, plugin, asked, lambda: asked.load()(settings, target))
        if not isinstance(needs, DrafterNeeds):
            raise PluginError(
                f"{what}: {asked.target} of plugin {plugin!r} returned {type(needs).__name__}: return DrafterNeeds"
            )
    if config.speculation.schedule == "confidence" and (info.schedule is None or needs.reads == "tokens"):
        raise ConfigError(
            f"speculation.schedule='confidence': drafter {info.name!r} has no confidence schedule: use 'fixed'"
        )
    return needs


def own_keys(config: EngineConfig) -> EngineConfig:
    """The configuration with the module's slots under their own names; a key for an operator means both models."""
    ops = {key: value for key, value in config.ops.items() if not key.startswith(PREFIX)}
    ops |= {key.removeprefix(PREFIX): value for key, value in config.ops.items() if key.startswith(PREFIX)}
    return attrs.evolve(config, ops=ops)


def check_module(
    config: EngineConfig, target: ModelSpec, definition: type[ModelDefinition], module: ModelSpec, named: str
) -> None:
    """Refuse a module that does not fit its target; ``named``: which module, for messages.

    Raises:
        ConfigError: naming what does not fit, and the setting to change.
    """
    depth, draft = config.speculation.max_draft_tokens, module.draft
    if module.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{named}: draft module {module.architecture} has vocab_size={module.vocab_size}, the target "
            f"{target.vocab_size}: a drafter must have the target's vocabulary: take another"
        )
    if module.max_model_len < target.max_model_len:
        raise ConfigError(
            f"draft module {module.architecture}: it supports {module.max_model_len} tokens, the target is set to "
            f"{target.max_model_len}: set model.max_model_len={module.max_model_len} or lower"
        )
    if config.kv_cache.block_size % module.block_alignment:
        raise ConfigError(
            f"kv_cache.block_size={config.kv_cache.block_size}: draft module {module.architecture} needs a multiple "
            f"of {module.block_alignment}"
        )
    if draft is not None and draft.max_drafts is not None and depth > draft.max_drafts:
        raise ConfigError(
            f"speculation.max_draft_tokens={depth}: draft module {module.architecture} drafts {draft.max_drafts} at "
            f"once: set it to {draft.max_drafts} or lower"
        )
    if draft is not None and draft.taps:
        if not hasattr(definition, "forward_tapped"):
            raise ConfigError(
                f"draft module {module.architecture} reads layers of its target, which {target.architecture} does not "
                "give out (forward_tapped): use another speculation.method"
            )
        if max(draft.taps) >= target.num_layers or min(draft.taps) < 0:
            raise ConfigError(
                f"{named}: draft module {module.architecture} reads layers {list(draft.taps)} of its target, which has "
                f"{target.num_layers}: it was made for another"
            )


def check_length(config: EngineConfig, target: ModelSpec) -> None:
    """No draft is longer than what the target can read: tables are made for so many.

    Raises:
        ConfigError: it would be.
    """
    depth = config.speculation.max_draft_tokens
    if depth >= target.max_model_len:
        raise ConfigError(
            f"speculation.max_draft_tokens={depth}: the target reads {target.max_model_len} tokens in all "
            f"(model.max_model_len), and a draft comes after one: set it to {target.max_model_len - 1} or lower"
        )


def check_depth(config: EngineConfig, groups: Sequence[CacheGroupSpec]) -> None:
    """A drafter's block must fit its own window, whose rows all of its drafts read.

    Raises:
        ConfigError: it does not.
    """
    depth = config.speculation.max_draft_tokens
    narrow = [g for g in groups if g.window is not None and depth >= g.window]
    if narrow:
        raise ConfigError(
            f"speculation.max_draft_tokens={depth}: cache group {narrow[0].name!r} has a window of {narrow[0].window} "
            f"tokens: set it below {narrow[0].window}"
        )


class _Overlay:
    """Tensors of one checkpoint, and what it lacks from another."""

    def __init__(self, own: WeightSource, base: WeightSource) -> None:
        self._own, self._base = own, base
        self._names = set(own.names())

    def names(self) -> Iterable[str]:
        return [*self._names, *(name for name in self._base.names() if name not in self._names)]

    def describe(self, name: str) -> TensorInfo:
        return (self._own if name in self._names else self._base).describe(name)

    def load(self, name: str) -> torch.Tensor:
        return (self._own if name in self._names else self._base).load(name)


def overlay(own: Checkpoint, base: Checkpoint) -> Checkpoint:
    """A draft module's checkpoint, which may leave out embedding and output head: they are the target's."""
    return attrs.evolve(own, weights=_Overlay(own.weights, base.weights), close=own.close)


Describe = Callable[[Checkpoint, str], tuple[type[ModelDefinition], ModelSpec]]
"""``(checkpoint, architecture or "")`` -> the model class and its needs, at the target's dtype and length."""


def with_module(
    drafter: PlannedDrafter,
    config: EngineConfig,
    checkpoint: Checkpoint,
    target: type[ModelDefinition],
    spec: ModelSpec,
    describe: Describe,
) -> PlannedDrafter:
    """The drafter with its module described, from the target's checkpoint or from its own.

    Raises:
        ConfigError, CheckpointError: the module does not fit, or is not there.
    """
    needs = drafter.needs
    if needs.reads != "module":
        return drafter

    def planned(source: Checkpoint) -> PlannedDrafter:
        definition, module = described(source)
        check_module(config, spec, target, module, wanted)
        check_depth(config, module.cache_groups)
        overlaid = bool(needs.architecture)
        found = PlannedModule(path=str(source.path), definition=definition, spec=module, choices=(), overlaid=overlaid)
        return attrs.evolve(drafter, module=found)

    def described(source: Checkpoint) -> tuple[type[ModelDefinition], ModelSpec]:
        try:
            return describe(source, needs.architecture)
        except (ConfigError, CheckpointError) as error:
            raise type(error)(f"{wanted}: {error}{other}") from error

    wanted = drafter.named(config.speculation.method, str(checkpoint.path))
    names = f"; it also takes {', '.join(needs.names)}" if needs.names else ""
    if needs.checkpoint is None:
        setting = needs.setting or f"settings of plugins.{drafter.plugin}"
        other = f"; {setting} may name another checkpoint for it{names}"
        return planned(checkpoint)
    other = names
    try:
        opened = open_checkpoint(needs.checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{wanted}: {error}{names}") from error
    with opened as own:
        return planned(overlay(own, checkpoint) if needs.architecture else own)


def reserve(module: PlannedModule | None, depth: int) -> int:
    """Rows past the newest token that the drafter may write: as many as it drafts at once."""
    block = None if module is None or module.spec.draft is None else module.spec.draft.max_drafts
    return max(depth, block or 0)


def shares_ends(target: Sequence[Choice], module: Sequence[Choice]) -> bool:
    """True when one operator serves embedding and output head of both, so that the module can use the target's."""

    def ends(choices: Sequence[Choice]) -> dict[str, tuple[str, str]]:
        both = [c for c in choices if c.slot in ("embedding", "head")]
        return {c.slot: (c.provider, repr(sorted(c.request.items()))) for c in both}

    found = ends(module)
    return len(found) == 2 and found == ends(target)


def build_module(
    module: PlannedModule,
    ops: OpTable,
    *,
    checkpoint: Checkpoint,
    target: Model | None,
    device: Any,
    progress: Callable[[str], None],
) -> Model:
    """Load a draft module. ``checkpoint``: the target's, open; another is opened for it where it lies elsewhere.

    Raises:
        CheckpointError: the checkpoint does not fit the module.
    """

    def load(source: Checkpoint) -> Model:
        check_tensors(source.weights, module.spec.tensors)
        return module.definition.build(
            ModelContext(
                spec=module.spec,
                config=source.config,
                ops=ops,
                weights=source.weights,
                device=device,
                progress=progress,
                target=target,
            )
        )

    if module.path == str(checkpoint.path):
        return load(checkpoint)
    with open_checkpoint(module.path) as own:
        return load(overlay(own, checkpoint) if module.overlaid else own)


def start_drafter(
    drafter: Any, planned: PlannedDrafter, module: Model | None, config: EngineConfig, target: str, token_limit: int
) -> None:
    """Give a device drafter what it works with."""
    speculation = config.speculation
    set_by_user = "speculation.confidence_temperature" in config.sources and not config.sources[
        "speculation.confidence_temperature"
    ].startswith("default")
    drafter.start(
        DrafterContext(
            module=module,
            target=target,
            max_draft_tokens=speculation.max_draft_tokens,
            vocab_size=token_limit,
            temperatures=speculation.confidence_temperature if set_by_user else None,
            rule="exact" if speculation.verify == "exact" else "rejection",
        )
    )


def module_caches(
    module: PlannedModule | None, caches: Mapping[str, Sequence[LayerCache]]
) -> dict[str, tuple[str, Sequence[LayerCache]]]:
    """The module's name of a group -> the engine's, and its layers' caches."""
    groups = () if module is None else module.spec.cache_groups
    return {g.name: (PREFIX + g.name, caches[PREFIX + g.name]) for g in groups}
