"""``deepinfer new-plugin``: a small plugin of one kind that works, to start from."""

from __future__ import annotations

import click


@click.command("new-plugin")
@click.argument("name")
@click.option("--kind", required=True, metavar="KIND", help="scheduler, speculation, constraint, metrics or model.")
@click.option("--directory", metavar="DIR", help="Where to write it; a new folder of the distribution's name here.")
def new_plugin(name: str, kind: str, directory: str | None) -> None:
    """Write a plugin called NAME. It works as it is; its tests say what it does.

    NAME is a lower-case identifier that no plugin has.
    """
    from deepinfer_core.scaffold import new_plugin as write_plugin

    files = write_plugin(name, kind, directory=directory)
    root = next(file.parent for file in files if file.name == "pyproject.toml")
    for file in files:
        click.echo(file)
    click.echo(f"\nnext:\n  pip install -e {root}\n  pytest {root}")
