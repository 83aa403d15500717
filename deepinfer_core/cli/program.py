"""The program's commands: a table of the built-in ones, and plugins' commands looked up by name."""

from __future__ import annotations

from difflib import get_close_matches

import click

from deepinfer_core import __version__

from .command_host import ProgramHost

BUILT_IN = {
    "generate": ("Write text with a model.", "deepinfer_core.cli.generate:generate"),
    "plugins": ("List installed plugins, and why one is not used.", "deepinfer_core.cli.plugins:plugins"),
    "explain": ("Show what would run, and who decided it.", "deepinfer_core.cli.explain:explain"),
    "bench": (
        "Measure a model: latency, throughput, and where the time goes.",
        "deepinfer_core.cli.bench:bench",
    ),
    "inspect": ("Show what a checkpoint holds and what memory it needs.", "deepinfer_core.cli.inspect:inspect"),
    "conformance": (
        "Ask BACKEND whether it does what the contracts say.",
        "deepinfer_core.cli.conformance:conformance",
    ),
    "new-backend": ("Write a project for hardware called NAME.", "deepinfer_core.cli.new_backend:new_backend"),
    "new-plugin": ("Write a plugin called NAME.", "deepinfer_core.cli.new_plugin:new_plugin"),
    "doctor": ("Look at plugins, devices and settings, and say what mends them.", "deepinfer_core.cli.doctor:doctor"),
}
"""Name -> (help, where the command is)."""


class Program(click.Group):
    """A group that imports a command only to run it, and loads plugins only for a command it does not know."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BUILT_IN)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in BUILT_IN:
            from deepinfer_core.api import LazyRef

            command: click.Command = LazyRef(BUILT_IN[name][1]).load()
            return command
        from .plugin_commands import find_command

        return find_command(name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            from .plugin_commands import command_names

            near = get_close_matches(name, [*BUILT_IN, *command_names()], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ", nor does a plugin have one"
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (help, _) in BUILT_IN.items()])
        with formatter.section("Commands of plugins"):
            formatter.write_text("`deepinfer plugins --load` lists them.")


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"deepinfer {__version__}")
        ctx.exit()


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.pass_context
def program(ctx: click.Context, /) -> None:
    """LLM inference whose every part is a plugin. Start with: deepinfer generate --model demo --prompt "Hello" """
    ctx.obj = ProgramHost()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
