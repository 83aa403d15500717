"""Asking plugins: every hook, one plugin at a time, with checked answers and provenance."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from throwaway import Site, good

from deepinfer_core.api import DeviceInfo, EnginePlan, PluginError, ProbeEnv, hookspecs
from deepinfer_core.plugins import Registry, inspection
from deepinfer_core.plugins import registry as registry_module

PLAN = EnginePlan(api=(1, 0), core="0", accelerator="acme", device={}, plugins=(), choices=(), policy="engine:fcfs")

EVERYTHING = """
    calls = []
    def provider(op):
        return [Provider(name="p", op=op, build=LazyRef("acme:p"))]
    @hookimpl
    def deepinfer_probe(env):
        return [DeviceInfo(backend="acme", type="acme", arch="a1", count=1, memory=1, priority=100,
                           evidence=env.root, provider=LazyRef("acme:Device"))]
    @hookimpl
    def deepinfer_attention(device):
        return provider("attention.paged")
    @hookimpl
    def deepinfer_fused(device):
        return provider("fused.gated_linear")
    @hookimpl
    def deepinfer_gemm(device):
        return provider("gemm.linear")
    @hookimpl
    def deepinfer_moe_communication(device):
        return provider("moe.route")
    @hookimpl
    def deepinfer_pointwise(device):
        return provider("pointwise.rope")
    @hookimpl
    def deepinfer_sampling(device):
        return provider("sampling.stage")
    @hookimpl
    def deepinfer_runner_ops(device):
        return provider("runner.input_ids")
    @hookimpl
    def deepinfer_kv_layout(device):
        return provider("kv_layout.paged")
    @hookimpl
    def deepinfer_scheduling():
        return [PolicyInfo(name="p", help="", factory=LazyRef("acme:Policy"))]
    @hookimpl
    def deepinfer_models():
        return [ModelInfo(architectures=("A",), definition=LazyRef("acme:A"))]
    @hookimpl
    def deepinfer_sampling_stages():
        arguments = {"a": StageArgument(off=0, low=0, high=1)}
        return [StageInfo(name="x", after="bias", arguments=arguments)]
    @hookimpl
    def deepinfer_speculation():
        return [DrafterInfo(name="d", help="", factory=LazyRef("acme:Drafter"))]
    @hookimpl
    def deepinfer_constraints():
        return [ConstraintInfo(name="g", help="", factory=LazyRef("acme:Compiler"))]
    @hookimpl
    def deepinfer_metrics():
        return (MetricsSinkInfo(name="s", help="", factory=LazyRef("acme:Sink")),)
    @hookimpl
    def deepinfer_commands():
        return [CommandInfo(name="c", help="", command=LazyRef("acme:c"))]
    @hookimpl
    def deepinfer_check_plan(plan):
        return [Objection("warning", plan.accelerator)]
    @hookimpl
    def deepinfer_worker_start(plan, rank):
        calls.append((plan.accelerator, rank))
    @hookimpl
    def deepinfer_worker_stop(rank):
        calls.append(rank)
