"""Prints the manual page of all settings: ``python -m deepinfer_core.config.document > docs/configuration.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .original import COUNTERPARTS, NO_COUNTERPART
from .settings import FILE_VARIABLE, Setting, all_settings, group_of

_HEAD = f"""# Configuration

This page is generated: `python -m deepinfer_core.config.document > docs/configuration.md`.

Every setting has a dotted path and can be given in five ways. An earlier one wins over a later one:

| source | example |
|---|---|
| argument in Python | `LLM("demo", kv_cache={{"block_size": 32}})` |
| command line | `deepinfer generate --set kv_cache.block_size=32` |
| environment | `DEEPINFER_KV_CACHE__BLOCK_SIZE=32` (two underscores stand for the dot) |
| TOML file, named by `--config` or `{FILE_VARIABLE}` | `[kv_cache]` and `block_size = 32` |
| default | the tables below |

`deepinfer explain` shows every value with the source it came from. Unknown names and values of the wrong type are
errors; nothing is guessed or ignored. After `--set` and in variables a value is written as in TOML, or as a plain
string; a list may be written with commas, and `none` stands for no value.
"""

_PLUGIN_SETTINGS = """## Settings of plugins

A plugin's settings are `plugins.<plugin>.<field>`, or `DEEPINFER_<PLUGIN>__<FIELD>`; in paths and variables a `-` or
`.` of the plugin's name is written `_`. `deepinfer plugins --load` lists them.
"""


def document() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *_groups(), _PLUGIN_SETTINGS, *_originals()])


def _groups() -> Iterator[str]:
    seen = ""
    for path, setting in all_settings().items():
        group, _, _ = path.rpartition(".")
        title = group or path
        if title != seen:
            if seen:
                yield ""
            yield f"## {title}\n"
            described = group_of(group)
            if described is not None:
                yield f"{(described.__doc__ or '').splitlines()[0]}\n"
            yield "| setting | values | default | meaning |\n|---|---|---|---|"
            seen = title
        yield _row(setting)
    yield ""


def _row(setting: Setting) -> str:
    unit = f" ({setting.unit})" if setting.unit else ""
    alias = setting.env[0] if len(setting.env) > 1 else ""
    also = f" Also `{alias}`." if alias else ""
    path = f"{setting.path}.<operator>" if setting.is_table else setting.path
    return f"| `{path}` | {_cell(setting.expected)}{unit} | `{_toml(setting.default)}` | {_cell(setting.help)}{also} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _originals() -> Iterator[str]:
    yield "## Variables of the original engine\n"
    yield "These work here, besides `DEEPINFER_ACCELERATOR`, which has the same name:\n"
    yield "| variable | setting |\n|---|---|"
    for name, counterpart in COUNTERPARTS.items():
        yield f"| `{name}` | `{counterpart.path}` |"
    yield "\nThese have no counterpart, and are errors that say so (`*` stands for any text):\n"
    yield "| variable | instead |\n|---|---|"
    for pattern, reason in NO_COUNTERPART:
        yield f"| `{pattern}` | {reason} |"


if __name__ == "__main__":
    print(document())
