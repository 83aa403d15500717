"""Toy drafters, right or wrong to order, and engines with and without them side by side.

What follows a row the drafters know from the oracle or have been told.

Every drafter keeps what the engine said to it: ``shown`` the rows, ``heard`` the verdicts, ``forgotten`` the ends,
and ``wrong`` whatever broke the contract (raising would not do: the engine lives through a drafter that raises).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, cast

import attrs

from deepinfer_core import LLM, RequestOutput
from deepinfer_core.api import Draft, DraftRow, Verified

from .oracle import HashOracle

Completion = tuple[str, int]

TOLD: dict[Completion, list[int]] = {}
"""Whole right texts, prompt and continuation, for ``knows="told"``."""

ALL = 10**6


@attrs.frozen(kw_only=True)
class DrafterSettings:
    """How the drafters of this plugin behave.

    Attributes:
        knows: where the right tokens come from: ``count`` and ``hash`` compute them, greedy.
        vocab: modulus of COUNT, vocabulary of PREFIXHASH, and what wrong tokens stay below.
        windows: of PREFIXHASH's groups; 0 stands for none.
        depth: tokens in a draft. right: how many of them are right, from the first.
        token: what ``early`` proposes after the right ones.
        every: ``raising`` raises in each call of this number. only: requests whose id it is in get drafts.
        confidence: what comes with the drafts.
    """

    knows: Literal["told", "count", "hash"] = "told"
    vocab: int = 64
    windows: tuple[int, ...] = (0,)
    depth: int = 5
    right: int = ALL
    token: int = 0
    every: int = 2
    seed: int = 0
    only: str = ""
    confidence: Literal["none", "zero", "one", "nan", "random", "short", "text"] = "none"


class ToyDrafter:
    """Proposes ``depth`` tokens, the first ``right`` of them right and all others wrong."""

    def __init__(self, settings: DrafterSettings) -> None:
        self.settings = settings
        self.oracle = HashOracle(settings.vocab, [window or None for window in settings.windows])
        self.random = random.Random(settings.seed)
        self.calls = 0
        self.shown: list[tuple[Completion, int]] = []
        self.heard: list[Verified] = []
        self.forgotten: list[Completion] = []
        self.wrong: list[str] = []
        self._lengths: dict[Completion, int] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        self.calls += 1
        for row in rows:
            self._check(row)
        return [Draft(tokens=tokens, confidence=self._confidence(len(tokens))) for tokens in map(self.tokens, rows)]

    def verified(self, results: Sequence[Verified]) -> None:
        self.heard += results
        for result in results:
            if not 0 <= result.accepted <= result.proposed or not 0 < result.proposed <= ALL:
                self.wrong.append(f"accepted {result.accepted} of {result.proposed}")
            if (result.request_id, result.child) not in self._lengths:
                self.wrong.append(f"verdict on {result.request_id}, which was not shown or is forgotten")

    def forget(self, request_id: str, child: int) -> None:
        self.forgotten.append((request_id, child))
        self._lengths.pop((request_id, child), None)

    def tokens(self, row: DraftRow) -> Any:
        """The draft of one row."""
        if self.settings.only not in row.request_id:
            return []
        return self.partly_right(row, self.settings.right, self.settings.depth)

    def partly_right(self, row: DraftRow, right: int, depth: int) -> list[int]:
        vocab = self.settings.vocab
        return [t if i < right else (t + 1 + i) % vocab for i, t in enumerate(self.following(row, depth))]

    def following(self, row: DraftRow, count: int) -> list[int]:
        """What the model will say."""
        past: list[int] = row.tokens.tolist()
        if self.settings.knows == "count":
            return [(past[-1] + 1 + i) % self.settings.vocab for i in range(count)]
        if self.settings.knows == "hash":
            return self.oracle.tokens(past, count)
        known = self._told(row, past)[len(past) : len(past) + count]
        return known + [0] * (count - len(known))

    def _told(self, row: DraftRow, past: list[int]) -> list[int]:
        """The text of this completion; failing that, any that begins like it."""
        texts = (TOLD.get((row.request_id, row.child), []), *TOLD.values())
        return next((text for text in texts if text[: len(past)] == past), past)

    def _check(self, row: DraftRow) -> None:
        completion = (row.request_id, row.child)
        self.shown.append((completion, len(row.tokens)))
        if row.tokens.flags.writeable:
            self.wrong.append("tokens can be written to")
        if row.max_drafts < 1:
            self.wrong.append(f"max_drafts={row.max_drafts}")
        if not 1 <= row.prompt_len <= len(row.tokens):
            self.wrong.append(f"prompt_len={row.prompt_len} of {len(row.tokens)}")
        if len(row.tokens) < self._lengths.get(completion, 0):
            self.wrong.append(f"{completion} became shorter")
        self._lengths[completion] = len(row.tokens)

    def _confidence(self, count: int) -> Any:
        kind = self.settings.confidence
        if kind == "random":
            return [self.random.random() for _ in range(count)]
        values = {"zero": 0.0, "one": 1.0, "nan": float("nan")}
        answers: dict[str, Any] = {"none": None, "short": [0.5], "text": "high"}
        return [values[kind]] * count if kind in values else answers[kind]


class Silent(ToyDrafter):
    """Proposes nothing."""

    def tokens(self, row: DraftRow) -> Any:
        return []


class Early(ToyDrafter):
    """After the right tokens proposes one that may end the request, and goes on."""

    def tokens(self, row: DraftRow) -> Any:
        draft = self.partly_right(row, ALL, self.settings.depth)
        draft[self.settings.right : self.settings.right + 1] = [self.settings.token]
        return draft


class Outside(ToyDrafter):
    """After the right tokens proposes ids that are none, in turn; right ones again after those."""

    ids = (-1, 10**6, -(2**31), 64, 2**40)

    def tokens(self, row: DraftRow) -> Any:
        draft = self.partly_right(row, ALL, self.settings.depth)
        draft[self.settings.right : self.settings.right + 1] = [self.ids[self.calls % len(self.ids)]]
        return draft


class Excessive(ToyDrafter):
    """Proposes far more than asked for."""

    def tokens(self, row: DraftRow) -> Any:
        return self.partly_right(row, self.settings.right, 3 * row.max_drafts + 50)


class Varying(ToyDrafter):
    """Another length and another number of right tokens for each row."""

    def tokens(self, row: DraftRow) -> Any:
        depth = self.random.choice([0, 1, 2, 3, 5, 8])
        return self.partly_right(row, self.random.randrange(depth + 2), depth)


class Raising(Varying):
    """Raises now and then, wherever it is called."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.turns = {"propose": 0, "verified": 0, "forget": 0}

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        answer = super().propose(rows)
        self._maybe_raise("propose")
        return answer

    def verified(self, results: Sequence[Verified]) -> None:
        super().verified(results)
        self._maybe_raise("verified")

    def forget(self, request_id: str, child: int) -> None:
        super().forget(request_id, child)
        self._maybe_raise("forget")

    def _maybe_raise(self, call: str) -> None:
        self.turns[call] += 1
        if self.turns[call] % self.settings.every == 0:
            raise RuntimeError(f"{call} fails")


