"""``deepinfer bench`` on a small random model: what it reports agrees with what it was asked to send."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_fakes import Run

from deepinfer_core.cli.bench_load import synthetic_load
from deepinfer_core.engine.trace_file import Arrival, Finish, TraceHeader, TraceRecord, read_trace, write_record

VOCAB, LAYERS, CONTEXT = 97, 3, 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(run: Run, model: str) -> Bench:
    """Runs ``deepinfer bench ARGUMENTS --json -`` and returns the object of its last line."""

    def call(*arguments: str) -> dict[str, Any]:
        result = run("bench", "--model", model, *arguments, "--json", "-")
        assert result.code == 0, result.err
        report: dict[str, Any] = json.loads(result.out.splitlines()[-1])
        return report

    return call


SMALL = ("--num-prompts", "5", "--input-len", "12", "--output-len", "6")


def trace_file(path: Path, *arrivals: Arrival, finishes: tuple[Finish, ...] = ()) -> str:
    header = TraceHeader(block_size=16, max_batch_tokens=64, max_running=4)
    records: tuple[TraceRecord, ...] = (header, *arrivals, *finishes)
    path.write_text("".join(write_record(record) for record in records))
    return str(path)


# ---- figures


def test_the_report_counts_what_was_sent(bench: Bench) -> None:
    report = bench(*SMALL)
    assert (report["requests"], report["failed"]) == (5, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (5 * 12, 5 * 6)
    assert report["output_tokens_per_second"] * report["seconds"] == pytest.approx(30)
    assert report["total_tokens_per_second"] * report["seconds"] == pytest.approx(90)
    assert report["load"] == {
        "num_prompts": 5, "input_len": 12, "output_len": 6, "request_rate": None, "concurrency": None, "seed": 0,
    }  # fmt: skip
    assert (report["model"], report["accelerator"]) == ("LlamaForCausalLM", "cpu")


def test_times_are_spread_as_they_must_be(bench: Bench) -> None:
    report = bench(*SMALL)
    for key in ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "host_us_per_step", "device_ms_per_step"):
        spread = report[key]
        assert 0 < spread["median"] <= spread["p90"] <= spread["p99"]
    assert report["ttft_ms"]["median"] < report["e2e_ms"]["median"]
    assert 0 < report["host_share"] < 1
    # Everything arrives at once and has one length, so one step prefills and five more decode.
    assert (report["steps"], report["tokens_per_step"]) == (6, (5 * 12 + 5 * 5) / 6)


def test_one_token_has_no_time_per_token(bench: Bench) -> None:
    assert bench("--num-prompts", "2", "--input-len", "3", "--output-len", "1")["tpot_ms"] is None


def test_quick_is_small_and_lengths_win_over_it(bench: Bench) -> None:
    load = bench("--quick", "--output-len", "3")["load"]
    assert (load["num_prompts"], load["input_len"], load["output_len"]) == (8, 32, 3)


def test_the_warm_up_is_not_counted(bench: Bench) -> None:
    none, some = (bench(*SMALL, "--warmup", number) for number in ("0", "3"))
    assert (none["requests"], none["steps"]) == (some["requests"], some["steps"])


def test_without_json_people_get_tables(run: Run, model: str) -> None:
    result = run("bench", "--model", model, *SMALL)
    assert result.code == 0
    assert "# run" in result.out
    assert "time to first token" in result.out
    assert "{" not in result.out


def test_json_goes_to_a_file(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = run("bench", "--model", model, *SMALL, "--json", str(file))
    assert json.loads(file.read_text())["requests"] == 5
    assert "{" not in result.out


def test_json_alone_is_the_last_line(run: Run, model: str) -> None:
    result = run("bench", "--json", "--model", model, *SMALL)
    assert json.loads(result.out.splitlines()[-1])["requests"] == 5


def test_arrivals_are_paced(bench: Bench) -> None:
    report = bench("--num-prompts", "4", "--input-len", "4", "--output-len", "2", "--request-rate", "40", "--seed", "3")
    shape: dict[str, Any] = {"num_prompts": 4, "input_len": 4, "output_len": 2, "request_rate": 40.0, "seed": 3}
    last = synthetic_load(**shape, vocab_size=VOCAB, max_model_len=CONTEXT)[-1].at
    assert report["requests"] == 4
    assert report["seconds"] > last > 0  # it cannot have ended before the last one came


# ---- operators


def test_operators_account_for_the_device_time(bench: Bench) -> None:
    report = bench(*SMALL, "--ops")
    rows = {(row["slot"], row["op"]): row for row in report["ops"]}
    assert sum(row["share"] for row in report["ops"]) == pytest.approx(1)
    assert rows["qkv", "gemm.linear.run"]["calls"] == LAYERS * report["steps"]
    assert rows["head", "gemm.linear.run"]["calls"] == report["steps"]
    assert rows["qkv", "gemm.linear.run"]["provider"].count(":") == 1
    assert all(row["ms"] >= 0 for row in report["ops"])
    times = [row["ms"] for row in report["ops"][:-1]]
    assert times == sorted(times, reverse=True)
    assert report["ops"][-1]["slot"] == "(rest of the step)"


def test_no_operator_is_timed_unless_asked(bench: Bench) -> None:
    assert "ops" not in bench(*SMALL)


# ---- timeline


def test_the_timeline_is_a_chrome_trace(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    report = bench(*SMALL, "--timeline", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    spans = Counter(event["name"] for event in events if event["ph"] == "X")
    assert spans == dict.fromkeys(("plan", "launch", "wait", "commit", "device"), report["steps"])
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    stacks: dict[str, list[str]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda e: (e["ts"], e["ph"] == "e")):
        stacks[event["id"]] += [event["name"]] if event["ph"] == "b" else []
        if event["ph"] == "e":
            stacks[event["id"]].remove(event["name"])  # was opened before
    assert len(stacks) == 5
    assert not any(stacks.values())
    marks = Counter(event["name"] for event in events if event["ph"] == "n")
    assert marks["first_token"] == marks["finished"] == 5


# ---- traces


def test_a_recorded_run_can_be_replayed(run: Run, bench: Bench, model: str, tmp_path: Path) -> None:
    file = str(tmp_path / "trace.jsonl")
    first = bench(*SMALL, "--warmup", "0", "--record-trace", file)
    assert len(read_trace(file).arrivals) == 5
    again = bench("--trace", file, "--time-scale", "0")
    for count in ("requests", "prompt_tokens", "output_tokens"):
        assert again[count] == first[count]


def test_generate_records_too(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    prompt = json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 4})
    assert run("generate", "--model", model, "--prompt-file", "-", "--record-trace", str(file), stdin=prompt).code == 0
    assert [(a.prompt, a.max_tokens) for a in read_trace(file).arrivals] == [(3, 4)]


def test_a_replay_shares_prefixes_as_the_recording_did(bench: Bench, tmp_path: Path) -> None:
    blocks = [(0, 1), (0, 2), (0, 1), (3,)]
    arrivals = [Arrival(time=i, id=str(i), prompt=40, max_tokens=2, n=1, blocks=b) for i, b in enumerate(blocks)]
    file = trace_file(tmp_path / "t", *arrivals)
    # One after the other: the second shares a block with the first, the third both, the fourth none.
    report = bench("--trace", file, "--time-scale", "0", "--concurrency", "1", "--set", "kv_cache.block_size=16")
    assert report["cached_tokens"] == 16 + 32
    assert report["load"] == {"trace": file, "concurrency": 1, "seed": 0}


def test_a_replay_makes_as_many_tokens_as_the_recording(bench: Bench, tmp_path: Path) -> None:
    arrivals = [Arrival(time=i, id=str(i), prompt=5, max_tokens=50, n=1) for i in range(2)]
    finish = Finish(time=3.0, id="0", child=0, output=7, reason="stop")
    file = trace_file(tmp_path / "t", *arrivals, finishes=(finish,))
    assert bench("--trace", file, "--time-scale", "0")["output_tokens"] == 7 + 50


# ---- plot


def test_the_plot_is_a_picture(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    assert run("bench", "--model", model, *SMALL, "--plot", str(file)).code == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_without_matplotlib_is_one_line_before_anything_runs(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert "pip install 'deepinfer-core[plot]'" in refused("bench", "--model", "/no/such", "--plot", "x.png")


# ---- mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no model: give --model"),
        (("--model", "M", "--num-prompts", "0"), "0 is not in the range"),
        (("--model", "M", "--request-rate", "0"), "--request-rate 0.0: expected a number above 0"),
        (("--model", "M", "--request-rate", "nan"), "--request-rate nan"),
        (("--model", "M", "--time-scale", "2"), "--time-scale is for --trace"),
        (("--model", "M", "--trace", "t", "--input-len", "9"), "leave out --input-len"),
        (("--model", "M", "--trace", "t", "--request-rate", "9"), "leave out --request-rate"),
        (("--model", "M", "--trace", "t", "--time-scale", "-1"), "--time-scale -1.0"),
        (("--model", "M", "--json", "/no/such/x"), "--json /no/such/x: its folder does not exist"),
        (("--model", "M", "--timeline", "/no/such/x"), "--timeline /no/such/x"),
        (("--model", "M", "--plot", "x.bmp"), "expected a file ending in .png, .svg, .pdf"),
        (("--model", "M", "--trace", "/no/such/t"), "trace /no/such/t: No such file"),
        (("--model", "M", "--input-len", "120", "--output-len", "9"), "are 129 tokens together; the context holds 128"),
        (("--model", "M", "--record-trace", "/no/such/t"), "logging.trace_file"),
    ],
)
def test_mistakes_are_one_line(refused: Callable[..., str], model: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("bench", *(model if argument == "M" else argument for argument in arguments))


def test_a_trace_that_does_not_fit_the_model(refused: Callable[..., str], model: str, tmp_path: Path) -> None:
    long = Arrival(time=0.0, id="long", prompt=CONTEXT, max_tokens=2, n=1)
    file = trace_file(tmp_path / "long", long)
    assert "arrival 'long' of the trace has prompt=128" in refused("bench", "--model", model, "--trace", file)
    assert "holds no arrival" in refused("bench", "--model", model, "--trace", trace_file(tmp_path / "none"))


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from deepinfer_core.cli import main; main(['bench', '--help']);"
        "print([m for m in ('torch', 'numpy', 'matplotlib', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--num-prompts" in done.stdout
