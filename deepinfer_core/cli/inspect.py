"""``deepinfer inspect``: what a checkpoint holds, and the memory it needs to run. Reads headers, no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import click

from deepinfer_core.api import DeepInferError, InvalidRequestError

from .guard import one_line
from .options import EngineOptions, engine_options
from .output import print_json, print_table, size

if TYPE_CHECKING:
    from deepinfer_core.checkpoint import Checkpoint
    from deepinfer_core.config import EngineConfig


@click.command()
@click.argument("checkpoint")
@click.option("--context", type=click.IntRange(min=1), help="Tokens of a request.  [default: the model's limit]")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests at once.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@engine_options
def inspect(options: EngineOptions, checkpoint: str, context: int | None, batch: int, as_json: bool) -> None:
    """Show what a checkpoint holds and what memory it needs.

    CHECKPOINT is a directory, a GGUF file, or a name: 'demo', or one of an installed package.
    """
    from deepinfer_core.checkpoint import open_checkpoint, summarise

    if options.model is not None:
        raise click.UsageError("the checkpoint is an argument here; leave out --model")
    config = options.load()
    with open_checkpoint(checkpoint) as opened:
        found = {"path": str(opened.path), **attrs.asdict(summarise(opened))}
        try:
            needs = _needs(config, opened, context, batch)
        except InvalidRequestError:
            raise
        except DeepInferError as error:
            needs = {"runs": False, "reason": one_line(str(error))}
    if as_json:
        print_json({**found, **needs})
    else:
        _print(found, needs)


def _needs(config: EngineConfig, checkpoint: Checkpoint, context: int | None, batch: int) -> dict[str, Any]:
    """Memory, if a loaded plugin knows the architecture; DeepInferError says why not."""
    from deepinfer_core.engine.planning import make_plan

    from .memory import cache_needs, packed_slots, weight_bytes

    planned = make_plan(config, checkpoint)
    spec = planned.spec
    if context is not None and context > spec.max_model_len:
        raise InvalidRequestError(f"--context {context}: the limit here is {spec.max_model_len} tokens")
    tokens = context or spec.max_model_len
    groups = cache_needs(spec, block_size=planned.config.kv_cache.block_size, context=tokens, batch=batch)
    weights = weight_bytes(spec, checkpoint.weights, packed_slots(planned))
    return {
        "runs": True,
        "compute_dtype": spec.dtype,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_model_len": spec.max_model_len,
        "block_size": planned.config.kv_cache.block_size,
        "context": tokens,
        "batch": batch,
        "cache_bytes_per_token": sum(group.bytes_per_token for group in groups),
        "cache_groups": groups,
        "weight_bytes": weights,
        "cache_bytes": sum(group.num_bytes for group in groups),
        "total_bytes": weights + sum(group.num_bytes for group in groups),
    }


def _print(found: dict[str, Any], needs: dict[str, Any]) -> None:
    facts: list[tuple[str, object]] = [
        ("path", found["path"]),
        ("architecture", found["architecture"]),
        ("format", found["format"]),
        ("parameters", f"{found['num_parameters']:,}"),
        ("stored", size(found["num_bytes"])),
    ]
    names = ("layers", "hidden_size", "vocab_size", "max_model_len", "compute_dtype")
    facts += [(name.replace("_", " "), needs[name]) for name in names if name in needs]
    print_table("checkpoint", ("what", "value"), facts)
    usage = [(dtype, used["tensors"], size(used["num_bytes"])) for dtype, used in found["dtypes"].items()]
    print_table("stored tensors", ("format", "tensors", "size"), usage)
    if not needs["runs"]:
        click.echo(f"does not run here: {needs['reason']}")
        return
    columns = ("group", "kind", "layers", "bytes per token", "tokens kept", "blocks", "size")
    groups = [(g.group, g.kind, g.layers, f"{g.bytes_per_token:g}", g.tokens, g.blocks, size(g.num_bytes))
              for g in needs["cache_groups"]]  # fmt: skip
    print_table("cache", columns, groups)
    totals = [(name, size(needs[f"{name}_bytes"])) for name in ("weight", "cache", "total")]
    print_table(f"memory for {needs['batch']} x {needs['context']} tokens", ("what", "size"), totals)