class Garbage(ToyDrafter):
    """Answers in turn with what is no answer. ``answers`` says how many kinds there are."""

    answers = 16

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        drafts = super().propose(rows)
        tokens = [list(draft.tokens) for draft in drafts]
        kinds: list[Any] = [
            drafts[:-1],
            [*drafts, drafts[0]],
            None,
            7,
            "draft",
            [None] * len(rows),
            tokens,
            iter(()),
            [Draft(tokens=None) for _ in rows],  # type: ignore[arg-type]
            [Draft(tokens=[[1, 2], [3, 4]]) for _ in rows],  # type: ignore[list-item]
            [Draft(tokens=["1", "x"]) for _ in rows],  # type: ignore[list-item]
            [Draft(tokens=[float("nan")] * 2) for _ in rows],  # type: ignore[list-item]
            [Draft(tokens=[2**70]) for _ in rows],
            [Draft(tokens=[None]) for _ in rows],  # type: ignore[list-item]
            [Draft(tokens="12") for _ in rows],  # type: ignore[arg-type]
            [Draft(tokens={1: 2}) for _ in rows],  # type: ignore[arg-type]
        ]
        assert len(kinds) == self.answers
        return kinds[self.calls % len(kinds)]


# ---- engines with drafters


def drafting(method: str, *, max_draft_tokens: int = 8, **settings: Any) -> dict[str, Any]:
    """Settings of an engine that uses one of these drafters."""
    return {
        "speculation__method": method,
        "speculation__max_draft_tokens": max_draft_tokens,
        "plugins__paths": ["toys.plugin", "toys.drafter_plugin"],
        **{f"plugins__drafter_plugin__{name}": value for name, value in settings.items()},
    }


def drafter_of(llm: LLM) -> ToyDrafter:
    assert llm.engine.core.speculator is not None
    return cast(ToyDrafter, llm.engine.core.speculator.drafter)


def check_drafter(llm: LLM) -> None:
    """The engine kept the contract with its drafter, and counts what it told it."""
    drafter, speculator = drafter_of(llm), llm.engine.core.speculator
    assert speculator is not None
    assert drafter.wrong == []
    assert speculator.proposed == sum(verdict.proposed for verdict in drafter.heard)
    assert speculator.accepted == sum(verdict.accepted for verdict in drafter.heard)


@attrs.frozen
class Twins:
    """The same engine without and with a drafter. As both number requests alike, the drafter knows each by its id."""

    plain: LLM
    drafting: LLM

    def generate(self, prompts: Any, params: Any) -> list[RequestOutput]:
        """The drafting engine's results, which are those of the plain one; its drafter was told the right tokens."""
        expected = self.plain.generate(prompts, params)
        TOLD.clear()
        tell(expected)
        outputs = self.drafting.generate(prompts, params)
        assert_same(outputs, expected)
        check_drafter(self.drafting)
        return outputs


def tell(outputs: Sequence[RequestOutput]) -> None:
    """The drafters shall know these results."""
    TOLD.update(
        ((output.request_id, c.index), [*output.prompt_token_ids, *c.token_ids])
        for output in outputs
        for c in output.outputs
    )


def assert_same(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], tolerance: float = 1e-5) -> None:
    """Results agree in everything; log-probabilities up to ``tolerance``."""
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        for mine, theirs in zip(output.outputs, wanted.outputs, strict=True):
            without = ("logprobs",)
            assert _fields(mine, without) == _fields(theirs, without)
            assert_logprobs_same(mine.logprobs, theirs.logprobs, tolerance)
        assert_logprobs_same(output.prompt_logprobs, wanted.prompt_logprobs, tolerance)
        assert output.error == wanted.error


def assert_logprobs_same(mine: Any, theirs: Any, tolerance: float) -> None:
    assert (mine is None) == (theirs is None)
    for left, right in zip(mine or (), theirs or (), strict=True):
        assert (left or {}).keys() == (right or {}).keys()
        for token, entry in (left or {}).items():
            assert math.isclose(entry.logprob, right[token].logprob, rel_tol=0, abs_tol=tolerance)
            assert entry.rank == right[token].rank


def _fields(record: Any, without: Sequence[str]) -> dict[str, Any]:
    return attrs.asdict(record, filter=lambda field, _: field.name not in without)
