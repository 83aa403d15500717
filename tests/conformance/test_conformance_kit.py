"""The kit from outside: command line, pytest plugin, Python; and what a gaps file does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_core.api import ConfigError, DeviceError
from deepinfer_core.cli import main
from deepinfer_core.conformance import Gap, Report, all_cases, read_gaps, run
from deepinfer_core.conformance.kit import select

GAP = """
[[gap]]
case = "{case}"
reason = "not mended yet"
link = "https://example.org/1"
"""


def test_the_command_prints_a_table_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main(["conformance", "reference", "--family", "pointwise.rms_norm", "--report", str(file)]) == 0
    assert "| `pointwise.rms_norm` | reference:rms_norm | float32 |" in capsys.readouterr().out
    report = Report.from_json(file.read_text())
    assert report.passed
    assert {"deepinfer-core", "torch", "python"} <= set(report.versions)
    assert json.loads(file.read_text())["passed"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ["reference", "--family", "pointwize"],
        ["nowhere"],
        ["reference", "--tier", "all"],
        ["reference", "--gaps", "missing.toml"],
        [],
    ],
)
def test_mistakes_end_with_2(arguments: list[str]) -> None:
    assert main(["conformance", *arguments]) == 2


def test_a_gap_that_has_closed_fails_the_run(tmp_path: Path) -> None:
    file = tmp_path / "conformance_gaps.toml"
    file.write_text(GAP.format(case="pointwise.rms_norm/float32/one_row"))
    report = run("reference", families=["pointwise.rms_norm"], gaps=read_gaps(file))
    failed = [r for r in report.results if r.outcome == "failed"]
    assert [r.case for r in failed] == ["pointwise.rms_norm/float32/one_row"]
    assert "remove its entry" in failed[0].message
    assert not report.passed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[gap]]\ncase = 'a'\n", "reason is missing"),
        ("[[gap]]\ncase = 'a'\nreason = ''\n", "reason is missing"),
        ("[[gap]]\ncase = 'a'\nreason = 'b'\nwhy = 'c'\n", "unknown key 'why'"),
        ("[gap]\ncase = 'a'\n", "expected \\[\\[gap\\]\\] tables"),
        (GAP.format(case="a") * 2, "listed twice"),
        ("[[gap", "gaps file"),
    ],
)
def test_a_gaps_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "gaps.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_gaps(file)


def test_a_gap_must_name_a_case() -> None:
    with pytest.raises(ConfigError, match=r"no such case.*rms_norm/float32/one_row"):
        run("reference", families=["gemm"], gaps=[Gap(case="pointwise.rms_norm/float32/onerow", reason="x")])


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(DeviceError, match="nowhere"):
        run("nowhere")


def test_tiers_hold_each_other_and_names_are_unique() -> None:
    names = [[case.id for case in select(tier)] for tier in ("boots", "serves", "full")]
    assert set(names[0]) < set(names[1]) <= set(names[2])
    assert len({case.id for case in all_cases()}) == len(all_cases())


def test_the_pytest_form_runs_reports_and_knows_gaps(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    found = subprocess.run(
        f"{sys.executable} -m pytest -q -p no:cacheprovider -p no:randomly --pyargs deepinfer_core.conformance "
        f"--backend reference --family pointwise.rms_norm --report {report}".split(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "`pointwise.rms_norm`" in found.stdout
    assert Report.from_json(report.read_text()).passed


def test_the_package_imports_no_torch() -> None:
    code = "import sys, deepinfer_core.conformance.pytest_plugin as p; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_other_runs_of_pytest_do_not_get_the_options(tmp_path: Path) -> None:
    """Their names are short, and another plugin may have them."""
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--backend')\n")
    (tmp_path / "test_it.py").write_text("def test_it(request):\n    assert request.config.option.backend == 'x'\n")
    found = subprocess.run(
        f"{sys.executable} -m pytest -q -p no:cacheprovider --backend x {tmp_path}".split(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stdout + found.stderr


POLICY = """
from deepinfer_core.api import Admit, TokenSplit

class {name}:
    def admit(self, request, view):
        return Admit(True)
    def order(self, view, k):
        return {order}
    def split(self, view):
        return TokenSplit(decode=view.max_batch_tokens, prefill=view.max_batch_tokens)
    def victims(self, view, need_blocks):
        return range(len(view.running.ids) - 1, -1, -1)
    def on_event(self, event):
        return None
