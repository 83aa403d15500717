"""Whole models: the backend against the reference operators, through the engine as users run it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from deepinfer_core import LLM, SamplingParams
from deepinfer_core.api import PlanError

from .case import Case, Mismatch, Refused, Tier
from .target import HOST, REFERENCE, Target
from .tiny_models import DEEPSEEK_V4, QWEN3, QWEN3_WINDOW, describe, write_checkpoint

MODELS: Mapping[str, Mapping[str, Any]] = {"qwen3": QWEN3, "qwen3,window": QWEN3_WINDOW, "deepseek_v4": DEEPSEEK_V4}
LENGTHS, NEW = (5, 33, 17, 1, 40), 24
SLACK = 8.0
"""How much farther from the float64 model than the reference operators in the same dtype a backend may be."""

_ENGINE_OPS = ("runner.input_ids", "runner.slot_mapping", "runner.append_tokens", "sampling.stage", "kv_layout.paged")


@attrs.frozen(kw_only=True)
class Answers:
    """What an engine said: per prompt, log-probabilities of every position ``[n, vocab]``, greedy and seeded tokens,
    and the difference between the two best tokens at each greedy position."""

    logprobs: list[torch.Tensor]
    greedy: list[list[int]]
    margins: list[list[float]]
    seeded: list[list[int]]


@attrs.frozen(kw_only=True)
class Subject:
    """A tiny model, and the folders its checkpoints lie in."""

    name: str
    narrow: Path
    wide: Path
    ops: tuple[str, ...]
    vocab: int


def subject(target: Target, name: str) -> Subject:
    """Write the checkpoints of a model, once for a target."""
    key = f"model {name}"
    if key not in target.facts:
        assert target.registry is not None
        folder = Path(tempfile.mkdtemp(prefix="conformance-"))
        target.on_close.append(partial(_remove, folder))
        config = MODELS[name]
        spec = describe(config, target.registry, "float32")
        for part, dtype in (("narrow", "bfloat16"), ("wide", "float64")):
            write_checkpoint(folder / part, config, spec, dtype)
        ops = tuple(dict.fromkeys([*(request.op for request in spec.ops.values()), *_ENGINE_OPS]))
        target.facts[key] = Subject(
            name=name, narrow=folder / "narrow", wide=folder / "wide", ops=ops, vocab=spec.vocab_size
        )
    found: Subject = target.facts[key]
    return found


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def answers(target: Target, name: str, who: str) -> Answers:
    """Answers of ``"backend"``, of the ``"reference"`` operators in the backend's dtype, or of the ``"definition"``
    in float64; asked once for a target."""
    key = f"answers {name} {who}"
    if key not in target.facts:
        model = subject(target, name)
        with open_engine(target, model, who) as llm:
            target.facts[key] = ask_engine(llm, prompts(model))
    found: Answers = target.facts[key]
    return found


def open_engine(target: Target, model: Subject, who: str, **settings: Any) -> LLM:
    """An engine over a tiny model. Raises Refused when the backend cannot run it."""
    own = who == "backend" and target.backend != REFERENCE
    options: dict[str, Any] = {
        "kv_cache.block_size": 16,
        "kv_cache.num_blocks": 65,
        "scheduling.max_running": 8,
        "scheduling.max_batch_tokens": 48,
        "logging.progress": False,
        "logging.level": "error",
        **settings,
    }
    if who == "backend":
        options["features.batch_invariant"] = "batch_invariant" in target.demands
    if own:
        options["plugins.paths"] = tuple(target.plugin_files)
    else:  # the core's own plugins alone: a stage that another one adds has no reference operator
        options |= {"plugins.allow": (), "ops": dict.fromkeys(model.ops, (REFERENCE,))}
    if who != "definition":
        options["model.dtype"] = target.dtype
    folder = model.wide if who == "definition" else model.narrow
    try:
        return LLM(folder, accelerator=target.backend if own else HOST, **options)
    except PlanError as error:
        raise Refused(str(error)) from error


def prompts(model: Subject) -> list[list[int]]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(0, model.vocab, (length,), generator=draw).tolist() for length in LENGTHS]


def ask_engine(llm: LLM, batch: Sequence[list[int]]) -> Answers:
    """Greedy tokens with everything about the prompts, then seeded ones."""
    greedy = llm.generate(
        list(batch),
        SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2, prompt_logprobs=-1),
        progress=False,
    )
    seeded = llm.generate(
        list(batch),
        [SamplingParams(temperature=0.9, seed=seed, max_tokens=NEW, ignore_eos=True) for seed in range(len(batch))],
        progress=False,
    )
    return Answers(
        logprobs=[_table(output.prompt_logprobs or ()) for output in _finished(greedy)],
        greedy=[list(output.outputs[0].token_ids) for output in greedy],
        margins=[[_margin(row) for row in output.outputs[0].logprobs or ()] for output in greedy],
        seeded=[list(output.outputs[0].token_ids) for output in _finished(seeded)],
    )


def _finished(outputs: Sequence[Any]) -> Sequence[Any]:
    for number, output in enumerate(outputs):
        if output.error is not None:
            raise Mismatch(f"model, request {number}: found error {output.error}, expected {NEW} tokens")
    return outputs


def _table(rows: Sequence[Mapping[int, Any] | None]) -> torch.Tensor:
    """Log-probabilities of the whole vocabulary; the first token of a prompt has none."""
    tables = [[row[token].logprob for token in range(len(row))] for row in rows if row is not None]
    return torch.tensor(tables, dtype=torch.float64)


def _margin(row: Mapping[int, Any]) -> float:
    best = sorted((entry.logprob for entry in row.values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else float("inf")


def error_of(found: Answers, truth: Answers) -> torch.Tensor:
    """Largest difference of a log-probability at each prompt position."""
    parts = [
        (a - b).abs().amax(1) for a, b in zip(found.logprobs, truth.logprobs, strict=True) if a.numel() and b.numel()
    ]
    return torch.cat(parts)


def tolerance(target: Target, name: str) -> float:
    """:data:`SLACK` times what the reference operators in the same dtype are off from the float64 model."""
    truth = answers(target, name, "definition")
    return SLACK * float(error_of(answers(target, name, "reference"), truth).max())


def _logits(name: str, target: Target) -> str:
    """Log-probabilities of every prompt position, nine in ten where a 16-bit dtype may flip a choice of experts."""
    mine = answers(target, name, "backend")
    off, bound = error_of(mine, answers(target, name, "definition")), tolerance(target, name)
    allowed = 0 if target.dtype == "float32" else len(off) // 10
    wrong = (~(off <= bound)).nonzero().flatten().tolist()
    if len(wrong) > allowed:
        raise Mismatch(
            f"model {name}: log-probabilities at prompt position {wrong[0]} are off by {float(off[wrong[0]]):.3g} from "
            f"the float64 model, expected at most {bound:.3g} ({SLACK:g} times the reference operators in "
            f"{target.dtype}); "
            f"{len(wrong)} of {len(off)} positions are off"
        )
    return f"{target.backend} off by {float(off.max()):.2g} of {bound:.2g}"


def _greedy(name: str, target: Target) -> str:
    """The same text as the reference operators, up to a tie that is nearer than the tolerance."""
    mine, theirs = answers(target, name, "backend"), answers(target, name, "reference")
    bound = 2 * tolerance(target, name)
    ties = 0
    for number, (found, expected) in enumerate(zip(mine.greedy, theirs.greedy, strict=True)):
        place = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
        if place is None:
            continue
        if theirs.margins[number][place] > bound:
            raise Mismatch(
                f"model {name}, request {number}, output token {place}: found {found[place]}, expected "
                f"{expected[place]}, which is ahead by {theirs.margins[number][place]:.3g}, tolerance {bound:.3g}"
            )
        ties += 1
    if ties == len(mine.greedy):
        raise Mismatch(f"model {name}: every text ends in a near tie, expected some to be the reference's")
    return f"{target.backend} {len(mine.greedy)} texts, {ties} up to a near tie"


def _ahead(name: str, target: Target) -> str:
    """A loop that runs one step ahead gives the tokens of one that does not, greedy and seeded."""
    model = subject(target, name)
    said = []
    for ahead in (True, False):
        with open_engine(target, model, "backend", **{"scheduling.async_scheduling": ahead}) as llm:
            said.append(ask_engine(llm, prompts(model)))
    for what in ("greedy", "seeded"):
        for number, (a, b) in enumerate(zip(getattr(said[0], what), getattr(said[1], what), strict=True)):
            if a != b:
                raise Mismatch(f"model {name}, {what} request {number}: one step ahead found {a}, expected {b}")
    return f"{target.backend} {2 * len(said[0].greedy)} texts"


def _repeated(name: str, target: Target) -> str:
    """The same requests again, now with their prompts in the prefix cache: the same tokens."""
    model = subject(target, name)
    with open_engine(target, model, "backend") as llm:
        first, second = (ask_engine(llm, prompts(model)) for _ in range(2))
    bound = 2 * tolerance(target, name)
    for number, (a, b) in enumerate(zip(first.greedy, second.greedy, strict=True)):
        place = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if place is not None and first.margins[number][place] > bound:
            raise Mismatch(f"model {name}, request {number} asked again: found {b}, expected {a}")
    return f"{target.backend} {len(first.greedy)} texts"


def cases(dtype: str) -> Iterator[Case]:
    """Every case of whole models."""
    checks: tuple[tuple[str, str, Tier, Callable[[str, Target], str], bool], ...] = (
        ("qwen3", "logits", "boots", _logits, True),
        ("qwen3", "greedy", "boots", _greedy, True),
        ("qwen3", "one_step_ahead", "serves", _ahead, True),
        ("qwen3", "repeated", "serves", _repeated, True),
        ("qwen3,window", "logits", "serves", _logits, True),
        ("qwen3,window", "greedy", "serves", _greedy, True),
        ("deepseek_v4", "logits", "full", _logits, False),
        ("deepseek_v4", "greedy", "full", _greedy, False),
        ("deepseek_v4", "one_step_ahead", "full", _ahead, False),
        ("deepseek_v4", "repeated", "full", _repeated, False),
    )
    for name, check_name, tier, check, required in checks:
        yield Case(
            id=f"model[{name}]/{dtype}/{check_name}",
            family="model",
            tier=tier,
            check=partial(check, name),
            required=required,
        )
