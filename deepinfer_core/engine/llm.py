"""``LLM``: offline batches, chats and streams over one engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from deepinfer_core.api import ConfigError, InvalidRequestError
from deepinfer_core.config import EngineConfig, load_config, override, shown_values
from deepinfer_core.plugins import WrapOp, explain_plan
from deepinfer_core.tokenizer import Tokenizer

from .assemble import Engine
from .commit import Committed
from .decision_log import why_waiting
from .intake import Prompt, split_params, split_prompts
from .interrupts import between_steps
from .logs import configure_logging
from .open_engine import open_engine
from .open_observer import exported_text
from .outputs import CompletionOutput, RequestOutput, StreamDelta
from .progress import prompts_bar
from .request import Request
from .sampling_params import SamplingParams


class LLM:
    """A model, loaded and ready. A context manager; otherwise call :meth:`close`.

    Args:
        model: a directory in Hugging Face form, a GGUF file, or a name: ``"demo"``, or one that an
            installed package gives.
        accelerator: backend name; ``"auto"`` takes the one with the highest priority whose device is present.
        dtype: compute dtype name; ``"auto"`` lets the device decide.
        config: an EngineConfig, a nested mapping, or the path of a TOML file.
        wrap_op: ``(choice, operator)`` -> what stands in the operator table in its place, for measurements.
        settings: configuration groups by name, e.g. ``kv_cache={"block_size": 32}``; they win over ``config``.

    Raises:
        DeepInferError: one clear line about what is wrong and how to mend it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        accelerator: str = "auto",
        dtype: str = "auto",
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        wrap_op: WrapOp | None = None,
        **settings: Any,
    ) -> None:
        self.config = _configure(str(model), accelerator, dtype, config, settings)
        configure_logging(self.config.logging)
        self._lock = threading.RLock()
        self._ids = itertools.count()
        self._closed = False
        self.engine: Engine = open_engine(self.config, wrap_op=wrap_op)

    # ---- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: a text, a list of token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``, or a list of these.
            sampling_params: one for all, or one per prompt; None for the defaults.
            progress: show a bar on a terminal when there are several prompts.

        Returns:
            One RequestOutput per prompt, in order; a request that failed carries ``error``.

        Raises:
            InvalidRequestError: a prompt or parameter is invalid; nothing was started.
        """
        batch = split_prompts(prompts)
        requests = self._requests(batch, split_params(sampling_params, len(batch)), stream=False)
        mine = {request.request_id for request in requests}
        shown = prompts_bar(len(requests), enabled=progress and self.config.logging.progress)
        with shown as bar, closing(self._run(requests)) as steps:
            for committed in steps:
                bar(sum(request.request_id in mine for request in committed.finished), committed.output_tokens)
        return [self.output(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        progress: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of ``{"role", "content"}``) or several (a list of such lists).

        ``variables`` reach the chat template (``tools`` and whatever else it reads).
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise InvalidRequestError(f"messages={messages!r}: expected a list of messages, or a list of such lists")
        batch = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.chat_prompt(m, add_generation_prompt=add_generation_prompt, chat_template=chat_template, **variables)
            for m in batch
        ]
        outputs = self.generate([p for p, _ in prompts], sampling_params, progress=progress)
        return [attrs.evolve(output, prompt=text) for output, (_, text) in zip(outputs, prompts, strict=True)]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[list[int], str]:
        """Token ids and text of a conversation under the chat template."""
        if self.tokenizer is None:
            raise InvalidRequestError("the checkpoint has no tokenizer, so it has no chat template: pass token ids")
        text = self.tokenizer.apply_chat_template(messages, **options)
        self.tokenizer.check_length(text, self.engine.planned.spec.max_model_len)
        return self.tokenizer.encode(text, add_special_tokens=False), text

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamDelta, None, None]:
        """Complete one prompt, yielding text and tokens as they come. Closing the iterator aborts the request.

        The prompt is validated when this is called, not at the first item.
        """
        requests = self._requests([prompt], split_params(sampling_params, 1), stream=True)
        return self._deltas(requests)

    def _deltas(self, requests: list[Request]) -> Generator[StreamDelta, None, None]:
        with closing(self._run(requests)) as steps:
            for _ in steps:
                yield from _fetch(requests)
        yield from _fetch(requests)  # a step of another thread may have ended them

    def _requests(self, prompts: list[Prompt], params: list[SamplingParams], *, stream: bool) -> list[Request]:
        if self._closed:
            raise InvalidRequestError("this LLM is closed: make a new one")
        now = self.engine.core.clock()
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            requests.append(self.engine.intake.request(str(next(self._ids)), prompt, one, now=now, stream=stream))
        return requests

    def _run(self, requests: list[Request]) -> Generator[Committed, None, None]:
        """Step until these requests ended; whatever interrupts it leaves none of them behind.

        The lock is held within a step and not between steps, so that threads share the engine and a stream that
        nobody reads stops no one.
        """
        core, waits_for = self.engine.core, 0
        try:
            with self._lock, between_steps() as check:
                committed = core.add(requests)
                check()
            yield committed
            while True:
                while waits_for < len(requests) and requests[waits_for].finished:
                    waits_for += 1
                if waits_for == len(requests):
                    break
                with self._lock, between_steps() as check:
                    committed = core.step()
                    check()
                yield committed
        finally:
            with self._lock, between_steps() as check:
                core.abort([request.request_id for request in requests])
                core.drain()
                check()

    # ---- results and facts

    def output(self, request: Request) -> RequestOutput:
        """The result of a request as far as it has come."""
        slots, failed = self.engine.core.planner.slots, [s.error for s in request.sequences if s.error is not None]
        completions = []
        for sequence in request.sequences:
            ids = slots.output_ids(sequence)
            if sequence.detokenizer is not None:
                text = sequence.detokenizer.text
            elif self.tokenizer is not None:
                text = self.tokenizer.decode(ids, skip_special_tokens=request.params.skip_special_tokens)
            else:
                text = ""
            completions.append(
                CompletionOutput(
                    index=sequence.child,
                    text=text,
                    token_ids=ids,
                    logprobs=sequence.logprobs,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                )
            )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=request.prompt_logprobs,
            outputs=completions,
            metrics=request.metrics,
            error=failed[0] if failed else None,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None."""
        return self.tokenizer

    def explain(self) -> dict[str, Any]:
        """Every choice with its reason, the device, where each setting came from, and memory in bytes."""
        return explain(self.engine.planned.plan, self.config) | {"memory": dict(self.engine.memory)}

    def why_waiting(self, request_id: str) -> str | None:
        """Why a request is not running yet, or no longer: one line; None for one that runs, ended or is unknown.

        May be called from any thread. ``RequestOutput.metrics.timeline`` holds the reasons of the past.
        """
        request = self.engine.core.requests.get(request_id)
        return None if request is None else why_waiting(self.engine.core.planner, request)

    def metrics_text(self) -> str:
        """All metrics as text, from the first sink of ``logging.metrics`` that can (``prometheus``). Any thread.

        Raises:
            ConfigError: there is no such sink.
        """
        return exported_text(self.engine.core.observer.metrics, self.engine.sinks)

    def close(self) -> None:
        """Abort what runs and release the device. Idempotent."""
        if not self._closed:
            self._closed = True
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _fetch(requests: Sequence[Request]) -> Iterator[StreamDelta]:
    """What the streams of these requests have, taken out."""
    for request in requests:
        while request.outbox:
            yield request.outbox.popleft()


def explain(plan: Any, config: EngineConfig) -> dict[str, Any]:
    """A plan and the configuration behind it, as plain data."""
    return {
        "plan": attrs.asdict(plan),
        "rows": explain_plan(plan),
        "facts": dict(plan.facts),
        "config": [attrs.asdict(value) for value in shown_values(config)],
    }


def _configure(model: str, accelerator: str, dtype: str, config: Any, settings: Mapping[str, Any]) -> EngineConfig:
    arguments: dict[str, Any] = {**settings, "model.path": model}
    if accelerator != "auto":
        arguments["accelerator"] = accelerator
    if dtype != "auto":
        arguments["model.dtype"] = dtype
    if isinstance(config, EngineConfig):
        return override(config, arguments)
    if isinstance(config, Mapping):
        return override(load_config(overrides=config), arguments)
    if config is not None and not isinstance(config, str | Path):
        raise ConfigError(f"config={config!r}: expected a file's name, a mapping of settings, or an EngineConfig")
    return load_config(file=config, overrides=arguments)
