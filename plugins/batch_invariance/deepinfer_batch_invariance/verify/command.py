"""``deepinfer verify-determinism``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import click

from deepinfer_core.api import CommandHost, InvalidRequestError

from .matrix import Matrix, Probe, Result, scenarios

PROMPT = (
    "Today more than half of all people live in towns, and some thirty cities have ten million inhabitants or more, "
    "most of them in Asia. Counting them is harder than it looks, since suburbs run into each other and every country "
    "draws its borders in another way. Some include villages and fields many kilometres from the last street, others "
    "end at a wall that was pulled down two hundred years ago. A list therefore says more about offices than about "
    "people, and two of them seldom agree. By the number of people who live there, the five largest cities of the "
    "world are"
)
"""Longer than a block of the cache of the models in reach, or it is never found there. Its output begins another."""


@click.command()
@click.option("--model", required=True, metavar="PATH", help="Checkpoint directory, GGUF file, or 'demo'.")
@click.option("--prompt", default=PROMPT, show_default=True, help="Text that is completed in every kind of company.")
@click.option("--prompt-ids", metavar="IDS", help="The same as token ids with commas between, for models without text.")
@click.option("--max-tokens", default=32, show_default=True, type=click.IntRange(1), help="Tokens written each time.")
@click.option("--large", is_flag=True, help="Also batches of 255, 256 and 257 requests.")
@click.option("--vary", multiple=True, metavar="KEY=VALUE", help="Also with this setting; may be repeated.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="One setting of all runs; may be repeated.")
@click.option("--no-watch", is_flag=True, help="Compare results only; faster, and does not say where a bit moved.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@click.pass_obj
def verify_determinism(
    host: CommandHost,
    *,
    model: str,
    prompt: str,
    prompt_ids: str | None,
    max_tokens: int,
    large: bool,
    vary: Sequence[str],
    sets: Sequence[str],
    no_watch: bool,
    as_json: bool,
) -> None:
    """Run one prompt alone and in every kind of company, and compare bits.

    Greedy and sampled; in batches, in chunks, from the prefix cache, preempted, one step ahead. Where something
    differs: the position, layer, operator and provider of the first bit that moved. Exit code 1 if any did.
    """
    settings = {"logging.progress": False, **dict(map(_setting, sets))}
    ids = _ids(prompt_ids) if prompt_ids else _encoded(host, model, settings, prompt)
    probes = [
        Probe(prompt=ids, params={"temperature": 0, "max_tokens": max_tokens, "logprobs": 3, "prompt_logprobs": 1}),
        Probe(
            prompt=ids, params={"temperature": 1.0, "seed": 7, "top_p": 0.95, "max_tokens": max_tokens, "logprobs": 1}
        ),
    ]
    more = {one: dict([_setting(one)]) for one in vary}
    matrix = Matrix(host, model, settings, probes, watch=not no_watch)
    results = []
    for result in matrix.run(scenarios(len(ids), max_tokens, large=large, more=more)):
        results.append(result)
        if not as_json:
            click.echo(_line(result))
    failed = [result for result in results if result.differing or result.moved]
    if as_json:
        click.echo(json.dumps([attrs.asdict(result) for result in results], indent=1))
    elif not failed:
        click.echo("no bit moved")
    if failed:
        raise SystemExit(1)


def _line(result: Result) -> str:
    if not result.happened:
        return f"{result.name}: did not come about, nothing is shown; try more --max-tokens or another --prompt"
    if not result.differing and result.moved is None:
        watched = f", {result.results} operator results" if result.results else ""
        return f"{result.name}: the same bits in {result.runs} runs{watched}"
    where = ""
    if result.moved is not None:
        m = result.moved
        where = f"; first at position {m.position}, layer {m.layer}, {m.slot} ({m.op}), provider {m.provider}"
    return f"{result.name}: {result.differing} of {result.runs} runs differ{where}"


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{text!r}: expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--prompt-ids {text!r}: expected numbers with commas between") from None


def _encoded(host: CommandHost, model: str, settings: dict[str, Any], prompt: str) -> tuple[int, ...]:
    with host.open_llm(model, {"features.batch_invariant": True, **settings}) as llm:
        if llm.tokenizer is None:
            raise InvalidRequestError("the checkpoint has no tokenizer: give --prompt-ids")
        return tuple(llm.tokenizer.encode(prompt))