"""

COLLECTED = {
    "deepinfer_probe": "DeviceInfo",
    "deepinfer_attention": "Provider",
    "deepinfer_gemm": "Provider",
    "deepinfer_moe_communication": "Provider",
    "deepinfer_pointwise": "Provider",
    "deepinfer_sampling": "Provider",
    "deepinfer_runner_ops": "Provider",
    "deepinfer_fused": "Provider",
    "deepinfer_kv_layout": "Provider",
    "deepinfer_scheduling": "PolicyInfo",
    "deepinfer_models": "ModelInfo",
    "deepinfer_sampling_stages": "StageInfo",
    "deepinfer_speculation": "DrafterInfo",
    "deepinfer_constraints": "ConstraintInfo",
    "deepinfer_metrics": "MetricsSinkInfo",
    "deepinfer_commands": "CommandInfo",
    "deepinfer_check_plan": "Objection",
}


@pytest.fixture
def arguments(device: DeviceInfo) -> dict[str, Any]:
    return {"env": ProbeEnv(environ={}, root="/fake"), "device": device, "plan": PLAN}


def ask(registry: Registry, hook: str, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    needed = inspection.hook_arguments(registry.manager)[hook]
    return registry.collect(hook, **{name: arguments[name] for name in needed})


def calls_of(registry: Registry, plugin: str) -> list[Any]:
    module: Any = registry.manager.get_plugin(plugin)
    calls: list[Any] = module.calls
    return calls


@pytest.mark.parametrize("hook", sorted(COLLECTED))
def test_each_hook_gives_its_records_with_provenance(site: Site, arguments: dict[str, Any], hook: str) -> None:
    site.install("acme", good("acme", EVERYTHING))
    ((plugin, item),) = ask(site.load(), hook, arguments)
    assert (plugin, type(item).__name__) == ("acme", COLLECTED[hook])


def test_hook_arguments_reach_the_plugin(site: Site, arguments: dict[str, Any]) -> None:
    site.install("acme", good("acme", EVERYTHING))
    registry = site.load()
    assert ask(registry, "deepinfer_probe", arguments)[0][1].evidence == "/fake"
    assert ask(registry, "deepinfer_check_plan", arguments)[0][1].text == "acme"


def test_worker_hooks_are_called_with_plan_and_rank(site: Site) -> None:
    site.install("acme", good("acme", EVERYTHING))
    registry = site.load()
    registry.notify("deepinfer_worker_start", plan=PLAN, rank=3)
    registry.notify("deepinfer_worker_stop", rank=3)
    assert calls_of(registry, "acme") == [("acme", 3), 3]


def test_every_hook_is_either_collected_or_notified() -> None:
    hooks = set(inspection.hook_arguments(inspection.new_manager()))
    others = {"deepinfer_plugin", "deepinfer_worker_start", "deepinfer_worker_stop"}
    assert hooks == set(COLLECTED) | others
    assert {hook for hook in hooks if inspection.hook_record(hook) is None} == others


def test_a_hook_that_returns_nothing_cannot_be_collected(site: Site) -> None:
    with pytest.raises(TypeError, match="use notify"):
        site.load().collect("deepinfer_worker_stop", rank=0)


def test_answers_come_by_plugin_name_not_by_registration(site: Site, device: DeviceInfo) -> None:
    body = (
        "@hookimpl\ndef deepinfer_models():\n    return [ModelInfo(architectures=('A',), definition=LazyRef('a:b'))]\n"
    )
    for name in ("zeta", "alpha"):
        site.install(name, good(name, body))
    assert [plugin for plugin, _ in site.load().collect("deepinfer_models")] == ["alpha", "zeta"]


GARBAGE = {
    "None": ("None", "returned None; expected a sequence of Provider"),
    "a callable": ("provider_function", "expected a sequence of Provider"),
    "one record": ("Provider(name='p', op='gemm.linear', build=LazyRef('a:b'))", "expected a sequence of Provider"),
    "a string": ("'gemm'", "returned 'gemm'; expected a sequence"),
    "a generator": ("(p for p in [])", "expected a sequence of Provider"),
    "wrong records": ("[42]", "returned a sequence with 42; expected Provider"),
    "another family": (
        "[Provider(name='p', op='attention.paged', build=LazyRef('a:b'))]",
        "this hook is for gemm.* operators",
    ),
    "no build": ("[Provider(name='p', op='gemm.linear', build=None)]", "build=None; expected a LazyRef"),
    "no supports": (
        "[Provider(name='p', op='gemm.linear', build=LazyRef('a:b'), supports=True)]",
        "supports=True; expected a callable",
    ),
    "no name": ("[Provider(name='', op='gemm.linear', build=LazyRef('a:b'))]", "must not be empty"),
    "a colon": ("[Provider(name='a:b', op='gemm.linear', build=LazyRef('a:b'))]", "or contain ':'"),
    "a doubled name": (
        "[Provider(name='p', op='gemm.linear', build=LazyRef('a:b'))] * 2",
        "two providers named 'p' for gemm.linear",
    ),
    "an exception": ("1 / 0", "ZeroDivisionError"),
    "an exit": ("exit(3)", "SystemExit: 3"),
}


@pytest.fixture(params=sorted(GARBAGE))
def garbled(request: pytest.FixtureRequest, site: Site) -> tuple[Site, str]:
    expression, cause = GARBAGE[request.param]
    hook = f"@hookimpl\ndef deepinfer_gemm(device):\n    return {expression}\n"
    body = f"from sys import exit\nprovider_function = len\n{hook}"
    site.install("bad", good("bad", body))
    site.install(
        "fine",
        good(
            "fine",
            """
            @hookimpl
            def deepinfer_gemm(device):
                return [Provider(name="p", op="gemm.linear", build=LazyRef("a:b"))]
            """,
        ),
    )
    return site, cause


def test_a_bad_answer_is_dropped_with_one_log_line(
    garbled: tuple[Site, str], device: DeviceInfo, logs: list[Any]
) -> None:
    site, cause = garbled
    registry = site.load()
    for _ in range(2):  # asked twice, reported once
        assert [plugin for plugin, _ in registry.collect("deepinfer_gemm", device=device)] == ["fine"]
    (failure,) = registry.failures
    assert (failure.name, failure.distribution, failure.stage) == ("bad", "bad-dist", "hook")
    assert "deepinfer_gemm: " in failure.cause
    assert cause in failure.cause
    assert [entry["plugin"] for entry in logs] == ["bad"]


def test_a_bad_answer_of_a_plugin_asked_for_is_an_error(garbled: tuple[Site, str], device: DeviceInfo) -> None:
    site, cause = garbled
    with pytest.raises(PluginError) as caught:
        site.load(requested=["bad"]).collect("deepinfer_gemm", device=device)
    assert cause in str(caught.value)


def test_strict_makes_every_bad_answer_an_error(garbled: tuple[Site, str], device: DeviceInfo) -> None:
    site, _ = garbled
    with pytest.raises(PluginError, match="bad-dist"):
        site.load(strict=True).collect("deepinfer_gemm", device=device)


def test_a_command_must_be_lazy(site: Site) -> None:
    body = "@hookimpl\ndef deepinfer_commands():\n    return [CommandInfo(name='c', help='', command=print)]\n"
    site.install("bad", good("bad", body))
    registry = site.load()
    assert registry.collect("deepinfer_commands") == []
    assert "command 'c'" in registry.failures[0].cause


def test_ctrl_c_in_a_hook_is_not_swallowed(site: Site) -> None:
    site.install("slow", good("slow", "@hookimpl\ndef deepinfer_models():\n    raise KeyboardInterrupt\n"))
    with pytest.raises(KeyboardInterrupt):
        site.load().collect("deepinfer_models")


def test_a_worker_hook_that_raises_is_an_error_after_all_were_called(site: Site) -> None:
    site.install("bad", good("bad", "@hookimpl\ndef deepinfer_worker_start(rank):\n    raise OSError('busy')\n"))
    site.install("later", good("later", EVERYTHING))
    registry = site.load()
    with pytest.raises(PluginError, match=r"'bad'.*deepinfer_worker_start: OSError: busy"):
        registry.notify("deepinfer_worker_start", plan=PLAN, rank=0)
    assert calls_of(registry, "later") == [("acme", 0)]


def test_a_missing_hook_argument_is_our_own_bug_and_names_the_right_ones(site: Site) -> None:
    site.install("acme", good("acme", EVERYTHING))
    registry = site.load()
    with pytest.raises(TypeError, match="deepinfer_gemm takes device, was given"):
        registry.collect("deepinfer_gemm", devise=None)
    assert registry.failures == ()


def test_inside_no_hooks_every_way_of_calling_one_raises(site: Site) -> None:
    site.install("acme", good("acme", EVERYTHING))
    registry = site.load()
    with registry.no_hooks():
        with pytest.raises(RuntimeError, match="deepinfer_models called where no hook may be called"):
            registry.collect("deepinfer_models")
        with pytest.raises(RuntimeError, match="deepinfer_worker_stop"):
            registry.notify("deepinfer_worker_stop", rank=0)
        with pytest.raises(RuntimeError, match="deepinfer_models"):
            registry.manager.hook.deepinfer_models()
    assert len(registry.collect("deepinfer_models")) == 1
    assert len(registry.manager.hook.deepinfer_models()) == 1


def test_a_frozen_registry_takes_no_more_plugins(site: Site) -> None:
    site.install("acme", good("acme"))
    registry = site.load()
    loaded = registry.plugins["acme"]
    registry.freeze()
    with pytest.raises(PluginError, match="frozen"):
        registry.register(registry.manager.get_plugin("acme"), loaded)


def test_what_skipped_the_loader_cannot_be_registered(site: Site) -> None:
    site.install("acme", good("acme"))
    registry = site.load()
    with pytest.raises(PluginError, match="has not passed the loader's checks"):
        registry.register(object(), registry.plugins["acme"])


def test_implementers_are_named(site: Site) -> None:
    site.install("acme", good("acme", EVERYTHING))
    site.install("plain", good("plain"))
    assert site.load().implementers("deepinfer_probe") == ("acme",)


def test_a_plugin_of_this_interface_works_with_the_next_minor_core(
    site: Site, device: DeviceInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("acme", good("acme", EVERYTHING))
    namespace = dict(vars(hookspecs))
    source = '''
        @hookspec
        def deepinfer_gemm(device: DeviceInfo, limits: int) -> Sequence[Provider]:
            """One argument more than there is."""
    '''
    exec(textwrap.dedent(source), namespace)
    monkeypatch.setattr(hookspecs, "deepinfer_gemm", namespace["deepinfer_gemm"])
    monkeypatch.setattr(inspection, "API_VERSION", (1, 2))
    registry = site.load()
    assert registry.failures == ()
    assert [plugin for plugin, _ in registry.collect("deepinfer_gemm", device=device, limits=7)] == ["acme"]
    site.install(
        "newer", good("newer", "@hookimpl\ndef deepinfer_gemm(limits):\n    raise OSError(limits)\n", api=(1, 2))
    )
    registry = site.load()
    registry.collect("deepinfer_gemm", device=device, limits=7)
    assert [failure.cause for failure in registry.failures] == ["deepinfer_gemm: OSError: 7"]


def test_the_family_table_names_real_hooks() -> None:
    assert set(registry_module._FAMILY) <= set(COLLECTED)
