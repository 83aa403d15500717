"""DeepSeek-V4 in the engine: greedy tokens, prefix hits at every boundary, chunked prefill, preemption, drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys.seeds import module_seed
from v4.support import BLOCK, TOLERANCE, greedy, oracle, random_model, random_tokens

from deepinfer_core import LLM, SamplingParams

SEED = module_seed(__name__)
OUT = 12
PROMPTS = (5, 13, 22, 31, 48, 16)


class Fixture:
    """A saved random model and the greedy continuations of several prompts."""

    def __init__(self, path: Path) -> None:
        self.model = random_model(SEED)
        self.model.generation_config.eos_token_id = None
        self.model.config.eos_token_id = None
        self.model.save_pretrained(path)
        self.path = path
        self.prompts = [random_tokens(SEED + i, n) for i, n in enumerate(PROMPTS)]
        self.texts = [p + greedy(self.model, p, OUT) for p in self.prompts]
        self.oracles = [oracle(self.model, text) for text in self.texts]

    def open(self, **settings: Any) -> LLM:
        groups: dict[str, Any] = {"kv_cache": {"block_size": BLOCK}, "logging": {"progress": False}}
        for name, value in settings.items():
            group, _, field = name.partition("__")
            groups.setdefault(group, {})[field] = value
        return LLM(str(self.path), **groups)

    def check(self, llm: LLM, order: list[int], prompts: list[list[int]] | None = None) -> list[Any]:
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts or [self.prompts[i] for i in order]],
            SamplingParams(max_tokens=OUT, temperature=0, logprobs=2),
        )
        for index, output in zip(order, outputs, strict=True):
            self.check_one(index, output)
        return outputs

    def check_one(self, index: int, output: Any) -> None:
        text, wanted = self.texts[index], self.oracles[index]
        start = len(output.prompt_token_ids)
        first_tie = min(wanted.near_ties, default=10**9)
        completion = output.outputs[0]
        assert output.error is None
        for offset, token in enumerate(completion.token_ids):
            row = start + offset - 1
            if row >= first_tie or _close_call(wanted.logprobs[row]):
                return
            assert token == text[start + offset], f"token {offset} of prompt {index} (seed {SEED})"
            found = completion.logprobs[offset][token].logprob
            difference = abs(found - float(wanted.logprobs[row, token]))
            assert difference < TOLERANCE, f"{difference:.2e} at token {offset} of prompt {index} (seed {SEED})"


def _close_call(logprobs: Any) -> bool:
    """Two best tokens nearer than the tolerance: either is right."""
    best = logprobs.topk(2).values
    return bool(best[0] - best[1] < TOLERANCE)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("tiny_v4"))


def test_alone(tiny: Fixture) -> None:
    with tiny.open() as llm:
        for index in range(len(PROMPTS)):
            tiny.check(llm, [index])


def test_batched(tiny: Fixture) -> None:
    with tiny.open() as llm:
        tiny.check(llm, list(range(len(PROMPTS))))


@pytest.mark.parametrize("budget", [3, 7, 16, 29])
def test_chunked_prefill_beside_decoding_strangers(tiny: Fixture, budget: int) -> None:
    with tiny.open(scheduling__max_batch_tokens=budget, scheduling__max_running=3) as llm:
        tiny.check(llm, [4, 0, 3, 1, 2, 5])


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("blocks", [5, 6])
def test_preempted_and_resumed_in_a_small_pool(tiny: Fixture, blocks: int, prefix_cache: bool) -> None:
    settings: dict[str, Any] = {"kv_cache__num_blocks": blocks, "kv_cache__prefix_cache": prefix_cache}
    with tiny.open(scheduling__max_batch_tokens=16, **settings) as llm:
        outputs = tiny.check(llm, [2, 3, 1, 0])
        assert sum(output.metrics.preemptions for output in outputs) > 0


@pytest.mark.parametrize("boundary", [BLOCK, 2 * BLOCK, 3 * BLOCK])
def test_prefix_hit_at_every_aligned_boundary(tiny: Fixture, boundary: int) -> None:
    """A first request leaves ``boundary`` tokens behind; the second begins with them. At 48 all of it is found."""
    index = 4
    with tiny.open() as llm:
        llm.generate({"prompt_token_ids": tiny.texts[index][:boundary]}, SamplingParams(max_tokens=1, temperature=0))
        (output,) = tiny.check(llm, [index])
        assert output.metrics.cached_tokens == min(boundary, PROMPTS[index] - 1)


def test_a_full_hit_beside_strangers(tiny: Fixture) -> None:
    with tiny.open() as llm:
        tiny.check(llm, [4, 5])
        outputs = tiny.check(llm, [4, 0, 5, 2])
        assert [o.metrics.cached_tokens for o in outputs] == [47, 0, 15, 0]


def test_a_block_size_out_of_alignment_is_one_error(tiny: Fixture) -> None:
    with pytest.raises(ValueError, match=r"kv_cache\.block_size=24: DeepseekV4ForCausalLM needs a multiple of 16"):
        tiny.open(kv_cache__block_size=24)


def test_blocks_of_several_rates(tiny: Fixture) -> None:
    with tiny.open(kv_cache__block_size=48) as llm:
        tiny.check(llm, [3, 4, 2])


def test_counts_of_experts_reach_the_caller(tiny: Fixture) -> None:
    with tiny.open() as llm:
        tiny.check(llm, [0])
        model: Any = llm.engine.model
        counts = model.expert_counts()
        assert counts[:, :-1].sum() == 4 * 2 * (PROMPTS[0] + OUT - 1)
