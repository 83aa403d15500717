"""Whole models: a request's logits are the same bits in every kind of company, and so are its operators' results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoint, demo, tiny_llama, tiny_qwen3, tiny_v4
from deepinfer_batch_invariance.verify.matrix import Matrix, Probe, Result, Scenario, scenarios
from toys.checks import assert_clean
from toys.drafters import TOLD

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.cli.command_host import ProgramHost

TINY = {"qwen3": tiny_qwen3, "llama": tiny_llama, "v4": tiny_v4}
PROMPT, OUT = 50, 24
DRAFTS: Mapping[str, Any] = {
    "speculation.method": "varying",
    "speculation.max_draft_tokens": 6,
    "plugins.paths": ["toys.drafter_plugin"],
    "plugins.drafter_plugin.seed": 3,
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "drafts, some right": DRAFTS,
    "drafts in chunks": {**DRAFTS, "scheduling.max_batch_tokens": 19},
    "another policy": {"scheduling.policy": "backwards", "plugins.paths": ["policy_plugin"]},
    "another block size": {"kv_cache.block_size": 48},
    "blocks that lie by token": {"kv_cache.block_size": 16},
    "two threads ahead": {"scheduling.async_scheduling": True, "scheduling.max_batch_tokens": 11},
}


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return TINY[request.param](tmp_path_factory.mktemp(request.param) / "model")


def probes_of(prompt: tuple[int, ...], out: int = OUT) -> list[Probe]:
    greedy = {"temperature": 0, "max_tokens": out, "logprobs": 4, "prompt_logprobs": 2}
    sampled = {
        "temperature": 1.0,
        "seed": 2**63 + 7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "max_tokens": out,
        "logprobs": 1,
    }
    return [Probe(prompt=prompt, params={"ignore_eos": True, **params}) for params in (greedy, sampled)]


def check(
    checkpoint: Checkpoint, probes: list[Probe], chosen: list[Scenario], *, watch: bool = True
) -> dict[str, Result]:
    """Run the scenarios; nothing moved, and each came about."""
    tell_drafters(checkpoint, probes)
    found = {}
    for result in Matrix(ProgramHost(), checkpoint.path, checkpoint.settings, probes, watch=watch).run(chosen):
        assert result.moved is None, result
        assert result.differing == 0, result
        assert result.happened, result
        assert result.runs > 0
        found[result.name] = result
    return found


def tell_drafters(checkpoint: Checkpoint, probes: list[Probe]) -> None:
    """The toy drafters know what the model will say."""
    settings = {"features.batch_invariant": True, **checkpoint.settings}
    TOLD.clear()
    with LLM(checkpoint.path, config=settings) as llm:
        for probe in probes:
            (output,) = llm.generate([list(probe.prompt)], SamplingParams(**probe.params))
            TOLD["told", len(TOLD)] = [*probe.prompt, *output.outputs[0].token_ids]


def test_every_kind_of_company(tiny: Checkpoint) -> None:
    chosen = scenarios(PROMPT, OUT, large=False, more=MORE)
    found = check(tiny, probes_of(tiny.prompt(PROMPT)), chosen)
    assert min(result.results for result in found.values()) > 1000
    assert len(found) == 15


def test_batches_next_to_256(tiny: Checkpoint) -> None:
    chosen = [Scenario(name="large", batches=(255, 256, 257))]
    check(tiny, probes_of(tiny.prompt(9), 6), chosen, watch=False)


def test_a_prefix_of_another_request(tiny: Checkpoint) -> None:
    """Rows after the hit, whatever wrote the blocks that were hit: another request's prompt, and its output."""
    settings = {"features.batch_invariant": True, **tiny.settings}
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    with LLM(tiny.path, config={**settings, "kv_cache.prefix_cache": False}) as cold:
        (first,) = cold.generate([list(tiny.prompt(30))], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        text = [*tiny.prompt(30), *first.outputs[0].token_ids]
        longer = [[*text[:cut], (text[cut] + 1) % tiny.vocab] for cut in range(15, 66, 7)]
        wanted = [cold.generate([prompt], params)[0].outputs for prompt in longer]
    with LLM(tiny.path, config=settings) as llm:
        llm.generate([list(tiny.prompt(30))], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        found = [llm.generate([prompt], params)[0] for prompt in longer]
        assert [output.outputs for output in found] == wanted
        assert max(output.metrics.cached_tokens for output in found) >= 48
        assert_clean(llm)


def test_scoring_an_output_gives_its_tokens(tiny: Checkpoint) -> None:
    """Every token of a greedy output is the most likely one when the whole text is given as a prompt."""
    with LLM(tiny.path, config={"features.batch_invariant": True, **tiny.settings}) as llm:
        check_scoring(llm, list(tiny.prompt(20)), 60)


def check_scoring(llm: LLM, prompt: list[int], out: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=out, logprobs=1, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    completion = output.outputs[0]
    text = [*prompt, *completion.token_ids]
    (scored,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert scored.prompt_logprobs is not None
    assert completion.logprobs is not None
    for position, made in zip(range(len(prompt), len(text)), completion.logprobs, strict=True):
        entry, mine = scored.prompt_logprobs[position], made[text[position]]
        assert entry is not None
        assert entry[text[position]].rank == 1
        assert entry[text[position]].logprob.hex() == mine.logprob.hex()


def test_across_processes(tmp_path: Path) -> None:
    """Two processes started one after the other give the same bits."""
    tiny = tiny_qwen3(tmp_path)
    code = (
        "import sys, json\n"
        "from deepinfer_core import LLM, SamplingParams\n"
        "settings, prompt = json.loads(sys.argv[2]), json.loads(sys.argv[3])\n"
        "with LLM(sys.argv[1], config=settings) as llm:\n"
        "    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20, logprobs=2, ignore_eos=True)\n"
        "    (output,) = llm.generate([prompt], params)\n"
        "print([(t, e.logprob.hex()) for lp in output.outputs[0].logprobs for t, e in sorted(lp.items())])\n"
    )
    settings = json.dumps({"features.batch_invariant": True, **tiny.settings})
    command = [sys.executable, "-c", code, tiny.path, settings, json.dumps(tiny.prompt(25))]
    printed = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert printed[0] == printed[1]
    assert len(printed[0]) > 500


class TestDemo:
    """SmolLM2 through the same."""

    prompt = tuple(range(500, 500 + PROMPT))

    def test_in_company(self) -> None:
        chunked = {"scheduling.max_batch_tokens": 19}
        check(demo(), probes_of(self.prompt, 5), [Scenario(name="chunks", settings=chunked, batches=(1, 7))])

    @pytest.mark.slow
    @pytest.mark.parametrize("scenario", scenarios(PROMPT, OUT, large=True, more=MORE), ids=lambda s: s.name)
    def test_every_kind_of_company(self, scenario: Scenario) -> None:
        check(demo(), probes_of(self.prompt), [scenario])

    @pytest.mark.slow
    def test_scoring_an_output_gives_its_tokens(self) -> None:
        with LLM("demo", config={"features.batch_invariant": True, "logging.progress": False}) as llm:
            check_scoring(llm, list(self.prompt), 300)


@pytest.mark.slow
def test_demo_v4_in_every_kind_of_company() -> None:
    """The trained DeepSeek-V4, with drafts from its own text."""
    pytest.importorskip("deepinfer_demo_v4", reason="the model comes with the package deepinfer-demo-v4")
    pytest.importorskip("deepinfer_spec_decode", reason="the drafter comes with the package deepinfer-spec-decode")
    checkpoint = Checkpoint("demo-v4", 2000, {"logging.progress": False})
    more = {"n-grams": {"speculation.method": "ngram"}}
    check(checkpoint, probes_of(tuple(range(300, 340)), 40), scenarios(40, 40, large=True, more=more), watch=False)
