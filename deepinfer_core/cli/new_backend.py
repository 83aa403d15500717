"""``deepinfer new-backend``: a project that works, to be replaced piece by piece."""

from __future__ import annotations

import click


@click.command("new-backend")
@click.argument("name")
@click.option("--directory", metavar="DIR", help="Where to write it; a new folder of the distribution's name here.")
@click.option(
    "--device-type",
    metavar="TYPE",
    default="cpu",
    show_default=True,
    help="torch device type of its tensors; cpu: the host stands in for the device.",
)
def new_backend(name: str, directory: str | None, device_type: str) -> None:
    """Write a project for hardware called NAME: a device, and one operator of each family.

    Everything runs at once, on reference operators. NAME is a lower-case identifier that no plugin has.
    """
    from deepinfer_core.scaffold import new_backend as write_backend

    files = write_backend(name, directory=directory, device_type=device_type)
    root = next(file.parent for file in files if file.name == "pyproject.toml")
    for file in files:
        click.echo(file)
    click.echo(f"\nnext:\n  pip install -e {root}\n  deepinfer conformance {name} --tier boots")
