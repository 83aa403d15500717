"""Projects as they are generated: clean, complete, installed as wheels and in place, and doing what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from toys.distributions import install_into
from toys.environments import Environment
from toys.tiny_llama import write_tiny

from deepinfer_core.scaffold import FAMILIES, KINDS, new_backend

WHAT = ("backend", *KINDS)
SMALL = {"kv_cache.num_blocks": 128, "kv_cache.block_size": 4, "logging.progress": False, "logging.level": "error"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


# ---- as text


@pytest.mark.parametrize("what", WHAT)
def test_a_project_has_what_a_project_needs(projects: dict[str, Path], what: str) -> None:
    root = projects[what]
    about = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (package,) = about["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert about["project"]["entry-points"]["deepinfer.plugins.v1"] == {root.name: f"{package}.plugin"}
    for file in ("README.md", f"{package}/py.typed", f"{package}/plugin.py", f"{package}/__init__.py"):
        assert (root / file).is_file()
    assert list((root / "tests").glob("test_*.py"))
    texts = [file for file in root.rglob("*") if file.suffix in {".py", ".md", ".toml"}]
    assert len(texts) >= 6
    assert not [file for file in texts if re.search(r"{{|}}|{%", file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("what", WHAT)
def test_it_imports_the_interface_and_nothing_else_of_ours(projects: dict[str, Path], what: str) -> None:
    for file in projects[what].glob("deepinfer_*/*.py"):
        found = set(re.findall(r"^(?:from|import) (deepinfer_core\S*)", file.read_text(), re.MULTILINE))
        assert found <= {"deepinfer_core.api"}, file


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_it_is_formatted_and_lint_free(projects: dict[str, Path], what: str) -> None:
    for command in (["check", "."], ["format", "--check", "."]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache"],
            cwd=projects[what],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_every_family_has_a_file_and_a_hook(projects: dict[str, Path]) -> None:
    plugin = (projects["backend"] / "deepinfer_zork" / "plugin.py").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"def {family.hook}(device: DeviceInfo)" in plugin
        assert (projects["backend"] / "deepinfer_zork" / f"{family.name}.py").is_file()


# ---- installed


def own_tests(environment: Environment, projects: dict[str, Path]) -> str:
    folders = [str(project / "tests") for project in projects.values()]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--import-mode=importlib")
    return environment.run("-m", "pytest", *options, *folders)


def test_their_own_tests_pass_as_wheels(wheels: Environment, projects: dict[str, Path]) -> None:
    assert "passed" in own_tests(wheels, projects).splitlines()[-1]


@pytest.mark.slow
def test_their_own_tests_pass_in_place(editable: Environment, projects: dict[str, Path]) -> None:
    assert "passed" in own_tests(editable, projects).splitlines()[-1]


@pytest.mark.parametrize("how", ["wheels", "editable"])
def test_all_are_listed_and_load(how: str, request: pytest.FixtureRequest, projects: dict[str, Path]) -> None:
    environment: Environment = request.getfixturevalue(how)
    rows = {row["name"]: row for row in json.loads(environment.deepinfer("plugins", "--load", "--json"))}
    for project in projects.values():
        row = rows[project.name]
        assert (row["status"], row["version"]) == ("ok", "0.1.0")
        assert bool(row["path"]) == (how == "editable")


def test_a_fresh_backend_passes_tier_boots_with_no_edits(
    wheels: Environment, projects: dict[str, Path], tmp_path: Path
) -> None:
    gaps = str(projects["backend"] / "conformance_gaps.toml")
    report = tmp_path / "report.json"
    table = wheels.deepinfer("conformance", "zork", "--tier", "boots", "--gaps", gaps, "--report", str(report))
    found = json.loads(report.read_text(encoding="utf-8"))
    assert found["passed"] is True
    assert found["counts"]["failed"] == found["counts"]["known_gap"] == 0
    hygiene = [result for result in found["results"] if result["family"] == "hygiene"]
    assert len(hygiene) >= 8
    assert {result["outcome"] for result in hygiene} == {"passed"}
    assert "zork:rms_norm" in table


def test_the_doctor_finds_nothing_wrong_with_them(wheels: Environment, projects: dict[str, Path]) -> None:
    found = json.loads(wheels.deepinfer("doctor", "--json"))
    ours = {project.name for project in projects.values()}
    assert [f for f in found["findings"] if f["plugin"] in ours and f["severity"] != "note"] == []
    assert "zork" in dict(found["backends"])


USE = """
import json, sys
from deepinfer_core import LLM, SamplingParams
model, small = sys.argv[1], json.loads(sys.argv[2])
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
prompts = ["one two one two one", "x", "three words here"]
found = {}

