"""``deepinfer explain``: the plan, with every choice and its reason, and the settings with their sources."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs
import click

from .options import EngineOptions, engine_options
from .output import print_json, print_table

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig


@click.command()
@click.option("--why", is_flag=True, help="Also the candidates that were not chosen, with their reasons.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@engine_options
def explain(options: EngineOptions, why: bool, as_json: bool) -> None:
    """Show what would run, and who decided it. Reads no weights.

    Without --model: the settings, the plugins and the device.
    """
    config = options.load()
    decided = _without_model(config) if config.model.path is None else _with_model(config, config.model.path)
    if as_json:
        print_json(decided)
    else:
        _print(decided, why=why)


def _with_model(config: EngineConfig, model: str) -> dict[str, Any]:
    from deepinfer_core.checkpoint import open_checkpoint
    from deepinfer_core.engine.llm import explain as explain_engine
    from deepinfer_core.engine.planning import make_plan

    with open_checkpoint(model) as checkpoint:
        planned = make_plan(config, checkpoint)
    plan = planned.plan
    return {
        **explain_engine(plan, planned.config),
        "facts": {
            "model": str(checkpoint.path),
            "architecture": planned.spec.architecture,
            "compute dtype": planned.spec.dtype,
            "max model len": planned.spec.max_model_len,
            "accelerator": plan.accelerator,
            "evidence": plan.device["evidence"],
            "policy": plan.policy,
            **plan.facts,
        },
        "plugins": [attrs.asdict(record) for record in plan.plugins],
        "objections": list(planned.objections),
    }


def _without_model(config: EngineConfig) -> dict[str, Any]:
    from deepinfer_core.config import shown_values
    from deepinfer_core.engine.planning import open_registry, pick_device

    registry = open_registry(config)
    device = pick_device(config, registry).device
    return {
        "facts": {
            "accelerator": device.backend,
            "evidence": device.evidence,
            "arch": device.arch,
            "devices": device.count,
        },
        "plugins": [attrs.asdict(record) for record in registry.records],
        "config": [attrs.asdict(row) for row in shown_values(config)],
    }


def _print(decided: dict[str, Any], *, why: bool) -> None:
    print_table("facts", ("what", "value"), decided["facts"].items())
    plugins = [(record["name"], record["distribution"], record["version"]) for record in decided["plugins"]]
    print_table("plugins", ("name", "distribution", "version"), plugins)
    rows = decided.get("rows", [])
    if rows:
        columns = ["slot", "op", "provider", "source", "score", "reason"]
        if any(row["proof"] for row in rows):
            columns.append("proof")
        print_table("operators", columns, [[row[column] for column in columns] for row in rows])
    # All sampling stages are one operator; that a provider serves another stage is no reason worth reading.
    losers = [
        (row["slot"], loser["provider"], loser["reason"])
        for row in rows
        for loser in row["losers"]
        if not loser["reason"].startswith("serves stage")
    ]
    if why and losers:
        print_table("not chosen", ("slot", "provider", "reason"), losers)
    for objection in decided.get("objections", ()):
        click.echo(f"warning: {objection}", err=True)
    settings = [(row["path"], _shown(row["value"]), row["source"]) for row in decided["config"]]
    print_table("settings", ("path", "value", "source"), settings)


def _shown(value: Any) -> str:
    """A value as it would be written after ``--set``."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
