"""What a plugin's reference makes: whatever goes wrong there is one line that says whose it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from throwaway import Site
from toys.tiny_llama import write_tiny

from deepinfer_core import LLM
from deepinfer_core.api import ConfigError, LazyRef, PluginError
from deepinfer_core.plugins import guarded

DECLARES = """
from deepinfer_core.api import *

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="breaking")

@hookimpl
def deepinfer_probe(env):
    ref = LazyRef("made:{attribute}")
    return [DeviceInfo(backend="breaking", type="cpu", arch="x", count=1, memory=1 << 30, priority=-1,
                       evidence="test", provider=ref, fallback="allow")]

@hookimpl
def deepinfer_scheduling():
    return [PolicyInfo(name="breaking", help="", factory=LazyRef("made:{attribute}"))]

@hookimpl
def deepinfer_speculation():
    return [DrafterInfo(name="breaking", help="", factory=LazyRef("made:{attribute}"))]

@hookimpl
def deepinfer_models():
    return [ModelInfo(architectures=("Breaking",), definition=LazyRef("made:{attribute}"))]
"""
MADE = """
import sys

class Raises:
    def __init__(self, given):
        raise ValueError("no driver\\nhere")

class Leaves:
    def __init__(self, given):
        sys.exit(3)

class Empty:
    def __init__(self, given):
        pass
"""
ASKS = {
    "accelerator 'breaking'": {"accelerator": "breaking"},
    "scheduling.policy 'breaking'": {"scheduling": {"policy": "breaking"}},
    "speculation.method 'breaking'": {"speculation": {"method": "breaking"}},
}


def refused(site: Site, folder: Path, attribute: str, module: str, settings: object) -> str:
    if module:
        site.module("made", module)
    site.module("breaking", DECLARES.format(attribute=attribute))
    assert isinstance(settings, dict)
    with pytest.raises(PluginError) as caught:
        LLM(folder, plugins={"paths": ["breaking"]}, logging={"progress": False, "level": "error"}, **settings)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("what", ASKS)
@pytest.mark.parametrize(
    ("attribute", "module", "said"),
    [
        ("Raises", "", "ModuleNotFoundError: No module named 'made'"),
        ("Raises", "import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("Raises", "def", "SyntaxError: "),
        ("Nothing", MADE, "has no attribute 'Nothing'"),
        ("Raises", MADE, "ValueError: no driver here"),
        ("Leaves", MADE, "SystemExit: 3"),
    ],
)
def test_code_that_cannot_run(what: str, attribute: str, module: str, said: str, site: Site, tmp_path: Path) -> None:
    text = refused(site, write_tiny(tmp_path), attribute, module, ASKS[what])
    assert text.startswith(f"{what}: made:{attribute} of plugin 'breaking': ")
    assert said in text


@pytest.mark.parametrize(
    ("what", "lacks"),
    [("accelerator 'breaking'", "default_dtype(), stream()"), ("scheduling.policy 'breaking'", "admit(), order()")],
)
def test_something_that_lacks_its_methods(what: str, lacks: str, site: Site, tmp_path: Path) -> None:
    text = refused(site, write_tiny(tmp_path), "Empty", MADE, ASKS[what])
    assert text.startswith(f"{what}: made:Empty of plugin 'breaking': made Empty, which lacks ")
    assert lacks.replace("()", "") in text


@pytest.mark.parametrize(
    ("attribute", "said"), [("Nothing", "has no attribute 'Nothing'"), ("Empty", "lacks describe")]
)
def test_a_model_that_is_none(attribute: str, said: str, site: Site, tmp_path: Path) -> None:
    config = json.loads((write_tiny(tmp_path) / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Breaking"]}), encoding="utf-8")
    text = refused(site, tmp_path, attribute, MADE, {})
    assert text.startswith(f"architecture 'Breaking': made:{attribute} of plugin 'breaking': ")
    assert said in text


NEEDS = """
from deepinfer_core.api import *

@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="breaking")

@hookimpl
def deepinfer_speculation():
    return [DrafterInfo(name="breaking", help="", factory=LazyRef("made:Empty"), needs=LazyRef("made:{attribute}"))]
"""


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("none_at_all", "has no attribute 'none_at_all'"),
        ("raises", "KeyError: 'num_nextn_predict_layers'"),
        ("leaves", "SystemExit: 3"),
        ("nothing", "returned NoneType: return DrafterNeeds"),
    ],
)
def test_a_drafter_that_cannot_say_what_it_needs(attribute: str, said: str, site: Site, tmp_path: Path) -> None:
    more = """
def raises(settings, target):
    return target["num_nextn_predict_layers"]

def leaves(settings, target):
    sys.exit(3)

def nothing(settings, target):
    pass
"""
    site.module("made", MADE + more)
    site.module("breaking", NEEDS.format(attribute=attribute))
    with pytest.raises(PluginError) as caught:
        LLM(write_tiny(tmp_path), plugins={"paths": ["breaking"]}, speculation={"method": "breaking"})
    text = str(caught.value)
    assert text.startswith(f"needs of speculation.method 'breaking': made:{attribute} of plugin 'breaking'")
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize("error", [ConfigError("x = 3: expected 4"), KeyboardInterrupt()])
def test_our_own_errors_and_interrupts_pass(error: BaseException) -> None:
    def make() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        guarded("policy 'x'", "y", LazyRef("a:b"), make)
    assert caught.value is error
