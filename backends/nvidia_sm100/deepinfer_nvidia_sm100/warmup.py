"""``deepinfer warmup``: every kernel that a model needs is compiled, so that no later start or request waits for it.

Compiled kernels lie in Triton's cache (``TRITON_CACHE_DIR``, else ``~/.triton/cache``). A kernel is compiled anew for
other types, sizes and alignments, and which of these occur depends on the model and on the rows of a step. So this
opens the model as a server would, which records its decode steps, and runs requests of every kind.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from deepinfer_core.api import CommandHost, ConfigError, DeviceError

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Most rows of a product, by which its tile is chosen: of a step's, and of the logits', whose rows are its requests."""
LENGTHS = (*ROWS, 5, 40, 70, 250, 700, 2048)
"""Tokens of the prompts: steps of few and of many rows, block tables of one, of some and of sixteen blocks."""
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 1},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "bias": {"logit_bias": {1: 0.5}},
    "masks": {"allowed_token_ids": (0, 1, 2, 3), "min_tokens": 2},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 3},
    "everything": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.1},
}
SHARED = 704
"""Tokens of a prefix that is found again: a few rows over a long context, alone and beside others."""
NEW_TOKENS = 3
TOGETHER = 5
"""Requests of one kind that run together, after one alone."""
MANY = 128
"""Requests of some kinds that run together, too: so many have kernels of their own."""
OF_MANY = ("seeded", "top-p", "min-p")

Batch = tuple[str, list[list[int]], list[Any]]


def batches(host: CommandHost, longest: int) -> Iterator[Batch]:
    """A name, prompts of token ids, and their parameters: what is run, one after the other.

    ``longest``: tokens of context that the model takes.
    """
    greedy = host.sampling_params(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    room = longest - NEW_TOKENS
    for length in dict.fromkeys(min(length, room) for length in LENGTHS):
        yield f"a prompt of {length}", [[3] * length], [greedy]
    for lengths in ((9, 130, 1, 33), (1, 3, 8, 2)):
        mixed = [[3] * min(length, room) for length in lengths]
        yield "prompts together", mixed, [greedy] * len(mixed)
    shared = [3] * min(SHARED, room - 2)
    for others in ([], [[*shared, 7, 8]], [[*shared, 9, 10], [9] * min(40, room)]):
        some = [[*shared, 5, 6 + len(others)], *others]
        yield "prompts after a prefix", some, [greedy] * len(some)
    for count in ROWS:
        yield f"{count} together", [[3, 4, 5]] * count, [greedy] * count
    for name, fields in SAMPLING.items():
        params = host.sampling_params(max_tokens=NEW_TOKENS, ignore_eos=True, **fields)
        for count in (1, TOGETHER, *([MANY] if name in OF_MANY else [])):
            yield name, [[3, 4, 5 + i % 8] for i in range(count)], [params] * count


def cached_kernels() -> dict[str, str]:
    """Compiled kernels in Triton's cache: path -> name."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return {str(file): file.stem for file in folder.rglob("*.cubin")} if folder.is_dir() else {}


def setting(text: str) -> tuple[str, Any]:
    """``KEY=VALUE``; a value in JSON, or else text.

    Raises:
        ConfigError: there is no equals sign.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def run(llm: Any, batch: Batch) -> None:
    """Run one batch.

    Raises:
        DeviceError: one of its requests failed.
    """
    name, prompts, params = batch
    for output in llm.generate(prompts, params, progress=False):
        if output.error is not None:
            raise DeviceError(f"warmup: {name}: {output.error}")


@click.command()
@click.argument("model")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting, as users will run it.")
@click.pass_obj
def warmup(host: CommandHost, model: str, settings: Sequence[str]) -> None:
    """Compile every kernel that MODEL needs on this GPU, so that no later start waits for it.

    Opens the model with its weights. Kernels stay in Triton's cache: TRITON_CACHE_DIR, or ~/.triton/cache. Give the
    settings that will be used, above all model.dtype, model.max_model_len and features.
    """
    given = dict(setting(text) for text in settings)
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "warmup: torch sees no GPU on this machine, and kernels compile for the GPU they run on; check: nvidia-smi"
        )
    from .warm_tables import run_tables

    began, before = time.monotonic(), len(cached_kernels())
    click.echo(f"opening {model}", err=True)
    with host.open_llm(model, {"accelerator": "nvidia_sm100", **given}) as llm:
        opened = time.monotonic() - began
        wanted = list(batches(host, int(llm.engine.planned.spec.max_model_len)))
        with click.progressbar(wanted, label="running requests of every kind", file=sys.stderr) as bar:
            for batch in bar:
                run(llm, batch)
        run_tables(llm)
    after = len(cached_kernels())
    spent = time.monotonic() - began
    click.echo(f"{after - before} kernels compiled, {after} in the cache; {opened:.1f} s to open, {spent:.1f} s in all")
