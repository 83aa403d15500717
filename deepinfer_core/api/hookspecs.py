"""Every hook, on one page; ``docs/hooks.md`` is generated from it.

Mark each implementation with `@hookimpl` and take the arguments you need, by name, without defaults.

* Hooks **declare**. They return small records, import no torch and open no device: `deepinfer plugins` and `--help`
  call them too. What does the work is named by a `LazyRef("package.module:attribute")` and imported when it is chosen.
* A hook that returns records returns a sequence of them, a list or a tuple, empty when there are none; `None` or
  anything else is an error of the plugin.
* A plugin that raises loses that answer and nothing else; users see one line with its name, distribution and cause, and
  an error if they had asked for the plugin. Order never decides: `tryfirst`, `trylast` and wrappers are refused.
* No hook is called inside a step.
* `@hookimpl(optionalhook=True)` lets a plugin implement a hook that only later cores have. Without it, an unknown hook
  name is an error that suggests the nearest one.

```python
from deepinfer_core.api import LazyRef, LinearRequest, PluginInfo, Provider, hookimpl, no, yes
```
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from .commands import CommandInfo
from .constraint import ConstraintInfo
from .device import DeviceInfo, NoDevice, ProbeEnv
from .metrics import MetricsSinkInfo
from .model import ModelInfo
from .plan import EnginePlan, Objection, PluginInfo
from .provider import Provider
from .sampling_stages import StageInfo
from .scheduling import PolicyInfo
from .speculation import DrafterInfo

PROJECT = "deepinfer"
API_VERSION = (1, 1)
ENTRY_POINT_GROUP = f"deepinfer.plugins.v{API_VERSION[0]}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def deepinfer_plugin() -> PluginInfo:  # type: ignore[empty-body]
    """Who you are. Required, once per plugin. Returns one `PluginInfo`; its `name` is the entry point's name.

    ```python
    @hookimpl
    def deepinfer_plugin():
        return PluginInfo(name="acme", help="Acme accelerators", settings=AcmeSettings)
    ```

    `needs` and `conflicts` name other plugins. A plugin whose needs are not loaded is dropped. Of two that conflict
    the one that declares it gives way, unless only that one was asked for. `settings` is an attrs class of which
    every field has a default; users write `plugins.acme.<field>` or `DEEPINFER_ACME__<FIELD>`. `archs` lists the
    values of `DeviceInfo.arch` that your binaries were built for; `deepinfer doctor` compares.
    """


@hookspec
def deepinfer_probe(env: ProbeEnv) -> Sequence[DeviceInfo | NoDevice]:  # type: ignore[empty-body]
    """Devices of yours on this machine. `env` is a `ProbeEnv`: look at device files below `env.root` and at
    `env.environ`, not at installed packages. Returns `DeviceInfo` records; the highest `priority` wins when the user
    names no backend, and an equal top is an error that tells the user which line to write. When there are none,
    return a `NoDevice`: its `reason` and `fix` are the answer to a user who asks for your backend by name, and
    `explain` lists them.

    ```python
    @hookimpl
    def deepinfer_probe(env):
        count = len(list(Path(env.root).glob("dev/acme[0-9]*")))
        if not count:
            return [NoDevice(backend="acme", reason="no /dev/acme0", fix="check: ls /dev/acme*")]
        return [
            DeviceInfo(
                backend="acme",
                type="acme",
                arch="a1",
                count=count,
                memory=64 << 30,
                priority=100,
                evidence=f"{count} of /dev/acme*",
                provider=LazyRef("deepinfer_acme.device:AcmeDevice"),
            )
        ]
    ```
    """


@hookspec
def deepinfer_attention(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `attention.*` operators: `attention.write_kv`, `attention.paged`, and for compressed sparse
    attention `attention.sparse`, `attention.index_topk`, `attention.compress`. Declare the cap `kv_layout:<name>` for
    each cache layout they understand.
    """


