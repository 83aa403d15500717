"""The loaded plugins, and the only way to ask them anything: one by one, guarded, with provenance."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, UnionType
from typing import Any

import attrs
import pluggy

from deepinfer_core.api import CommandInfo, DeviceInfo, LazyRef, PluginError, PluginInfo, PluginRecord, Provider

from .failure import Failure, cause_line, full_traceback
from .inspection import hook_arguments, hook_record, new_manager, record_name

_FAMILY = {"deepinfer_runner_ops": "runner", "deepinfer_moe_communication": "moe"}
"""Operator family of a hook whose name does not say it."""

PROVIDER_HOOKS = (
    "deepinfer_attention",
    "deepinfer_fused",
    "deepinfer_gemm",
    "deepinfer_kv_layout",
    "deepinfer_moe_communication",
    "deepinfer_pointwise",
    "deepinfer_runner_ops",
    "deepinfer_sampling",
)
"""The hooks that declare operators, each asked with the chosen device."""


@attrs.frozen(kw_only=True)
class LoadedPlugin:
    """A plugin in use. ``path`` is its metadata folder or file; ``asked``: its failures are errors."""

    info: PluginInfo
    record: PluginRecord
    path: str
    asked: bool

    @property
    def name(self) -> str:
        return self.info.name

    def failure(self, stage: Any, error: BaseException) -> Failure:
        return Failure(
            name=self.name,
            distribution=self.record.distribution,
            version=self.record.version,
            path=self.path,
            stage=stage,
            cause=cause_line(error),
            traceback=full_traceback(error),
        )


class Registry:
    """Loaded plugins and what went wrong. Built by :func:`load_plugins`; read-only after :meth:`freeze`.

    Attributes:
        strict: raise at the first failure, instead of recording it.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.manager = new_manager()
        self._arguments = hook_arguments(self.manager)
        self._plugins: dict[str, LoadedPlugin] = {}
        self._failures: dict[tuple[str, str, str, str], Failure] = {}
        self._frozen = False
        self._silent = 0

    @property
    def plugins(self) -> Mapping[str, LoadedPlugin]:
        """Name -> plugin, sorted by name."""
        return MappingProxyType(dict(sorted(self._plugins.items())))

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._failures.values())

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """What the plan remembers of the loaded plugins, sorted by name."""
        return tuple(plugin.record for plugin in self.plugins.values())

    def implementers(self, hook: str) -> tuple[str, ...]:
        """Names of the plugins that implement ``hook``, sorted."""
        return tuple(impl.plugin_name for impl in self._implementations(hook))

    def register(self, plugin: object, loaded: LoadedPlugin) -> None:
        """Add a plugin whose hooks are already registered with :attr:`manager`. The loader's part only."""
        if self._frozen:
            raise PluginError(f"plugin {loaded.name!r}: the registry is frozen, the engine runs on a fixed plan")
        if self.manager.get_plugin(loaded.name) is not plugin:
            raise PluginError(f"plugin {loaded.name!r} has not passed the loader's checks")
        self._plugins[loaded.name] = loaded

    def unregister(self, name: str) -> None:
        """Undo a registration completely. Unknown names are fine: a half-made one may not have come that far."""
        self._plugins.pop(name, None)
        if self.manager.has_plugin(name):
            self.manager.unregister(name=name)

    def report(self, failure: Failure, error: BaseException | None = None, *, asked: bool = False) -> None:
        """Record and log a failure once; raise PluginError if the plugin was asked for, or when strict."""
        cause = re.sub(r"0x[0-9a-f]+", "0x", failure.cause)  # an object's address differs from call to call
        key = (failure.name, failure.distribution, failure.stage, cause)
        if key not in self._failures:
            self._failures[key] = failure
            failure.log()
        if asked or self.strict:
            raise PluginError(str(failure)) from error

    def collect(self, hook: str, **arguments: Any) -> list[tuple[str, Any]]:
        """Every plugin's answer to a hook, flattened: ``[(plugin name, record), ...]``, by plugin name.

        A plugin that raises, or answers with anything but a sequence of the hook's records, contributes
        nothing: one log line, and PluginError if it was asked for.
        """
        record = hook_record(hook)
        if record is None:
            raise TypeError(f"{hook} returns no records; use notify()")
        self._check_arguments(hook, arguments)
        answers: list[tuple[str, Any]] = []
        for impl in self._implementations(hook):
            plugin = self._plugins[impl.plugin_name]
            try:
                items = _checked(hook, record, _call(impl, arguments))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.report(plugin.failure("hook", _named(hook, error)), error, asked=plugin.asked)
            else:
                answers += [(plugin.name, item) for item in items]
        return answers

    def providers(self, device: DeviceInfo) -> list[tuple[str, Provider]]:
        """Every plugin's operators for the device: ``[(plugin name, provider), ...]``, hook by hook."""
        return [item for hook in PROVIDER_HOOKS for item in self.collect(hook, device=device)]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a hook that returns nothing on every plugin, by name.

        Raises:
            PluginError: after all were called, naming each plugin that raised: a process whose plugins could
                not start, or stop, must not go on as if they had.
        """
        self._check_arguments(hook, arguments)
        failed: list[str] = []
        for impl in self._implementations(hook):
            plugin = self._plugins[impl.plugin_name]
            try:
                _call(impl, arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                failure = plugin.failure("hook", _named(hook, error))
                self.report(failure, error)
                failed.append(str(failure))
        if failed:
            raise PluginError("; ".join(failed))

    def freeze(self) -> None:
        """No plugin can be added from now on. Idempotent."""
        self._frozen = True

    @contextmanager
    def no_hooks(self) -> Iterator[None]:
        """Inside, every hook call raises RuntimeError, however it is made: proof that a step calls none."""

        def refuse(hook: str, *_: object) -> None:
            raise RuntimeError(f"hook {hook} called where no hook may be called")

        undo = self.manager.add_hookcall_monitoring(refuse, lambda *_: None)
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1
            undo()

    def _implementations(self, hook: str) -> list[pluggy.HookImpl]:
        if self._silent:
            raise RuntimeError(f"hook {hook} called where no hook may be called")
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        loaded = [impl for impl in caller.get_hookimpls() if impl.plugin_name in self._plugins]
        return sorted(loaded, key=lambda impl: impl.plugin_name)

    def _check_arguments(self, hook: str, arguments: Mapping[str, Any]) -> None:
        expected = self._arguments[hook]
        if set(arguments) != set(expected):
            raise TypeError(f"{hook} takes {', '.join(expected) or 'no arguments'}, was given {sorted(arguments)}")


def _call(impl: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    """The arguments an implementation names; it may be older than the newest of them."""
    return impl.function(*(arguments[name] for name in impl.argnames))


def _named(hook: str, error: BaseException) -> BaseException:
    """The error, with the hook in its text: a plugin may fail in several."""
    named = PluginError(f"{hook}: {cause_line(error)}")
    named.__cause__ = error
    return named


def _checked(hook: str, record: type | UnionType, answer: object) -> Sequence[Any]:
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise TypeError(f"returned {answer!r}; expected a sequence of {record_name(record)}")
    for item in answer:
        if not isinstance(item, record):
            raise TypeError(f"returned a sequence with {item!r}; expected {record_name(record)}")
        if isinstance(item, Provider):
            _check_provider(hook, item)
        elif isinstance(item, CommandInfo) and not isinstance(item.command, LazyRef):
            raise TypeError(f"command {item.name!r}: command={item.command!r}; expected a LazyRef")
    names = [(item.op, item.name) for item in answer if isinstance(item, Provider)]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"two providers named {doubled[0][1]!r} for {doubled[0][0]}")
    return answer


def _check_provider(hook: str, provider: Provider) -> None:
    family = _FAMILY.get(hook, hook.removeprefix("deepinfer_"))
    if not provider.name or ":" in provider.name:
        raise ValueError(f"provider name {provider.name!r}: must not be empty or contain ':'")
    if not provider.op.startswith(f"{family}."):
        raise ValueError(f"provider {provider.name!r} serves {provider.op!r}; this hook is for {family}.* operators")
    if not isinstance(provider.build, LazyRef) and not callable(provider.build):
        raise TypeError(f"provider {provider.name!r}: build={provider.build!r}; expected a LazyRef or a callable")
    if not callable(provider.supports):
        raise TypeError(f"provider {provider.name!r}: supports={provider.supports!r}; expected a callable")
