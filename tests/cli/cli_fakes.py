"""A stand-in for the engine, and what one run of the program leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import attrs

from deepinfer_core.engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestError,
    RequestMetrics,
    RequestOutput,
    StreamDelta,
)
from deepinfer_core.engine.sampling_params import SamplingParams


@attrs.frozen
class Result:
    """What one run of the program left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


class FakeLLM:
    """Answers each prompt with its description; remembers what it was asked."""

    instances: list[FakeLLM]

    def __init__(self, model: str, *, config: Any) -> None:
        self.model, self.config = model, config
        self.calls: list[tuple[str, Any, Any]] = []
        self.closed = False
        FakeLLM.instances.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def generate(self, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        self.calls.append(("generate", prompts, params))
        return [self._output(f"<{prompt}>", param) for prompt, param in zip(prompts, params, strict=True)]

    def chat(self, messages: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        self.calls.append(("chat", messages, params))
        return [self._output(f"chat<{m[-1]['content']}>", p) for m, p in zip(messages, params, strict=True)]

    def chat_prompt(self, messages: list[Any]) -> tuple[list[int], str]:
        self.calls.append(("chat_prompt", messages, None))
        return [5, 6], "rendered"

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[StreamDelta]:
        self.calls.append(("stream", prompt, params))
        if prompt == "interrupt":
            raise KeyboardInterrupt
        if prompt == "fail":
            yield StreamDelta("0", 0, "", [], "error", RequestError("internal", "it broke"))
            return
        yield StreamDelta("0", 0, "one", [1])
        yield StreamDelta("0", 0, " two", [2], "length")

    @staticmethod
    def _output(text: str, params: SamplingParams) -> RequestOutput:
        if text == "<fail>":
            error = RequestError("nan_logits", "the model gave\nNaN")
            outputs = [CompletionOutput(0, "", [], finish_reason="error")]
            return RequestOutput("r", text, [1], None, outputs, RequestMetrics(0.0), error)
        logprobs: list[Any] = [{7: Logprob(float("-inf"), 1, "x")}]
        outputs = [CompletionOutput(i, text, [7], logprobs, "stop") for i in range(params.n)]
        return RequestOutput("r", text, [1], None, outputs, RequestMetrics(0.0))