"""


def test_a_policy_needs_no_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepinfer_core.conformance.policy")
    (tmp_path / "orderly.py").write_text(POLICY.format(name="Orderly", order="range(min(k, len(view.waiting.ids)))"))
    (tmp_path / "greedy.py").write_text(POLICY.format(name="Greedy", order="[0] * k"))
    monkeypatch.chdir(tmp_path)
    report = tmp_path / "out.json"
    assert main(["conformance", "--policy", "orderly:Orderly", "--report", str(report)]) == 0
    assert {result.case for result in Report.from_json(report.read_text()).results} >= {
        "policy/order",
        "policy/starves",
    }
    assert "`policy`" in capsys.readouterr().out
    assert main(["conformance", "--policy", "greedy:Greedy"]) == 1
    assert "FAILED policy/order" in capsys.readouterr().err
    assert main(["conformance", "--policy", "nowhere:Nothing"]) == 2


@pytest.mark.parametrize(
    ("policy", "said"),
    [("json:loads", "the JSON object must be"), ("collections:Counter", "which has no admit, order,")],
)
def test_what_is_no_policy_is_one_line(policy: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--policy", policy]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


DIES = """
import os

from deepinfer_core.api import LazyRef, PluginInfo, Provider, SwigluRequest, hookimpl, no, yes


@hookimpl
def deepinfer_plugin():
    return PluginInfo(name="dies", help="Ends the process where it is given no rows")


@hookimpl
def deepinfer_pointwise(device):
    def supports(request):
        return yes(900) if isinstance(request, SwigluRequest) else no("only the activation")

    return [Provider(name="swiglu", op="pointwise.swiglu", build=LazyRef(f"{__name__}:Dies"), supports=supports)]


class Dies:
    def __init__(self, request, context):
        self._plain = context.reference(request)

    def run(self, x):
        if not x.shape[0]:
            os._exit(7)
        return self._plain.run(x)
"""


def test_processes_side_by_side_find_what_one_finds() -> None:
    families = ["moe.route", "gemm.batched"]
    alone = run("reference", tier="serves", families=families)
    seen: list[tuple[str, int, int]] = []
    both = run(
        "reference",
        tier="serves",
        families=families,
        jobs=2,
        progress=lambda r, *counts: seen.append((r.case, *counts)),
    )
    assert [(r.case, r.outcome, r.message) for r in both.results] == [
        (r.case, r.outcome, r.message) for r in alone.results
    ]
    assert sorted(name for name, _, _ in seen) == sorted(r.case for r in alone.results)
    assert [count for _, count, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, _, total in seen} == {len(seen)}


def test_a_process_that_ends_fails_the_case_it_was_in(tmp_path: Path) -> None:
    """And no other: another process asks what was left."""
    file = tmp_path / "dies.py"
    file.write_text(DIES)
    report = run("cpu", families=["pointwise.swiglu"], plugins=[str(file)], providers=["dies:swiglu"], jobs=2)
    failed = {r.case: r.message for r in report.results if r.outcome == "failed"}
    assert failed == {"pointwise.swiglu/float32/zero_rows": "the process that asked ended with exit code 7"}
    assert len(report.results) == len(select("boots", ["pointwise.swiglu"]))


def test_a_backend_that_does_not_open_in_another_process_is_named(tmp_path: Path) -> None:
    file = tmp_path / "once.py"
    file.write_text(DIES + "\nimport multiprocessing\nassert multiprocessing.parent_process() is None\n")
    with pytest.raises(DeviceError, match="could not open the backend"):
        run("cpu", families=["pointwise.swiglu"], plugins=[str(file)], providers=["dies:swiglu"], jobs=2)


def test_drawn_parts_ask_different_requests() -> None:
    """Each part is the same in every run."""
    from deepinfer_core.conformance.operators.drawn import EXAMPLES, ask_drawn

    def drawn(part: int) -> list[int]:
        found: list[int] = []

        def ask(data: object, target: object) -> bool:
            from hypothesis import strategies as st

            found.append(data.draw(st.integers(0, 10**6)))  # type: ignore[attr-defined]
            return True

        class Named:
            backend = "any"

        ask_drawn(ask, part, Named())  # type: ignore[arg-type]
        return found

    first, second = drawn(1), drawn(2)
    assert len(first) == EXAMPLES
    assert drawn(1) == first
    assert len(set(first) & set(second)) < EXAMPLES // 2
