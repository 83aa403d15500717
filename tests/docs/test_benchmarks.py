"""Every benchmark has a quick form and an answer for programs: ``--quick`` and ``--json``."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
PARTS = {"peer_process.py", "gpu_plots.py", "gpu_attention.py", "gpu_fp8.py", "gpu_sampling.py"}
"""Programs that measure nothing alone: a side of a comparison, drawings of kept results, parts of gpu_ops.py."""

BENCHMARKS = sorted(
    path.name
    for path in FOLDER.glob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8") and path.name not in PARTS
)


def test_all_are_found() -> None:
    assert {"host_overhead.py", "cpu_engine.py", "policies.py", "speculation.py", "gpu_ops.py"} <= set(BENCHMARKS)
    assert len(BENCHMARKS) >= 15


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_names_both_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    for module in [m for m, found in sys.modules.items() if str(FOLDER) in str(getattr(found, "__file__", ""))]:
        del sys.modules[module]
    assert ended.value.code == 0
    words = capsys.readouterr().out.split()
    assert {"--quick", "--json"} <= set(words)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_make_bench_runs_it(name: str) -> None:
    """The target takes whatever names the option as the parsers do."""
    makefile = (FOLDER.parent / "Makefile").read_text(encoding="utf-8")
    assert "grep -l '\"--quick\"' benchmarks/*.py" in makefile
    assert "--quick || [ $$? -eq 3 ] || exit 1" in makefile
    assert '"--quick"' in (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_last_line_is_an_object(name: str, tmp_path: Path) -> None:
    """Without an accelerator those that need one say so in a line and end with a code that ``make bench`` knows."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), "--quick", "--json"],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    if name.startswith("gpu_") and not torch.cuda.is_available():
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"{name.removesuffix('.py')}: needs a GPU")
        return
    assert done.returncode == 0, done.stderr[-4000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    assert answer
