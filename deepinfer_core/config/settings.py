"""The tree as a flat list: every setting with its dotted path, its type in words, and its environment names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, get_origin

import attrs

from .accept import describe_type
from .tree import EngineConfig

ENV_PREFIX = "DEEPINFER_"
FILE_VARIABLE = "DEEPINFER_CONFIG"


@attrs.frozen(kw_only=True)
class Setting:
    """One leaf of the tree.

    Attributes:
        path: dotted. annotation: resolved type. default: a value.
        help, unit: for the manual. check: wording of its condition, or empty.
        env: environment variables that set it; none for a table.
        is_table: users choose the keys below it, and set those.
    """

    path: str
    annotation: Any
    default: Any
    help: str
    unit: str
    check: str
    env: tuple[str, ...]
    is_table: bool

    @property
    def expected(self) -> str:
        """What values are legal, in words."""
        words = describe_type(self.annotation)
        if not self.check:
            return words
        required = words.removesuffix(" or none")
        return f"{required}, {self.check}{'' if words == required else ', or none'}"


def env_name(path: str) -> str:
    """``kv_cache.block_size`` -> ``DEEPINFER_KV_CACHE__BLOCK_SIZE``."""
    return ENV_PREFIX + path.upper().replace(".", "__")


def group_of(path: str) -> type | None:
    """The attrs class at a dotted path, if there is a group there."""
    return _groups().get(path)


@cache
def all_settings() -> Mapping[str, Setting]:
    """Dotted path -> setting, in the tree's order."""
    return {leaf.path: leaf for leaf in _leaves(EngineConfig, "")}


@cache
def _groups() -> Mapping[str, type]:
    attrs.resolve_types(EngineConfig)
    return {field.name: field.type for field in attrs.fields(EngineConfig) if field.type and attrs.has(field.type)}


def _leaves(group: type, prefix: str) -> Iterator[Setting]:
    attrs.resolve_types(group)
    for field in attrs.fields(group):
        path = prefix + field.name
        if field.type is not None and attrs.has(field.type):
            yield from _leaves(field.type, f"{path}.")
        elif "help" in field.metadata:
            default = field.default
            names = [field.metadata["env"], env_name(path)]
            is_table = get_origin(field.type) is Mapping
            yield Setting(
                path=path,
                annotation=field.type,
                default=default.factory() if isinstance(default, attrs.Factory) else default,  # type: ignore[arg-type]
                help=field.metadata["help"],
                unit=field.metadata["unit"],
                check=field.metadata["check"],
                env=() if is_table else tuple(filter(None, names)),
                is_table=is_table,
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or an empty string when nothing is near. Paths and variables both work."""
    bare = {candidate.removeprefix(ENV_PREFIX): candidate for candidate in sorted(known)}
    last = {candidate.replace("__", ".").rpartition(".")[2]: candidate for candidate in bare.values()}
    wanted = name.removeprefix(ENV_PREFIX)
    for names, cutoff in ((bare, 0.6), (last, 0.75)):
        found = get_close_matches(wanted, list(names), n=1, cutoff=cutoff)
        if found:
            return f"; did you mean {names[found[0]]!r}?"
    return ""


def instead_of(path: str) -> str:
    """What an unknown path may have meant: the nearest setting or group, else the fields of its group, or all there
    is."""
    tables = ("ops", "plugins")
    group = path.partition(".")[0]
    if group == path and (found := get_close_matches(path, [*_groups(), *tables], n=1, cutoff=0.75)):
        return f"; did you mean the group {found[0]!r}?"
    if found_setting := nearest(path, all_settings()):
        return found_setting
    if group in _groups():
        fields = (setting.removeprefix(f"{group}.") for setting in all_settings() if setting.startswith(f"{group}."))
        return f"; {group} has {', '.join(fields)}"
    alone = (setting for setting in all_settings() if "." not in setting)
    return f"; there are {', '.join(sorted({*alone, *_groups(), *tables}))}"
