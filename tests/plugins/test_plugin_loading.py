"""One bad plugin: reported once, undone completely, fatal only to those who asked for it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from throwaway import PRELUDE, Site, good

from deepinfer_core.api import PluginError
from deepinfer_core.plugins import Registry, load_plugins

INFO = "@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name='bad')\n"

BROKEN = {
    "import": ("raise ImportError('no libacme.so')", "import", "ImportError: no libacme.so"),
    "exit": ("import sys; sys.exit('no licence')", "import", "SystemExit: no licence"),
    "syntax": ("def (", "import", "SyntaxError"),
    "nested-module-missing": ("import not_there_at_all", "import", "No module named 'not_there_at_all'"),
    "no-hooks": ("x = 1", "register", "implements no hook"),
    "no-identity": (
        f"{PRELUDE}@hookimpl\ndef deepinfer_models():\n    return []\n",
        "register",
        "implements deepinfer_plugin 0 times",
    ),
    "misspelt-hook": (
        f"{PRELUDE}{INFO}@hookimpl\ndef deepinfer_atention(device):\n    return []\n",
        "register",
        "there is no hook 'deepinfer_atention'; did you mean 'deepinfer_attention'?",
    ),
    "unknown-argument": (
        f"{PRELUDE}{INFO}@hookimpl\ndef deepinfer_gemm(devise):\n    return []\n",
        "register",
        "deepinfer_gemm: the hook has no argument 'devise'; did you mean 'device'?",
    ),
    "argument-default": (
        f"{PRELUDE}{INFO}@hookimpl\ndef deepinfer_gemm(device=None):\n    return []\n",
        "register",
        "argument 'device' has a default",
    ),
    "star-arguments": (
        f"{PRELUDE}{INFO}@hookimpl\ndef deepinfer_gemm(**kwargs):\n    return []\n",
        "register",
        "**kwargs is never filled",
    ),
    "keyword-only": (
        f"{PRELUDE}{INFO}@hookimpl\ndef deepinfer_gemm(*, device):\n    return []\n",
        "register",
        "is never filled",
    ),
    "tryfirst": (
        f"{PRELUDE}{INFO}@hookimpl(tryfirst=True)\ndef deepinfer_gemm(device):\n    return []\n",
        "register",
        "tryfirst not allowed",
    ),
    "trylast": (
        f"{PRELUDE}{INFO}@hookimpl(trylast=True)\ndef deepinfer_gemm(device):\n    return []\n",
        "register",
        "trylast not allowed",
    ),
    "wrapper": (
        f"{PRELUDE}{INFO}@hookimpl(wrapper=True)\ndef deepinfer_gemm(device):\n    return (yield)\n",
        "register",
        "wrapper not allowed",
    ),
    "unmarked": (
        f"{PRELUDE}{INFO}def deepinfer_gemm(device):\n    return []\n",
        "register",
        "not marked with @hookimpl",
    ),
    "raises-half-way": (
        f"{PRELUDE}@hookimpl\ndef deepinfer_gemm(device):\n    return []\n"
        "@hookimpl\ndef deepinfer_plugin():\n    raise OSError('driver too old')\n",
        "register",
        "OSError: driver too old",
    ),
    "returns-none": (
        f"{PRELUDE}@hookimpl\ndef deepinfer_plugin():\n    return None\n",
        "register",
        "returned None; expected a PluginInfo",
    ),
    "other-name": (
        f"{PRELUDE}@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name='good')\n",
        "register",
        "says name='good', the entry point says 'bad'",
    ),
    "newer-minor": (good("bad", api=(1, 99)), "register", "needs plugin interface 1.99, this core has 1.1"),
    "other-major": (good("bad", api=(2, 0)), "register", "needs plugin interface 2.0"),
    "garbled-api": (good("bad", api="1.0"), "register", "PluginInfo.api='1.0'"),
    "needs-as-string": (good("bad", needs="acme"), "register", "PluginInfo.needs='acme'"),
    "settings-not-attrs": (
        f"{PRELUDE}@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name='bad', settings=dict)\n",
        "register",
        "expected an attrs class",
    ),
    "settings-without-default": (
        f"{PRELUDE}import attrs\n@attrs.frozen\nclass S:\n    tile: int\n"
        "@hookimpl\ndef deepinfer_plugin():\n    return PluginInfo(name='bad', settings=S)\n",
        "register",
        "field 'tile' of S needs a default",
    ),
}


@pytest.fixture(params=sorted(BROKEN))
def broken(request: pytest.FixtureRequest, site: Site) -> tuple[Site, str, str]:
    source, stage, cause = BROKEN[request.param]
    site.install("bad", source)
    site.install("fine", good("fine"))
    return site, stage, cause


def live_hooks(registry: Registry, plugin: str) -> list[str]:
    callers = [caller for caller in vars(registry.manager.hook).values() if hasattr(caller, "get_hookimpls")]
    return [caller.name for caller in callers if plugin in [i.plugin_name for i in caller.get_hookimpls()]]


def test_a_broken_plugin_is_one_log_line_and_leaves_no_trace(broken: tuple[Site, str, str], logs: list[Any]) -> None:
    site, stage, cause = broken
    registry = site.load()
    assert list(registry.plugins) == ["fine"]
    assert live_hooks(registry, "bad") == []
    assert not registry.manager.has_plugin("bad")
    (failure,) = registry.failures
    assert (failure.name, failure.distribution, failure.version, failure.stage) == ("bad", "bad-dist", "1.0", stage)
    assert cause in failure.cause
    assert "Traceback" in failure.traceback
    (entry,) = logs
    assert (entry["log_level"], entry["plugin"], entry["distribution"]) == ("warning", "bad", "bad-dist")
    assert cause in entry["cause"]


def test_a_broken_plugin_that_was_asked_for_is_an_error(broken: tuple[Site, str, str]) -> None:
    site, _, cause = broken
    with pytest.raises(PluginError) as caught:
        site.load(requested=["bad"])
    assert "bad-dist 1.0" in str(caught.value)
    assert cause in str(caught.value)


def test_naming_a_broken_plugin_in_the_allowlist_asks_for_it(broken: tuple[Site, str, str]) -> None:
    site, _, _ = broken
    with pytest.raises(PluginError, match="bad-dist"):
        site.load(allow=["bad"])


def test_strict_raises_with_the_cause(site: Site) -> None:
    site.install("bad", "raise ImportError('no libacme.so')")
    with pytest.raises(PluginError) as caught:
        site.load(strict=True)
    assert isinstance(caught.value.__cause__, ImportError)


def test_an_incompatible_major_is_reported_without_running_it(site: Site, logs: list[Any]) -> None:
    site.install("future", "raise SystemExit", group="deepinfer.plugins.v2")
    registry = site.load()
    assert [(f.name, f.stage) for f in registry.failures] == [("future", "version")]
    assert [entry["plugin"] for entry in logs] == ["future"]
    assert "future_dist_plugin" not in sys.modules


@pytest.mark.parametrize("arguments", [{"requested": ["future"]}, {"allow": ["future"]}])
def test_asking_for_an_incompatible_major_is_an_error(site: Site, arguments: dict[str, Any]) -> None:
    site.install("future", "", group="deepinfer.plugins.v2")
    with pytest.raises(PluginError, match=r"future-dist.*made for plugin interface v2"):
        site.load(**arguments)


def test_ctrl_c_during_an_import_is_not_swallowed(site: Site) -> None:
    site.install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.load()


def test_an_entry_point_may_be_an_object(site: Site) -> None:
    site.module(
        "objects",
        f"{PRELUDE}class P:\n    @hookimpl\n    def deepinfer_plugin(self):\n        return PluginInfo(name='obj')\n"
        "class holder:\n    plugin = P()\n",
    )
    site.metadata("obj-dist", {"obj": "objects:holder.plugin"})
    assert list(site.load().plugins) == ["obj"]


@pytest.mark.parametrize("value", ["objects:P", "objects:nothing"])
def test_an_entry_point_that_is_a_class_or_none_is_refused(site: Site, value: str) -> None:
    site.module("objects", "class P:\n    pass\nnothing = None\n")
    site.metadata("obj-dist", {"obj": value})
    (failure,) = site.load().failures
    assert "point it at a module or at an object" in failure.cause


def test_an_optional_hook_of_a_later_core_is_accepted(site: Site) -> None:
    site.install("new", good("new", "@hookimpl(optionalhook=True)\ndef deepinfer_from_later(x):\n    return []\n"))
    assert list(site.load().plugins) == ["new"]


def test_loading_twice_changes_nothing(site: Site, logs: list[Any]) -> None:
    site.install("acme", good("acme"))
    site.install("bad", "raise ImportError('no')")
    first, second = site.load(), site.load()
    assert first.records == second.records
    assert [str(f) for f in first.failures] == [str(f) for f in second.failures]
    assert live_hooks(second, "acme") == ["deepinfer_plugin"]
    assert len(second.manager.hook.deepinfer_plugin.get_hookimpls()) == 1


def test_a_record_says_where_a_plugin_came_from(site: Site) -> None:
    folder = site.install("acme", good("acme"), version="3.1")
    plugin = site.load().plugins["acme"]
    assert (plugin.record.distribution, plugin.record.version, plugin.record.entry_point, plugin.path) == (
        "acme-dist",
        "3.1",
        "acme_dist_plugin",
        str(folder),
    )


def test_a_plugin_without_what_it_needs_is_dropped(site: Site) -> None:
    site.install("top", good("top", needs=("base",)))
    (failure,) = site.load().failures
    assert (failure.stage, failure.cause[:40]) == ("needs", "needs plugin 'base', which is not loaded")


def test_needs_fail_in_chains_and_name_the_first_cause(site: Site) -> None:
    site.install("base", "raise ImportError('no libacme.so')")
    site.install("middle", good("middle", needs=("base",)))
    site.install("top", good("top", needs=("middle",)))
    registry = site.load()
    assert dict(registry.plugins) == {}
    assert "no libacme.so" in {f.name: f.cause for f in registry.failures}["middle"]


def test_a_plugin_asked_for_whose_need_is_unmet_is_an_error(site: Site) -> None:
    site.install("top", good("top", needs=("base",)))
    with pytest.raises(PluginError, match="needs plugin 'base'"):
        site.load(requested=["top"])


def test_the_one_that_declares_a_conflict_gives_way(site: Site) -> None:
    site.install("shy", good("shy", conflicts=("loud",)))
    site.install("loud", good("loud"))
    registry = site.load()
    assert list(registry.plugins) == ["loud"]
    assert [(f.name, f.stage) for f in registry.failures] == [("shy", "conflict")]


def test_asking_for_the_one_that_declares_a_conflict_drops_the_other(site: Site) -> None:
    site.install("shy", good("shy", conflicts=("loud",)))
    site.install("loud", good("loud"))
    assert list(site.load(requested=["shy"]).plugins) == ["shy"]


def test_asking_for_both_sides_of_a_conflict_is_an_error(site: Site) -> None:
    site.install("shy", good("shy", conflicts=("loud",)))
    site.install("loud", good("loud"))
    with pytest.raises(PluginError, match="'shy' does not work together with 'loud'"):
        site.load(requested=["shy", "loud"])


def test_a_file_is_a_plugin_too_and_its_lazy_references_work(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "my_loose_plugin.py"
    file.write_text(good("loose", "answer = 42\n"))
    registry = site.load(files=[str(file)])
    record = registry.plugins["loose"].record
    assert record.distribution == "(plugins.paths)"
    assert record.version.startswith("sha256:")
    assert sys.modules["my_loose_plugin"].answer == 42
    assert site.load(files=[str(file)]).records == registry.records


def test_a_dotted_module_is_a_plugin_too(site: Site) -> None:
    site.module("mine.plugin", good("dotted"))
    assert list(site.load(files=["mine.plugin"]).plugins) == ["dotted"]


@pytest.mark.parametrize(
    ("name", "source", "cause"),
    [
        ("broken_file.py", "raise ImportError('no')", "ImportError: no"),
        ("anonymous_file.py", "x = 1", "has no deepinfer_plugin"),
        ("json.py", good("json"), "module name 'json' is already taken"),
        ("wave.py", good("wave"), "module name 'wave' is already taken"),
        ("relative_file.py", "from . import part", "it belongs to a package: name it with dots, as package.plugin"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(site: Site, tmp_path: Path, name: str, source: str, cause: str) -> None:
    (tmp_path / name).write_text(source)
    with pytest.raises(PluginError, match=rf"plugins.paths: .*{name}.*{cause}"):
        site.load(files=[str(tmp_path / name)])


def test_a_missing_file_is_an_error(site: Site, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugins\.paths.*nowhere\.py.*no such file"):
        site.load(files=[str(tmp_path / "nowhere.py")])


def test_a_file_may_take_the_name_of_an_installed_plugin_only_when_that_is_blocked(site: Site, tmp_path: Path) -> None:
    site.install("acme", good("acme", help="installed"))
    file = tmp_path / "acme_here.py"
    file.write_text(good("acme", help="mine"))
    with pytest.raises(PluginError, match="and so has acme-dist; block that with --no-plugin acme"):
        site.load(files=[str(file)])
    assert site.load(block=["acme"], files=[str(file)]).plugins["acme"].info.help == "mine"


def test_a_request_is_met_by_a_plugin_from_a_file(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "requested_file.py"
    file.write_text(good("loose"))
    assert list(site.load(files=[str(file)], requested=["loose"]).plugins) == ["loose"]


def test_two_files_of_one_name_are_an_error(site: Site, tmp_path: Path) -> None:
    files = [tmp_path / "one_file.py", tmp_path / "two_file.py"]
    for file in files:
        file.write_text(good("loose"))
    with pytest.raises(PluginError, match=r"two_file\.py.*another plugin named 'loose' is already loaded"):
        site.load(files=[str(file) for file in files])


def test_a_file_in_a_folder_where_modules_are_looked_for(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the working directory of ``python -m``."""
    file = tmp_path / "file_on_the_path.py"
    file.write_text(good("loose"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(site.load(files=[str(file)]).plugins) == ["loose"]
    other = tmp_path / "elsewhere" / "another_on_the_path.py"
    other.parent.mkdir()
    for place in (other, tmp_path / other.name):
        place.write_text(good("other"))
    with pytest.raises(PluginError, match="module name 'another_on_the_path' is already taken"):
        site.load(files=[str(other)])


def test_a_file_whose_module_is_imported_already_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported by its folder on sys.path first, and by plugins.paths through a link then: one module."""
    folder, link = tmp_path / "real", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    name = "imported_before_it_was_named"
    code = "from deepinfer_core.api import PluginInfo, hookimpl\n\n@hookimpl\ndef deepinfer_plugin():\n"
    (folder / f"{name}.py").write_text(f"{code}    return PluginInfo(name={name!r})\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(link))
    importlib.import_module(name)
    try:
        for _ in range(2):
            assert name in load_plugins(path=[], files=[str(folder / f"{name}.py")]).plugins
    finally:
        del sys.modules[name]
