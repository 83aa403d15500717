"""``deepinfer generate``: prompts in, text or JSON out."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import attrs
import click

from deepinfer_core.api import ConfigError, InvalidRequestError

from .guard import one_line
from .options import EngineOptions, run_options
from .output import print_json
from .prompts import PromptItem, read_prompts
from .sampling_options import sampling_arguments, sampling_options

if TYPE_CHECKING:
    from deepinfer_core.engine.outputs import RequestOutput, StreamDelta
    from deepinfer_core.engine.sampling_params import SamplingParams

REQUEST_FAILED = 1


_EPILOG = (
    "A prompt file holds one JSON object per line: prompt, messages or prompt_token_ids, and any sampling parameter "
    "for that prompt alone, by its name in Python."
)


@click.command(epilog=_EPILOG)
@click.option("--prompt", "prompts", metavar="TEXT", multiple=True, help="May be repeated. Else standard input.")
@click.option("--prompt-file", metavar="JSONL", help="Many prompts; '-' is standard input.")
@click.option("--chat", is_flag=True, help="Put each prompt to the model as a user's message.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per result.")
@click.option("--stream", is_flag=True, help="Write text as it comes.")
@sampling_options
@run_options
def generate(
    options: EngineOptions,
    prompts: tuple[str, ...],
    prompt_file: str | None,
    chat: bool,
    as_json: bool,
    stream: bool,
    **sampling: Any,
) -> int:
    """Write text with a model.

    deepinfer generate --model demo --chat --prompt "What is a plugin?"
    """
    config = options.load()
    if config.model.path is None:
        raise ConfigError("no model: give --model PATH, or --model demo for the small one that is packaged")
    arguments = sampling_arguments(sampling)
    if stream and not as_json and arguments.get("n", 1) != 1:
        raise click.UsageError("--stream shows one completion at a time; add --json, or leave out --n")
    items = read_prompts(prompts, prompt_file, sys.stdin, chat=chat)
    params = [_sampling_params(arguments, item) for item in items]

    from deepinfer_core import LLM

    with LLM(config.model.path, config=config) as llm:
        if stream:
            return _stream(llm, items, params, as_json=as_json)
        return _print_results(_complete(llm, items, params), as_json=as_json)


def _sampling_params(arguments: Mapping[str, Any], item: PromptItem) -> SamplingParams:
    from deepinfer_core.engine.sampling_params import SamplingParams

    names = [name for name in inspect.signature(SamplingParams).parameters if name != "self"]
    for name in item.sampling:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"{item.origin}: unknown sampling parameter {name!r}{hint}")
    try:
        return SamplingParams(**{**arguments, **item.sampling})
    except InvalidRequestError as error:
        origin = f"{item.origin}: " if item.sampling else ""  # else the command line alone is at fault
        raise InvalidRequestError(f"{origin}{error}") from None


def _complete(llm: Any, items: Sequence[PromptItem], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Results in the order of ``items``; conversations and plain prompts run as one batch each."""
    chats = [place for place, item in enumerate(items) if item.messages is not None]
    plains = [place for place, item in enumerate(items) if item.messages is None]
    results: dict[int, RequestOutput] = {}
    if plains:
        prompts = [items[place].prompt for place in plains]
        found = llm.generate(prompts, [params[place] for place in plains])
        results.update(zip(plains, found, strict=True))
    if chats:
        conversations = [items[place].messages for place in chats]
        found = llm.chat(conversations, [params[place] for place in chats])
        results.update(zip(chats, found, strict=True))
    return [results[place] for place in range(len(items))]


def _print_results(results: Sequence[RequestOutput], *, as_json: bool) -> int:
    failed = 0
    alone = sum(len(result.outputs) for result in results) == 1
    for number, result in enumerate(results):
        if as_json:
            print_json(result, indent=None)
        for output in () if as_json else result.outputs:
            label = f"[{number}]" if len(result.outputs) == 1 else f"[{number}.{output.index}]"
            click.echo(output.text if alone else f"{label} {output.text}")
        if result.error is not None:
            failed += 1
            _report(number, result.error.code, result.error.message)
    return REQUEST_FAILED if failed else 0


def _stream(llm: Any, items: Sequence[PromptItem], params: Sequence[SamplingParams], *, as_json: bool) -> int:
    failed = 0
    for number, (item, param) in enumerate(zip(items, params, strict=True)):
        for delta in _deltas(llm, item, param):
            if as_json:
                print_json({"prompt_index": number, **attrs.asdict(delta)}, indent=None)
            else:
                click.echo(delta.text, nl=False)
            sys.stdout.flush()
            if delta.error is not None:
                failed += 1
                _report(number, delta.error.code, delta.error.message)
        if not as_json:
            click.echo()
    return REQUEST_FAILED if failed else 0


def _deltas(llm: Any, item: PromptItem, params: SamplingParams) -> Iterator[StreamDelta]:
    prompt = item.prompt if item.messages is None else llm.chat_prompt(item.messages)[0]
    deltas: Iterator[StreamDelta] = llm.stream(prompt, params)
    return deltas


def _report(number: int, code: str, message: str) -> None:
    click.echo(f"error: prompt {number}: {code}: {one_line(message)}", err=True)
