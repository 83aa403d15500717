"""Random requests for PREFIXHASH engines, with the answers they must get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import attrs

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.engine.request import Request

from .oracle import HashOracle

VOCAB = 64


@attrs.define(kw_only=True)
class Job:
    """A request in the engine and what its completions must be."""

    request: Request
    expected: list[list[int]]
    aborted: bool = False
    streamed: dict[int, list[int]] = attrs.field(factory=dict)

    def fetch(self) -> None:
        """Take what the stream has."""
        while self.request.outbox:
            delta = self.request.outbox.popleft()
            self.streamed.setdefault(delta.index, []).extend(delta.token_ids)

    def check(self, llm: LLM) -> None:
        """The finished request against the oracle."""
        self.fetch()
        output = llm.output(self.request)
        assert output.finished
        assert output.error is None
        for completion, expected in zip(output.outputs, self.expected, strict=True):
            ids = completion.token_ids
            if completion.finish_reason == "abort":
                assert self.aborted
                assert ids == expected[: len(ids)]
            else:
                assert ids == expected
                stops = self.request.params.stop_token_ids
                wanted = "stop" if ids[-1] in stops and len(ids) >= self.request.params.min_tokens else "length"
                assert completion.finish_reason == wanted
            if self.request.streams:
                assert self.streamed.get(completion.index, []) == ids
            if completion.logprobs is not None:
                assert [len(entry) for entry in completion.logprobs] == [1] * len(ids)
        if output.prompt_logprobs is not None and not self.aborted:
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


class Load:
    """Makes jobs for an engine. ``windows``: of its cache groups, in order; ``longest``: prompt and output."""

    def __init__(self, llm: LLM, windows: Sequence[int | None], rng: random.Random, longest: int = 26) -> None:
        self.llm = llm
        self.random = rng
        self.longest = longest
        self.oracle = HashOracle(VOCAB, windows)
        self.number = 0

    def job(self, *, stream: bool = False) -> Job:
        """One more validated request; the caller adds it to the engine."""
        rng = self.random
        length = rng.choice([1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 20])
        prompt = [rng.randrange(2) * 7 + i % 5 for i in range(length)]
        if rng.random() < 0.5:
            prompt = [*range(length - 1), rng.randrange(VOCAB)]
        new = rng.randrange(1, max(2, min(13, self.longest - length)))
        options: dict[str, Any] = {
            "max_tokens": new,
            "temperature": rng.choice([0, 0, 0.7, 1.0]),
            "seed": rng.randrange(99),
        }
        if rng.random() < 0.4:
            options["stop_token_ids"] = rng.sample(range(VOCAB), 12)
            options["min_tokens"] = rng.randrange(min(4, new + 1))
        if rng.random() < 0.2:
            options["presence_penalty"] = 1.0
        if rng.random() < 0.2:
            options["n"] = rng.randrange(1, self.llm.engine.intake.limits.max_running + 1)
        if rng.random() < 0.1:
            options["logprobs"] = 0
        if rng.random() < 0.1:
            options["prompt_logprobs"] = 0
        params = SamplingParams(**options)
        self.number += 1
        fields: dict[str, Any] = {"prompt_token_ids": prompt}
        if rng.random() < 0.2:
            fields["timeout_ms"] = 1e9
        if rng.random() < 0.2:
            fields["cache_salt"] = rng.choice("ab")
        core, intake = self.llm.engine.core, self.llm.engine.intake
        request = intake.request(f"job{self.number}", fields, params, now=core.clock(), stream=stream)
        return Job(request=request, expected=[self.expected(prompt, params, child) for child in range(params.n)])

    def expected(self, prompt: list[int], params: SamplingParams, child: int) -> list[int]:
        assert params.max_tokens is not None
        return self.oracle.tokens(
            prompt,
            min(params.max_tokens, self.llm.engine.intake.limits.capacity - len(prompt)),
            temperature=params.temperature,
            seed=params.seed or 0,
            child=child,
            stop_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            presence=params.presence_penalty,
        )
