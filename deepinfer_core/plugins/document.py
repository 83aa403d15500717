"""Prints the page of all hooks from their specifications: ``python -m deepinfer_core.plugins.document``.

A hook's text is its docstring in ``api/hookspecs.py``, its arguments are its signature; this file has only what is
between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from deepinfer_core.api import API_VERSION, ENTRY_POINT_GROUP, hookspecs

from .inspection import hook_arguments, new_manager

_HEAD = f"""# Hooks

This page is generated from `deepinfer_core/api/hookspecs.py`:
`python -m deepinfer_core.plugins.document > docs/hooks.md`.

Every hook of interface {".".join(map(str, API_VERSION))}, with its exact arguments. A plugin is a module, or an
object, that an entry point names:

```toml
[project.entry-points."{ENTRY_POINT_GROUP}"]
acme = "deepinfer_acme.plugin"
```

"""

_SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Identity": ("", ("deepinfer_plugin",)),
    "Devices": ("", ("deepinfer_probe",)),
    "Operators": (
        """\
The eight hooks below are called once for the chosen device, `device` being its `DeviceInfo`, and return `Provider`
records. Return none for a device you do not serve. A provider's `op` begins with the hook's family, and its name is
unique within the plugin for that operator; users write `plugin:name`.

The winner is the user's list, then the highest score, then the reference. Equal top scores are an error that prints the
lines that decide. `supports` answers `yes(score)` with 1 to 1000 or `no(reason)`; when it raises, or refuses without a
reason, the provider is refused as `provider bug: ...`.""",
        (
            "deepinfer_attention",
            "deepinfer_gemm",
            "deepinfer_moe_communication",
            "deepinfer_pointwise",
            "deepinfer_sampling",
            "deepinfer_sampling_stages",
            "deepinfer_runner_ops",
            "deepinfer_fused",
            "deepinfer_kv_layout",
        ),
    ),
    "Things users name": (
        """\
Two plugins may declare the same name; using it is then an error until the user pins `plugin:name` or blocks one.""",
        (
            "deepinfer_scheduling",
            "deepinfer_models",
            "deepinfer_speculation",
            "deepinfer_constraints",
            "deepinfer_metrics",
            "deepinfer_commands",
        ),
    ),
    "The plan and the processes": (
        "",
        (
            "deepinfer_check_plan",
            "deepinfer_worker_start",
            "deepinfer_worker_stop",
        ),
    ),
}
"""Title -> what is said before its hooks, and the hooks."""


def document() -> str:
    """The page, in Markdown.

    Raises:
        AssertionError: a hook is in no section, or in two.
    """
    placed = [hook for _, hooks in _SECTIONS.values() for hook in hooks]
    arguments = hook_arguments(new_manager())
    assert sorted(placed) == sorted(arguments), "every hook belongs into one section of deepinfer_core.plugins.document"
    about = inspect.cleandoc(hookspecs.__doc__ or "").partition("\n\n")[2]
    return f"{_HEAD}{about}\n\n" + "\n".join(_sections(arguments)).rstrip() + "\n"


def _sections(arguments: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for title, (introduction, hooks) in _SECTIONS.items():
        yield f"## {title}\n"
        if introduction:
            yield f"{introduction}\n"
        for hook in hooks:
            yield f"### `{hook}({', '.join(arguments[hook])})`"
            yield f"{inspect.getdoc(getattr(hookspecs, hook))}\n"


if __name__ == "__main__":
    print(document(), end="")
