"""``AsyncLLM``: one engine shared by many asyncio tasks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from deepinfer_core.api import InvalidRequestError
from deepinfer_core.config import EngineConfig

from .driver import EngineDriver
from .intake import Prompt, check_seconds, split_params
from .llm import LLM
from .outputs import RequestOutput, StreamDelta
from .request import Request
from .sampling_params import SamplingParams


class AsyncLLM:
    """A model for asyncio programs. An async context manager; otherwise call :meth:`close`.

    The engine runs in a thread of its own. Cancelling a task, closing a stream or a timeout ends that request
    and no other. A stream that is read slowly gets its deltas joined and slows nobody down; requests above
    ``max_pending`` wait in their callers until others end.

    Args:
        model, accelerator, dtype, config, settings: as for :class:`~deepinfer_core.LLM`.
        max_pending: most requests inside the engine, running and waiting.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        accelerator: str = "auto",
        dtype: str = "auto",
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        max_pending: int = 1024,
        **settings: Any,
    ) -> None:
        if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
            raise InvalidRequestError(f"max_pending={max_pending!r}: expected an integer >= 1")
        self._llm = LLM(model, accelerator=accelerator, dtype=dtype, config=config, **settings)
        self._driver = EngineDriver(self._llm.engine.core, self._wake)
        self._slots = asyncio.Semaphore(max_pending)
        self._waiters: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Event]] = {}
        self._reserved: set[str] = set()
        self._outside: dict[str, _Running] = {}

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> RequestOutput:
        """Complete one prompt.

        Args:
            request_id: unique among live requests; None makes one up.
            timeout: seconds, waiting for room included, after which the request ends with ``error`` code
                ``timeout``; None: never.

        Raises:
            InvalidRequestError: the prompt or a parameter is invalid, or the id is live.
        """
        async with self._running(prompt, sampling_params, request_id, timeout, stream=False) as request:
            await self._until_finished(request)
            return self._llm.output(request)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """Complete one prompt, yielding deltas as they come; the last one of each completion has its finish reason.

        Arguments and errors as for :meth:`generate`.
        """
        async with self._running(prompt, sampling_params, request_id, timeout, stream=True) as request:
            finished = False
            while not finished:
                finished = await self._news(request)
                for delta in _joined(request):
                    yield delta

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answer one conversation; ``template`` as for :meth:`LLM.chat_prompt`."""
        ids, text = self._llm.chat_prompt(messages, **template)
        output = await self.generate(ids, sampling_params, request_id=request_id, timeout=timeout)
        output.prompt = text
        return output

    async def abort(self, request_id: str) -> None:
        """End a request with finish reason ``abort``, also one that waits for room. Other ids are ignored."""
        if request_id in self._outside:
            self._outside[request_id].stop_waiting()
        with suppress(InvalidRequestError):  # closed, so that everything has ended
            await asyncio.wrap_future(self._driver.abort(request_id))

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None."""
        return self._llm.tokenizer

    def explain(self) -> dict[str, Any]:
        """As :meth:`LLM.explain`."""
        return self._llm.explain()

    def why_waiting(self, request_id: str) -> str | None:
        """As :meth:`LLM.why_waiting`."""
        return self._llm.why_waiting(request_id)

    def metrics_text(self) -> str:
        """As :meth:`LLM.metrics_text`."""
        return self._llm.metrics_text()

    async def close(self) -> None:
        """Abort what runs, end the thread, release the device. Idempotent."""
        await asyncio.to_thread(self._driver.close)
        self._llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _running(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        timeout: float | None,
        *,
        stream: bool,
    ) -> _Running:
        (checked,) = split_params(params, 1)
        if request_id is None:
            request_id = secrets.token_hex(8)
        elif not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id={request_id!r}: expected a string that is not empty, or None")
        return _Running(self, prompt, checked, request_id, timeout, stream)

    def _wake(self, request: Request) -> None:
        """Called in the engine's thread."""
        waiter = self._waiters.get(request.request_id)
        if waiter is not None:
            loop, event = waiter
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def _news(self, request: Request) -> bool:
        """Wait until there is something to fetch; True when the request has ended."""
        _, event = self._waiters[request.request_id]
        while not request.outbox and not request.finished:
            await event.wait()
            event.clear()
        return request.finished

    async def _until_finished(self, request: Request) -> None:
        while not await self._news(request):
            request.outbox.clear()


class _Running:
    """A request from its admission to its end, whatever ends it."""

    def __init__(
        self,
        owner: AsyncLLM,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        timeout: float | None,
        stream: bool,
    ) -> None:
        self._owner = owner
        self._prompt = prompt
        self._params = params
        self._id = request_id
        self._timeout = timeout
        self._stream = stream
        self._has_room = False
        self._aborted = False

    async def __aenter__(self) -> Request:
        owner = self._owner
        if self._id in owner._reserved:
            raise InvalidRequestError(f"request_id={self._id!r}: a request with this id is running")
        owner._reserved.add(self._id)
        try:
            request = self._request()  # refuse bad input before waiting for room
            await self._enter(request)
        except BaseException:
            owner._reserved.discard(self._id)
            raise
        try:
            owner._waiters[self._id] = (asyncio.get_running_loop(), asyncio.Event())
            await asyncio.wrap_future(owner._driver.add(request, aborted=self._aborted))
        except BaseException:
            owner._driver.abort(self._id)
            self._leave()
            raise
        return request

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._owner._driver.abort(self._id)
        self._leave()

    async def _enter(self, request: Request) -> None:
        """Wait for room. A request whose time passes meanwhile, or that is aborted, goes in without: the engine ends it
        before it runs."""
        left = None if request.expires is None else request.expires - self._owner._llm.engine.core.clock()
        self._owner._outside[self._id] = self
        try:
            async with asyncio.timeout(left) as self._limit:
                self._has_room = await self._owner._slots.acquire()
        except TimeoutError:
            pass
        finally:
            del self._owner._outside[self._id]

    def stop_waiting(self) -> None:
        """It was aborted while it waited for room."""
        self._aborted = True
        self._limit.reschedule(asyncio.get_running_loop().time())

    def _leave(self) -> None:
        self._owner._waiters.pop(self._id, None)
        if self._has_room:
            self._owner._slots.release()
        self._owner._reserved.discard(self._id)

    def _request(self) -> Request:
        engine = self._owner._llm.engine
        prompt = self._prompt
        if self._timeout is not None:
            check_seconds("timeout", self._timeout)
            fields = dict(prompt) if isinstance(prompt, Mapping) else {_key(prompt): prompt}
            prompt = {**fields, "timeout_ms": self._timeout * 1000}
        return engine.intake.request(self._id, prompt, self._params, now=engine.core.clock(), stream=self._stream)


def _key(prompt: Any) -> str:
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"


def _joined(request: Request) -> list[StreamDelta]:
    """Take what the engine left in the outbox, one delta per completion."""
    waiting: dict[int, list[StreamDelta]] = {}
    while request.outbox:
        delta = request.outbox.popleft()
        waiting.setdefault(delta.index, []).append(delta)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in waiting.values()]


def _join(parts: Sequence[StreamDelta]) -> StreamDelta:
    """Consecutive deltas of one completion as one."""
    last = parts[-1]
    return StreamDelta(
        request_id=last.request_id,
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        error=last.error,
    )