def tokens(accelerator, **settings):
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    with LLM(model, accelerator=accelerator, **small, **settings) as llm:
        results = llm.generate(prompts, greedy)
        plan = llm.explain()["plan"]
    return [r.outputs[0].token_ids for r in results], plan, results

found["plain"], _, _ = tokens("cpu")
found["zork"], plan, _ = tokens("zork")
found["providers"] = [[c["op"], c["provider"]] for c in plan["choices"]]
found["drafted"], plan, results = tokens("cpu", speculation__method="my_speculation", speculation__max_draft_tokens=3)
found["drafter"] = plan["drafter"]
found["metered"], _, _ = tokens("cpu", logging__metrics=["my_metrics"], plugins__my_metrics__file="steps.jsonl")
found["lines"] = [json.loads(line) for line in open("steps.jsonl")]
alone = {"scheduling.policy": "my_scheduler", "scheduling.max_running": 1}
with LLM(model, accelerator="cpu", **small, **alone) as llm:
    requests = [{"prompt": prompt, "priority": priority} for prompt, priority in zip(prompts, (0, 1, 5))]
    begun = [result.metrics.first_scheduled for result in llm.generate(requests, greedy)]
    found["order"] = sorted(range(3), key=begun.__getitem__)
    found["policy"] = llm.explain()["plan"]["policy"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def used(wheels: Environment, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every generated plugin switched on in an engine, once."""
    folder = tmp_path_factory.mktemp("used")
    found: dict[str, Any] = json.loads(wheels.run("-c", USE, str(tiny), json.dumps(SMALL), cwd=folder))
    return found


def test_a_model_runs_on_the_backend_and_says_the_same(used: dict[str, Any]) -> None:
    assert used["zork"] == used["plain"]
    own = {(op, provider) for op, provider in used["providers"] if provider.startswith("zork:")}
    declared = {(family.op, f"zork:{family.provider}") for family in FAMILIES}
    assert own == declared - {("moe.route", "zork:route")}, "the tiny model has no experts"


def test_the_drafter_changes_no_text(used: dict[str, Any]) -> None:
    assert used["drafter"] == "my_speculation:my_speculation"
    assert used["drafted"] == used["plain"]


def test_the_sink_writes_what_happened(used: dict[str, Any]) -> None:
    assert used["metered"] == used["plain"]
    names = {name for line in used["lines"] for name in line["counters"]}
    assert any("tokens" in name for name in names), names


def test_the_policy_decides_who_goes_first(used: dict[str, Any]) -> None:
    assert used["policy"] == "my_scheduler:my_scheduler"
    assert used["order"] == [2, 1, 0]


def test_a_backend_for_another_device_type_says_that_there_is_none(tmp_path: Path) -> None:
    new_backend("far_chip", directory=tmp_path / "far", device_type="far_chip")
    site = tmp_path / "site"
    install_into(site, tmp_path / "far")
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from deepinfer_core.cli import main\n"
        "sys.exit(main(['explain', '--accelerator', 'far_chip']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no /dev/far_chip[0-9]* on this machine" in done.stderr
    assert len(done.stderr.splitlines()) == 1
