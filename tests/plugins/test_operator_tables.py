"""Operator tables: built once, checked against the contract, then fixed."""

from __future__ import annotations

from typing import Any

import pytest
from throwaway import Site, good

from deepinfer_core.api import (
    Choice,
    KVLayoutRequest,
    LazyRef,
    LinearRequest,
    OpRequest,
    PagedAttentionRequest,
    PlanError,
    Provider,
    SamplingRequest,
)
from deepinfer_core.plugins import OpTable, freeze, request_to_data
from deepinfer_core.plugins.tables import contract_methods

REQUEST = LinearRequest(in_features=8, out_features=4, dtype="f", out_dtype="f", weight_dtype="f")


class Linear:
    """An operator that remembers what it was built from."""

    def __init__(self, request: OpRequest, context: Any) -> None:
        self.request, self.context = request, context

    def prepare(self, weights: Any, bias: Any = None) -> Any:
        return weights

    def run(self, x: Any, weight: Any) -> Any:
        return x


def choice(slot: str, provider: str = "acme:p", request: OpRequest = REQUEST) -> Choice:
    data = request_to_data(request)
    return Choice(slot=slot, op=request.op, request=data, provider=provider, score=1, reason="", source="score")


def table(*choices: Choice, build: Any = Linear) -> OpTable:
    providers = [("acme", Provider(name="p", op="gemm.linear", build=build))]
    return freeze(choices, providers, lambda plugin: f"context of {plugin}")  # type: ignore[arg-type, return-value]


def test_each_slot_holds_the_operator_built_from_its_request_and_its_plugins_context() -> None:
    built = table(choice("wo"))
    assert built.wo.request == REQUEST
    assert built.wo.context == "context of acme"


def test_slots_of_one_provider_get_operators_of_their_own() -> None:
    built = table(choice("wq"), choice("wo"))
    assert built.wq is not built.wo


def test_each_operator_is_built_once() -> None:
    calls = []

    def build(request: OpRequest, context: Any) -> Linear:
        calls.append(request)
        return Linear(request, context)

    built = table(choice("wo"), build=build)
    assert (built.wo, built.wo)[0] is built.wo
    assert len(calls) == 1


def test_a_lazy_provider_is_imported_only_when_chosen(site: Site) -> None:
    site.module(
        "lazy_ops",
        "class Linear:\n    def __init__(self, r, c): pass\n    def prepare(self): pass\n    def run(self): pass\n",
    )
    lazy = Provider(name="p", op="gemm.linear", build=LazyRef("lazy_ops:Linear"))
    never = Provider(name="q", op="gemm.linear", build=LazyRef("not_there:at_all"))
    built = freeze([choice("wo")], [("acme", lazy), ("acme", never)], lambda plugin: None)  # type: ignore[arg-type, return-value]
    assert type(built.wo).__module__ == "lazy_ops"


def test_a_table_has_no_dictionary_and_refuses_changes() -> None:
    built = table(choice("wo"))
    assert not hasattr(built, "__dict__")
    with pytest.raises(AttributeError, match="frozen; cannot set 'wo'"):
        built.wo = None
    with pytest.raises(AttributeError, match="frozen; cannot set 'other'"):
        built.other = None
    with pytest.raises(AttributeError, match="frozen; cannot delete 'wo'"):
        del built.wo
    assert isinstance(built.wo, Linear)


def test_an_unknown_slot_lists_those_there_are() -> None:
    with pytest.raises(AttributeError, match="no slot 'wk'; slots: wq, wo"):
        _ = table(choice("wq"), choice("wo")).wk


def test_two_tables_do_not_share_slots() -> None:
    one, two = table(choice("a")), table(choice("b"))
    assert not hasattr(one, "b")
    assert not hasattr(two, "a")


def test_the_same_slot_twice_is_an_error() -> None:
    with pytest.raises(PlanError, match="slot 'wo' is chosen twice"):
        table(choice("wo"), choice("wo"))


def test_a_slot_that_is_no_identifier_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"slot 'sampling\.top_k': must be an identifier"):
        table(choice("sampling.top_k"))


def test_a_provider_that_is_not_here_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"slot 'wo': bolt:p provides no gemm\.linear in this process"):
        table(choice("wo", "bolt:p"))


def raising(request: OpRequest, context: Any) -> Any:
    raise RuntimeError("kernel image is missing")


def leaving(request: OpRequest, context: Any) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (raising, "building acme:p: RuntimeError: kernel image is missing"),
        (leaving, "building acme:p: SystemExit: 1"),
        (LazyRef("not_there_at_all:x"), "building acme:p: ModuleNotFoundError: No module named 'not_there_at_all'"),
        (LazyRef("json:nothing"), "building acme:p: AttributeError"),
        (lambda request: None, "building acme:p: TypeError"),
        (lambda request, context: None, "acme:p built None, which lacks prepare, run() of gemm.linear"),
        (lambda request, context: len, "which lacks prepare, run()"),
    ],
)
def test_a_build_that_fails_names_slot_provider_and_cause(build: Any, cause: str) -> None:
    with pytest.raises(PlanError) as caught:
        table(choice("wo"), build=build)
    assert str(caught.value).startswith("slot 'wo': ")
    assert cause in str(caught.value)


def test_ctrl_c_during_a_build_is_not_swallowed() -> None:
    def interrupted(request: OpRequest, context: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table(choice("wo"), build=interrupted)


def test_a_contracts_methods_are_those_of_its_protocol() -> None:
    shape: dict[str, Any] = {"q_heads": 1, "kv_heads": 1, "head_dim": 4, "dtype": "f", "cache_dtype": "f"}
    attention = PagedAttentionRequest(**shape, scale=1.0, block_size=16, cache_group="full")
    assert contract_methods(attention) == ("plan", "run")
    assert contract_methods(REQUEST) == ("prepare", "run")
    assert contract_methods(SamplingRequest(stage="logprobs", vocab_size=9)) == ("run",)


def test_every_request_of_the_interface_has_a_contract() -> None:
    classes = [kind for kind in OpRequest.__subclasses__() if kind.__module__.startswith("deepinfer_core.api")]
    assert KVLayoutRequest in classes
    for kind in classes:
        assert contract_methods(object.__new__(kind)), kind


def test_a_real_plugins_table_runs_without_a_hook_call(site: Site) -> None:
    site.install(
        "acme",
        good(
            "acme",
            """
            class Add:
                def prepare(self, weights, bias=None):
                    return weights
                def run(self, x, weight):
                    return x + weight
            @hookimpl
            def deepinfer_gemm(device):
                return [Provider(name="add", op="gemm.linear", build=lambda request, context: Add())]
            """,
        ),
    )
    registry = site.load()
    providers = registry.collect("deepinfer_gemm", device=None)
    built = freeze([choice("wo", "acme:add")], providers, lambda plugin: None)  # type: ignore[arg-type, return-value]
    with registry.no_hooks():
        assert built.wo.run(40, 2) == 42
