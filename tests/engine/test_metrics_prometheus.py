"""The Prometheus sink: its text, read by an independent parser, agrees with what the requests themselves say."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exposition import read_exposition
from metrics_support import PATHS, HalfRight, LoudPolicy, Samples, samples, value
from prometheus_client.parser import text_string_to_metric_families
from toys.checkpoints import ToyLLM, toy_settings, write_toy

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import ConfigError, MetricSpec, MetricsRecord
from deepinfer_core.engine.async_llm import AsyncLLM
from deepinfer_core.engine.metrics import SPECS, expert_samples, expert_spec
from deepinfer_core.engine.plugin import EngineSettings
from deepinfer_core.engine.prometheus import PrometheusSink

ON: dict[str, Any] = {"logging__metrics": ("prometheus",), "plugins__paths": PATHS}


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def scraped(llm: LLM) -> Samples:
    return samples(llm.metrics_text())


def test_every_metric_has_its_type_and_help_in_the_text(toy_llm: ToyLLM) -> None:
    found = {
        f.name: (f.type, f.documentation) for f in text_string_to_metric_families(toy_llm("Count", **ON).metrics_text())
    }
    wanted = {spec.name.removesuffix("_total"): (spec.kind, spec.help) for spec in SPECS.values()}
    assert found == wanted


def test_the_text_obeys_the_format(toy_llm: ToyLLM) -> None:
    """A busy engine's text through a reader written from the format's description."""
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=9, **ON)
    llm.generate([[i] * 6 for i in range(5)], greedy(14))
    families = read_exposition(llm.metrics_text())
    assert {name: (f.kind, f.help) for name, f in families.items()} == {
        s.name: (s.kind, s.help) for s in SPECS.values()
    }
    count = families["deepinfer_step_tokens"].samples["deepinfer_step_tokens_count", ()]
    assert count == families["deepinfer_steps_total"].samples["deepinfer_steps_total", ()] > 10


@pytest.mark.parametrize("label", ['a"b', "a\\b", "a\nb", 'x="y",z', "é 木", "", "a,b}"])
def test_any_label_survives_the_text(label: str) -> None:
    sink = PrometheusSink(EngineSettings())
    sink.start(SPECS)
    sink.emit(MetricsRecord(counters={("deepinfer_plugin_errors_total", label): 2.0}, gauges={}, observations={}))
    assert value(samples(sink.text()), "plugin_errors_total", plugin=label) == 2


def test_requests_and_tokens_are_counted(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **ON)
    outputs = llm.generate([[1, 2, 3], [5] * 30, [7]], [greedy(4), greedy(9), greedy(2)])
    found = scraped(llm)
    assert value(found, "requests_total") == 3
    assert value(found, "prompt_tokens_total") == 3 + 30 + 1
    assert value(found, "generation_tokens_total") == sum(len(o.outputs[0].token_ids) for o in outputs)
    assert value(found, "requests_finished_total", reason="length") == 3
    assert value(found, "steps_total") >= 9


def test_reasons_and_error_codes_are_labels(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **ON)
    llm.generate([[1]], SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[4]))
    llm.engine.model.after = lambda logits: logits * float("nan")  # type: ignore[attr-defined]
    failed = llm.generate([[1, 2]], greedy(4))[0]
    assert failed.error is not None
    found = scraped(llm)
    assert value(found, "requests_finished_total", reason="stop") == 1
    assert value(found, "requests_finished_total", reason="error") == 1
    assert value(found, "request_errors_total", code=failed.error.code) == 1


def test_a_step_whose_device_work_raises_is_counted(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **ON)

    def broken(batch: Any) -> None:
        raise RuntimeError("the device is on fire")

    llm.engine.model.before = broken  # type: ignore[attr-defined]
    llm.generate([[1, 2]], greedy(4))
    assert value(scraped(llm), "failed_steps_total") == 1


def test_cache_hits_are_those_of_the_requests(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", **ON)
    prompts = [[*range(20)], [*range(20)], [*range(13), 40, 41]]
    outputs = [llm.generate([prompt], greedy(2))[0] for prompt in prompts]
    found = scraped(llm)
    assert value(found, "prefix_cache_hit_tokens_total") == sum(o.metrics.cached_tokens for o in outputs) == 19 + 12
    assert value(found, "prefix_cache_queried_tokens_total") == sum(map(len, prompts))


def test_preemptions_are_those_of_the_requests(toy_llm: ToyLLM) -> None:
    llm = toy_llm("PrefixHash", kv_cache__num_blocks=11, kv_cache__prefix_cache=False, **ON)
    outputs = llm.generate([[i, *range(6)] for i in range(4)], greedy(20))
    preempted = sum(o.metrics.preemptions for o in outputs)
    assert preempted > 0
    assert value(scraped(llm), "preemptions_total") == preempted


def test_drafts_are_those_that_the_drafter_was_told(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", speculation__method="half", **ON)
    output = llm.generate([[5]], greedy(12))[0]
    told, found = HalfRight.newest.results, scraped(llm)
    proposed, accepted = sum(r.proposed for r in told), sum(r.accepted for r in told)
    assert accepted > 0
    assert (value(found, "draft_tokens_total"), value(found, "accepted_tokens_total")) == (proposed, accepted)
    assert (output.metrics.proposed_drafts, output.metrics.accepted_drafts) == (proposed, accepted)


def test_fallbacks_are_the_plans(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **ON)
    plan = Counter(c.op for c in llm.engine.planned.plan.choices if c.source == "reference")
    found = {dict(k[1])["op"]: v for k, v in scraped(llm).items() if k[0] == "deepinfer_reference_fallbacks_total"}
    assert found == plan
    assert plan


def test_a_raising_policy_is_counted_under_its_plugin(toy_llm: ToyLLM) -> None:
    LoudPolicy.told = 0
    llm = toy_llm("Count", scheduling__policy="loud", **ON)
    llm.generate([[1, 2]], greedy(3))
    assert LoudPolicy.told > 0
    assert value(scraped(llm), "plugin_errors_total", plugin="watchers") == LoudPolicy.told


def test_gauges_return_to_their_start(toy_llm: ToyLLM) -> None:
    llm = toy_llm("Count", **ON)
    llm.generate([[1, 2], [3]], greedy(3))
    found = scraped(llm)
    assert (value(found, "running_requests"), value(found, "waiting_requests")) == (0, 0)
    assert value(found, "free_blocks") == value(found, "total_blocks") == 64


@pytest.mark.parametrize(
    ("metric", "field"),
    [
        ("time_to_first_token_seconds", "ttft"),
        ("time_per_output_token_seconds", "tpot"),
        ("queue_time_seconds", "queue_time"),
        ("request_seconds", "e2e"),
    ],
)
def test_latency_histograms_hold_the_requests_own_times(toy_llm: ToyLLM, metric: str, field: str) -> None:
    llm = toy_llm("Count", **ON)
    outputs = llm.generate([[i] for i in range(5)], greedy(6))
    times = [getattr(output.metrics, field) for output in outputs]
    found = scraped(llm)
    assert value(found, f"{metric}_count") == 5
    assert value(found, f"{metric}_sum") == pytest.approx(sum(times))
    for (name, labels), count in found.items():
        if name == f"deepinfer_{metric}_bucket":
            assert count == sum(time <= float(dict(labels)["le"]) for time in times)


def sink(*specs: MetricSpec, **settings: Any) -> PrometheusSink:
    made = PrometheusSink(EngineSettings(**settings))
    made.start({spec.name: spec for spec in specs})
    return made


HISTOGRAM = MetricSpec(name="deepinfer_x", kind="histogram", help="x", buckets=(0.5, 1.0, 4.0))


def test_histogram_buckets_are_cumulative_and_closed_above() -> None:
    made = sink(HISTOGRAM)
    seen = (0.5, 0.50001, 4.0, 9.0, 0.0)
    for part in (seen[:2], seen[2:]):
        made.emit(MetricsRecord(counters={}, gauges={}, observations={"deepinfer_x": part}))
    found = samples(made.text())
    buckets = {dict(labels)["le"]: count for (name, labels), count in found.items() if name.endswith("_bucket")}
    assert buckets == {"0.5": 2, "1.0": 3, "4.0": 4, "+Inf": 5}
    assert value(found, "x_count") == 5
    assert value(found, "x_sum") == pytest.approx(sum(seen))


def test_labels_and_gauges_arrive() -> None:
    made = sink(
        MetricSpec(name="deepinfer_a_total", kind="counter", help="a", labels=("x", "y")),
        MetricSpec(name="deepinfer_b", kind="gauge", help="b"),
    )
    for amount, level in ((2.0, 5.0), (3.0, 1.0)):
        made.emit(
            MetricsRecord(
                counters={("deepinfer_a_total", "p", 'quo"te\n'): amount},
                gauges={"deepinfer_b": level},
                observations={},
            )
        )
    found = samples(made.text())
    assert found == {("deepinfer_a_total", (("x", "p"), ("y", 'quo"te\n'))): 5.0, ("deepinfer_b", ()): 1.0}


# ---- where the text goes


def test_the_file_is_complete_when_the_engine_has_closed(toy_llm: ToyLLM, tmp_path: Path) -> None:
    file = tmp_path / "engine.prom"
    llm = toy_llm("Count", plugins__engine__prometheus_file=str(file), **ON)
    llm.generate([[1, 2]], greedy(3))
    llm.close()
    assert value(samples(file.read_text()), "generation_tokens_total") == 3
    assert list(tmp_path.glob("engine.prom*")) == [file]  # nothing half-written stays behind


def test_a_file_that_lies_nowhere_is_one_line(toy_llm: ToyLLM) -> None:
    with pytest.raises(ConfigError, match=r"plugins.engine.prometheus_file = '/no/such/x.prom'"):
        toy_llm("Count", plugins__engine__prometheus_file="/no/such/x.prom", **ON)


def test_the_port_serves_the_text() -> None:
    made = sink(HISTOGRAM, prometheus_port=0)
    try:
        assert made.port is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{made.port}/metrics") as answer:
            assert answer.read().decode() == made.text()
    finally:
        made.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", made.port))  # the port was given back


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"plugins.engine.prometheus_port = {port}: 127.0.0.1"):
            sink(HISTOGRAM, prometheus_port=port)


def test_an_async_engine_has_the_same_text(tmp_path: Path) -> None:
    directory = write_toy(tmp_path / "toy", "Count")

    async def served() -> tuple[str, str | None]:
        async with AsyncLLM(directory, accelerator="cpu", **toy_settings(**ON)) as llm:
            output = await llm.generate([1, 2], greedy(3))
            return llm.metrics_text(), llm.why_waiting(output.request_id)

    text, waits = asyncio.run(served())
    assert value(samples(text), "generation_tokens_total") == 3
    assert waits is None


def test_text_needs_a_sink_that_has_it(toy_llm: ToyLLM) -> None:
    with pytest.raises(ConfigError, match="add 'prometheus'"):
        toy_llm("Count").metrics_text()


# ---- experts


class Routed:
    """A model with two layers of three experts, that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def expert_counts(self) -> np.ndarray[Any, Any]:
        self.asked += 1
        return np.array([[5, 0, 2, 1], [7, 8, 9, 0]]) * self.asked


def test_experts_are_asked_when_somebody_looks_and_not_before() -> None:
    model = Routed()
    spec = expert_spec(model)
    assert spec is not None
    made = sink(spec)
    assert model.asked == 0
    made.emit(MetricsRecord(counters={}, gauges={}, observations={}))
    assert model.asked == 0
    for look in (1, 2):
        found = samples(made.text())
        assert model.asked == look
        assert value(found, "expert_rows_total", layer="1", expert="2") == 9 * look
        assert value(found, "expert_rows_total", layer="0", expert="nan") == 1 * look
        assert len(found) == 8


def test_experts_may_come_by_layer_name() -> None:
    assert expert_samples({"mtp": [4, 6, 0]}) == {("mtp", "0"): 4.0, ("mtp", "1"): 6.0, ("mtp", "nan"): 0.0}


def test_models_without_experts_have_no_such_metric() -> None:
    assert expert_spec(object()) is None


def test_an_engines_experts_are_in_its_text(toy_llm: ToyLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from toys.models import Count

    monkeypatch.setattr(Count, "expert_counts", lambda self: np.array([[3, 4, 0]]), raising=False)
    assert value(scraped(toy_llm("Count", **ON)), "expert_rows_total", layer="0", expert="1") == 4
