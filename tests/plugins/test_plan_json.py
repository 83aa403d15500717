"""The plan as plain data: through JSON, into other processes, refused where versions differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from throwaway import Site, good

from deepinfer_core import __version__
from deepinfer_core.api import (
    API_VERSION,
    CacheEntry,
    CacheGroupSpec,
    Choice,
    EnginePlan,
    KVLayoutRequest,
    LinearRequest,
    Loser,
    OpRequest,
    PlanError,
    PluginError,
    PluginRecord,
    RopeRequest,
    SamplingRequest,
    SwigluRequest,
)
from deepinfer_core.plugins import (
    Registry,
    explain_plan,
    load_planned,
    plan_from_json,
    plan_to_json,
    request_from_data,
    request_to_data,
    verify_plan,
)

GROUP = CacheGroupSpec(
    name="w",
    kind="window",
    layers=3,
    window=128,
    entries=(CacheEntry("k", (2, 4), "float32"), CacheEntry("v", (), "f")),
)
REQUESTS: list[OpRequest] = [
    LinearRequest(in_features=8, out_features=4, dtype="float32", out_dtype="float32", weight_dtype="gguf:q8_0"),
    LinearRequest(
        in_features=8,
        out_features=4,
        dtype="a",
        out_dtype="b",
        weight_dtype="c",
        bias=True,
        phase="decode",
        layer_kind="full",
        device_type="acme",
        demands=frozenset({"z", "a"}),
        extras={"acme.tile": 64, "acme.mode": "x", "acme.on": True, "acme.f": 0.5},
    ),
    KVLayoutRequest(group=GROUP, block_size=16),
    RopeRequest(
        head_dim=8,
        rotary_dim=8,
        theta=1e6,
        dtype="float32",
        max_positions=64,
        scaling={"rope_type": "yarn", "factor": 2.0, "nested": {"deep": [1, 2]}},
    ),
    SwigluRequest(width=4, dtype="float32", limit=7.5),
    SwigluRequest(width=4, dtype="float32"),
    SamplingRequest(stage="top_k", vocab_size=9),
]


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: type(request).__name__)
def test_a_request_survives_json_unchanged(request_: OpRequest) -> None:
    data = request_to_data(request_)
    assert through_json(data) == data
    back = request_from_data(through_json(data))
    assert back == request_
    assert type(back) is type(request_)


def test_vendor_fields_are_still_demanded_after_json() -> None:
    back = request_from_data(through_json(request_to_data(REQUESTS[1])))
    assert back.demands == {"z", "a", "extra:acme.tile", "extra:acme.mode", "extra:acme.on", "extra:acme.f"}
    assert [type(value) for value in back.extras.values()] == [int, str, bool, float]


def test_sets_are_written_sorted() -> None:
    assert request_to_data(REQUESTS[1])["demands"] == sorted(REQUESTS[1].demands)


def test_a_request_of_an_unknown_operator_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"op='gemm\.liner'; did you mean 'gemm\.linear'"):
        request_from_data({"op": "gemm.liner"})


@pytest.mark.parametrize("change", [{"in_features": "many"}, {"invented": 1}])
def test_fields_that_do_not_fit_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="LinearRequest: fields do not fit"):
        request_from_data({**request_to_data(REQUESTS[0]), **change})


def test_a_request_that_holds_an_object_is_an_error_that_names_the_field() -> None:
    request = RopeRequest(head_dim=8, rotary_dim=8, theta=1.0, dtype="f", max_positions=1, scaling={"a": object()})
    with pytest.raises(PlanError, match=r"RopeRequest\.scaling\['a'\]=<object"):
        request_to_data(request)


def make_plan(records: tuple[PluginRecord, ...] = (), **changes: Any) -> EnginePlan:
    choices = tuple(
        Choice(
            slot=f"slot{i}",
            op=request.op,
            request=request_to_data(request),
            provider="acme:p",
            score=5,
            reason="fits",
            source="score",
            losers=(
                Loser(provider="bolt:q", reason="lacks: z"),
                Loser(provider="cord:r", reason="score 3 < 5", score=3),
            ),
        )
        for i, request in enumerate(REQUESTS)
    )
    plan = EnginePlan(
        api=API_VERSION,
        core=__version__,
        accelerator="acme",
        device={"type": "acme", "count": 2},
        plugins=records,
        choices=choices,
        policy="engine:fcfs",
        features=("batch_invariant",),
        facts={"threads": "4"},
    )
    return attrs.evolve(plan, **changes)


def test_a_plan_survives_json_unchanged() -> None:
    plan = make_plan((PluginRecord(name="acme", distribution="d", version="1", entry_point="m"),))
    assert plan_from_json(plan_to_json(plan)) == plan


def test_equal_plans_give_equal_text_whatever_the_order_of_their_mappings() -> None:
    one = make_plan(device={"type": "acme", "count": 2}, facts={"a": "1", "b": "2"})
    two = make_plan(device={"count": 2, "type": "acme"}, facts={"b": "2", "a": "1"})
    assert plan_to_json(one) == plan_to_json(two)


@pytest.mark.parametrize("value", [object(), float("nan"), float("inf")])
def test_a_plan_that_holds_no_plain_data_is_an_error(value: object) -> None:
    with pytest.raises(PlanError, match="not plain data"):
        plan_to_json(make_plan(device={"x": value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"api": 1}'])
def test_text_that_is_no_plan_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="not an engine plan"):
        plan_from_json(text)


def test_a_declined_region_comes_last_and_survives_json() -> None:
    plan = make_plan()
    region = attrs.evolve(plan.choices[0], slot="region", provider="parts", reason="why", replaces=("slot0", "slot1"))
    plan = attrs.evolve(plan, declined=(region,))
    assert plan_from_json(plan_to_json(plan)) == plan
    row = explain_plan(plan)[-1]
    assert (row["slot"], row["provider"], row["reason"], row["replaces"]) == (
        "region",
        "parts",
        "why",
        ["slot0", "slot1"],
    )


def test_a_plan_with_a_field_of_a_later_interface_is_an_error() -> None:
    data = json.loads(plan_to_json(make_plan()))
    with pytest.raises(PlanError, match="not an engine plan"):
        plan_from_json(json.dumps({**data, "invented": 1}))


def test_explanation_is_one_plain_row_for_each_slot() -> None:
    rows = explain_plan(make_plan())
    assert through_json(rows) == rows
    assert [row["slot"] for row in rows] == [f"slot{i}" for i in range(len(REQUESTS))]
    assert rows[1] == {
        "slot": "slot1",
        "op": "gemm.linear",
        "layer_kind": "full",
        "phase": "decode",
        "demands": sorted(REQUESTS[1].demands),
        "provider": "acme:p",
        "source": "score",
        "score": 5,
        "reason": "fits",
        "proof": "",
        "replaces": [],
        "losers": [
            {"provider": "bolt:q", "reason": "lacks: z", "score": None},
            {"provider": "cord:r", "reason": "score 3 < 5", "score": 3},
        ],
    }


@pytest.fixture
def acme(site: Site) -> tuple[Site, Registry]:
    site.install("acme", good("acme"), version="1.0")
    return site, site.load()


def test_a_process_with_the_same_plugins_passes(acme: tuple[Site, Registry]) -> None:
    _, registry = acme
    verify_plan(make_plan(registry.records), registry)


@pytest.mark.parametrize("change", [{"api": (1, 7)}, {"core": "0.0.1"}])
def test_another_core_is_refused(acme: tuple[Site, Registry], change: dict[str, Any]) -> None:
    _, registry = acme
    with pytest.raises(PluginError, match="this process has core"):
        verify_plan(make_plan(registry.records, **change), registry)


def test_another_version_of_a_plugin_is_refused(acme: tuple[Site, Registry]) -> None:
    _, registry = acme
    records = (attrs.evolve(registry.records[0], version="0.9"),)
    with pytest.raises(PluginError, match=r"'acme': the plan was made with acme-dist 0\.9 .*has acme-dist 1\.0"):
        verify_plan(make_plan(records), registry)


def test_a_missing_plugin_is_refused(acme: tuple[Site, Registry]) -> None:
    _, registry = acme
    with pytest.raises(PluginError, match="this process has none"):
        verify_plan(make_plan(registry.records), Registry())


def test_a_plugin_that_is_not_in_the_plan_is_refused(acme: tuple[Site, Registry]) -> None:
    _, registry = acme
    with pytest.raises(PluginError, match="loaded here but not in the plan: acme"):
        verify_plan(make_plan(), registry)


def test_a_worker_loads_the_plan_and_discovers_nothing(acme: tuple[Site, Registry]) -> None:
    site, registry = acme
    plan = make_plan(registry.records)
    site.install("late", "raise RuntimeError('imported')")
    assert load_planned(plan).records == registry.records


def test_a_worker_refuses_another_version_before_it_imports_the_plugin(acme: tuple[Site, Registry]) -> None:
    _, registry = acme
    del sys.modules["acme_dist_plugin"]
    records = (attrs.evolve(registry.records[0], version="0.9"),)
    with pytest.raises(PluginError, match=r"acme-dist 0\.9, this process has 1\.0; install the same version"):
        load_planned(make_plan(records))
    assert "acme_dist_plugin" not in sys.modules


def test_a_worker_is_not_misled_by_stale_metadata_early_on_the_path(
    acme: tuple[Site, Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, registry = acme
    site.metadata("acme-dist", {"acme": "acme_dist_plugin"}, version="0.1", form="egg-info", root=tmp_path / "early")
    monkeypatch.syspath_prepend(str(tmp_path / "early"))
    assert load_planned(make_plan(registry.records)).records == registry.records


def test_a_worker_refuses_a_plugin_that_is_not_installed() -> None:
    record = PluginRecord(name="ghost", distribution="ghost-dist", version="1", entry_point="ghost")
    with pytest.raises(PluginError, match="this process has none"):
        load_planned(make_plan((record,)))


def test_a_worker_raises_for_a_plugin_that_breaks_there(acme: tuple[Site, Registry]) -> None:
    site, registry = acme
    del sys.modules["acme_dist_plugin"]
    site.module("acme_dist_plugin", "raise ImportError('no libacme.so on this host')")
    with pytest.raises(PluginError, match=r"no libacme\.so on this host"):
        load_planned(make_plan(registry.records))


def test_a_worker_refuses_a_plugin_file_that_changed(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "changing_plugin.py"
    file.write_text(good("loose"))
    plan = make_plan(site.load(files=[str(file)]).records)
    assert load_planned(plan).records == plan.plugins
    del sys.modules["changing_plugin"]
    file.write_text(good("loose", "changed = True\n"))
    with pytest.raises(PluginError, match="'loose': the plan was made with"):
        load_planned(plan)


ACME = """
    class Doubler:
        def __init__(self, request):
            self.n = request.in_features
        def prepare(self, weights, bias=None):
            return weights
        def run(self, x, weight):
            return 2 * x
    def build(request, context):
        return Doubler(request)
    @hookimpl
    def deepinfer_gemm(device):
        return [Provider(name="double", op="gemm.linear", build=LazyRef("acme_dist_plugin:build"))]
"""

WORKER = """
import os, sys
from deepinfer_core.plugins import freeze, load_planned, plan_from_json, verify_plan

plan = plan_from_json(sys.stdin.read())
registry = load_planned(plan)
verify_plan(plan, registry)
table = freeze(plan.choices, registry.collect("deepinfer_gemm", device=None), lambda plugin: None)
print(table.wo.n, table.wo.run(21, None), "late_dist_plugin" in sys.modules)
"""


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_another_process_builds_its_table_from_the_plans_text(site: Site, start: str, tmp_path: Path) -> None:
    site.install("acme", good("acme", ACME))
    registry = site.load()
    request = LinearRequest(in_features=8, out_features=4, dtype="f", out_dtype="f", weight_dtype="f")
    data = request_to_data(request)
    choice = Choice(slot="wo", op=request.op, request=data, provider="acme:double", score=1, reason="", source="score")
    text = plan_to_json(make_plan(registry.records, choices=(choice,)))
    site.install("late", "raise RuntimeError('imported')")
    fork = "if os.fork():\n    os.wait()\n    raise SystemExit\n"
    script = WORKER if start == "spawn" else WORKER.replace("plan =", f"{fork}plan =", 1)
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(site.root)])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=text,
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (["8", "42", "False"], "")