@hookspec
def deepinfer_gemm(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `gemm.*` operators: `gemm.linear`, `gemm.batched`, `gemm.grouped`. Weights reach `prepare` as
    tensors, or as `QuantisedWeight` records where the request's `weight_dtype` names a packed format
    (`"fp8:e4m3:128x128"`): refuse a `weight_dtype` you do not know.

    ```python
    def supports(request: LinearRequest):
        if request.in_features % 64:
            return no(f"in_features {request.in_features} is not a multiple of 64")
        return yes(100)


    @hookimpl
    def deepinfer_gemm(device):
        if device.backend != "acme":
            return []
        return [
            Provider(
                name="fast",
                op="gemm.linear",
                build=LazyRef("deepinfer_acme.gemm:Fast"),
                supports=supports,
                caps=frozenset({"deterministic"}),
            )
        ]
    ```
    """


@hookspec
def deepinfer_moe_communication(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `moe.*` operators: `moe.route`; `moe.exchange`, whose `dispatch` and `combine` carry rows to the
    experts of this process and back; and `moe.expert_parallel`, which does it over the processes of
    `BuildContext.group`. `supports` of the last looks at `request.ranks` and `request.slots`.
    """


@hookspec
def deepinfer_pointwise(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `pointwise.*` operators: `pointwise.rms_norm`, `pointwise.rope`, `pointwise.swiglu`,
    `pointwise.embedding`, `pointwise.hyper_connection`, `pointwise.hyper_head`, `pointwise.quantise_dequantise`.
    """


@hookspec
def deepinfer_sampling(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `sampling.stage`: one for each stage you replace. `supports` looks at `request.stage`. Users list
    providers of one stage as `ops."sampling.top_k"`.
    """


@hookspec
def deepinfer_sampling_stages() -> Sequence[StageInfo]:  # type: ignore[empty-body]
    """Stages you add to the built-in ones, as `StageInfo` records: where they run, and the numbers that requests pass
    to them in `SamplingParams(extra_args=...)`. The stage itself is a `sampling.stage` provider of
    `deepinfer_sampling` for the request with that `stage`. Provisional until two plugins use it.

    ```python
    @hookimpl
    def deepinfer_sampling_stages():
        probability = StageArgument(off=0.0, low=0.0, high=1.0, help="chance to leave out the top choices")
        return [StageInfo(name="xtc", after="min_p", arguments={"xtc_probability": probability})]
    ```
    """


@hookspec
def deepinfer_runner_ops(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `runner.*` operators: `runner.input_ids`, `runner.slot_mapping`, `runner.append_tokens`."""


@hookspec
def deepinfer_fused(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `fused.*` operators, regions that outrank their parts: `fused.attention_inputs` (norm of the heads,
    rotary embedding, cache write), `fused.gated_linear` (merged product and gated activation),
    `fused.between_attention` (all of a layer but its attention, with the next layer's first product) and
    `fused.sample_tokens` (temperature, top-k, top-p and draw, in steps without another sampling stage). A region that
    no provider of yours is eligible for is served by its parts, so offer one only where it is faster. Users refuse one
    with `ops."fused.gated_linear" = ["parts"]`.

    ```python
    @hookimpl
    def deepinfer_fused(device):
        if device.backend != "acme":
            return []
        return [Provider(name="gated", op="fused.gated_linear", build=LazyRef("deepinfer_acme.gated:Gated"))]
    ```
    """


@hookspec
def deepinfer_kv_layout(device: DeviceInfo) -> Sequence[Provider]:  # type: ignore[empty-body]
    """Providers of `kv_layout.*`: how cache groups lie in memory. The layout is chosen before the operators that read
    it.
    """


@hookspec
def deepinfer_scheduling() -> Sequence[PolicyInfo]:  # type: ignore[empty-body]
    """Scheduling policies for `scheduling.policy`, as `PolicyInfo` records.

    ```python
    @hookimpl
    def deepinfer_scheduling():
        return [PolicyInfo(name="shortest", help="shortest prompt first", factory=LazyRef("my_policy:Shortest"))]
    ```
    """


@hookspec
def deepinfer_models() -> Sequence[ModelInfo]:  # type: ignore[empty-body]
    """Architectures you can run, as `ModelInfo` records: entries of `architectures` in `config.json`, and the class.

    ```python
    @hookimpl
    def deepinfer_models():
        return [ModelInfo(architectures=("AcmeForCausalLM",), definition=LazyRef("deepinfer_acme.model:AcmeModel"))]
    ```
    """


@hookspec
def deepinfer_speculation() -> Sequence[DrafterInfo]:  # type: ignore[empty-body]
    """Drafters for `speculation.method`, as `DrafterInfo` records: on the host, or on the device with a draft module
    that the engine builds ([speculation](speculation.md)). Provisional until two plugins use it.

    ```python
    @hookimpl
    def deepinfer_speculation():
        return [DrafterInfo(name="lookup", help="repeat what followed before", factory=LazyRef("my_drafts:Lookup"))]
    ```
    """


@hookspec
def deepinfer_constraints() -> Sequence[ConstraintInfo]:  # type: ignore[empty-body]
    """Compilers of grammars for `structured_outputs.backend`, as `ConstraintInfo` records; `factory` is called with the
    plugin's settings, or None, and the `Vocabulary`, when the first request with a grammar arrives. `auto` takes the
    highest `priority`. [structured output](structured_output.md) describes the one there is. Provisional until two
    plugins use it.

    ```python
    @hookimpl
    def deepinfer_constraints():
        return [ConstraintInfo(name="automata", help="patterns only", factory=LazyRef("my_automata:Compiler"))]
    ```
    """


@hookspec
def deepinfer_metrics() -> Sequence[MetricsSinkInfo]:  # type: ignore[empty-body]
    """Metrics sinks for `logging.metrics`, as `MetricsSinkInfo` records; `factory` is called with the plugin's
    settings, or None. [observability](observability.md) lists what a sink receives.

    ```python
    @hookimpl
    def deepinfer_metrics():
        return [MetricsSinkInfo(name="statsd", help="UDP to a statsd server", factory=LazyRef("my_metrics:StatsdSink"))]
    ```
    """


@hookspec
def deepinfer_commands() -> Sequence[CommandInfo]:  # type: ignore[empty-body]
    """Commands of the `deepinfer` program, as `CommandInfo` records; the `click.Command` is imported when it is run.

    ```python
    @hookimpl
    def deepinfer_commands():
        command = LazyRef("deepinfer_acme.top:main")
        return [CommandInfo(name="acme-top", help="Show what the devices do", command=command)]
    ```

    A command that runs a model asks the program for it: under `@click.pass_obj` it gets a `CommandHost`, with
    `open_llm(model, settings, wrap_op)`, `sampling_params(**fields)` and `print_table(title, columns, rows)`.
    """


@hookspec
def deepinfer_check_plan(plan: EnginePlan) -> Sequence[Objection]:  # type: ignore[empty-body]
    """Veto or question a combination before weights load. `plan` is the `EnginePlan`. Returns `Objection` records:
    `error` stops the start, `warning` is logged.

    ```python
    @hookimpl
    def deepinfer_check_plan(plan):
        if plan.accelerator == "acme" and "batch_invariant" in plan.features:
            return [Objection("warning", "batch invariance halves the speed of acme a1")]
        return []
    ```
    """


@hookspec
def deepinfer_worker_start(plan: EnginePlan, rank: int) -> None:
    """Once in every process that runs steps, before weights load: the one place for a side effect of the process,
    such as an environment variable a driver reads. Returns nothing. Raising stops the engine.
    """


@hookspec
def deepinfer_worker_stop(rank: int) -> None:
    """Once in every process that ran steps, when its engine closes. Returns nothing."""
