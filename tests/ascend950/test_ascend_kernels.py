"""The own Triton kernels: numbers in the interpreter, and compilation by the real Ascend 950 compiler's front half."""

from __future__ import annotations

import json
import os
import random
import re
import stat
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from deepinfer_ascend950 import support
from deepinfer_ascend950.capabilities import providers

from deepinfer_core.api import CompressRequest, HyperConnectionRequest, IndexTopKRequest

HERE = Path(__file__).parent
COMPILER, ADAPTER = "ascendnpu-ir==1.2.0", "triton-ascend==3.2.0"
CHIP = "Ascend950PR_9599"
UNIFIED_BUFFER = 248 * 1024
BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i64": 64, "i16": 16, "i8": 8, "i1": 8}

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton")


def child(script: str, *arguments: str, **variables: str) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        **variables,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *(path for path in sys.path if path)]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_kernels_compute_what_the_reference_does() -> None:
    seed = random.getrandbits(31)
    lines = [json.loads(line) for line in child("kernel_numbers.py", str(seed), TRITON_INTERPRET="1").splitlines()]
    assert len(lines) == 15
    for line in lines:
        if "same" in line:
            assert line["same"], (line, seed)
        else:
            assert line["error"] < 1e-5, (line, seed)


def request_of(**changes: Any) -> IndexTopKRequest:
    fields: dict[str, Any] = {
        "cache_group": "index",
        "heads": 64,
        "head_dim": 128,
        "top_k": 512,
        "rate": 4,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "scale": 1.0,
        "block_size": 128,
    }
    return IndexTopKRequest(**{**fields, **changes})


def test_kernels_that_nobody_ran_on_the_device_win_no_choice_by_themselves() -> None:
    own = [provider for provider in providers() if provider.name.startswith("triton_")]
    assert [provider.on_request for provider in own] == [True, True, True]
    mix = HyperConnectionRequest(streams=4, hidden=64, iterations=2, eps=1e-6, norm_eps=1e-6, dtype="bfloat16")
    for verdict in (support.index_topk(request_of()), support.hyper_mix(mix), support.compress(pooling())):
        assert verdict
        assert verdict.reason == "not run on hardware"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"heads": 8}, "heads is 8"),
        ({"head_dim": 96}, "head_dim is 96"),
        ({"rate": 16}, "block_size / rate is 8"),
        ({"cache_dtype": "float16"}, "one for both"),
        ({"dtype": "float64", "cache_dtype": "float64"}, "float64"),
    ],
)
def test_the_index_kernel_says_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    verdict = support.index_topk(request_of(**changes))
    assert not verdict
    assert reason in verdict.reason


def pooling(**changes: Any) -> CompressRequest:
    fields: dict[str, Any] = {
        "cache_group": "tail",
        "entry_group": "entries",
        "entry": "kv",
        "head_dim": 512,
        "rate": 4,
        "overlap": True,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "eps": 1e-6,
        "rotary_dim": 64,
        "theta": 1e4,
        "max_positions": 1024,
        "block_size": 128,
    }
    return CompressRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"), [({"head_dim": 96}, "head_dim is 96"), ({"dtype": "float64"}, "dtype is float64")]
)
def test_the_pooling_kernel_says_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    verdict = support.compress(pooling(**changes))
    assert not verdict
    assert reason in verdict.reason


@pytest.fixture(scope="module")
def tools(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two wheels unpacked, with stand-ins for the closed last step, which keep what they are given."""
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    folder = tmp_path_factory.mktemp("kept") if cache is None else cache.mkdir("ascend-compiler")
    if not (folder / "ready").exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, COMPILER, ADAPTER], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the Ascend compiler cannot be had here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
        for path in [*folder.glob("ascendnpuir/bin/*"), folder / "triton/backends/ascend/triton-adapter-opt"]:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (folder / "last").mkdir(exist_ok=True)
        for name in ("hivmc", "hivmc-a5"):
            script = folder / "last" / name
            script.write_text(
                '#!/bin/sh\n[ "$1" = --version ] && { echo "hivmc 1.2.0"; exit 0; }\n'
                'input=$1\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
                'cp "$input" "$out.hivm.mlir"\n: > "$out"\n'
            )
            script.chmod(0o755)
        (folder / "ready").touch()
    return folder


@pytest.fixture(scope="module")
def compiled(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kernel -> its IR for the chip, after every pass but the closed last one."""
    folder = tmp_path_factory.mktemp("ir")
    child("kernel_ir.py", str(folder))
    environment = {**os.environ, "PATH": f"{tools / 'last'}:{tools / 'ascendnpuir/bin'}:{os.environ['PATH']}"}
    found = {}
    for source in sorted(folder.glob("*.ttir")):
        linalg, target = source.with_suffix(".mlir"), source.with_suffix(".o")
        for command in (
            [
                str(tools / "triton/backends/ascend/triton-adapter-opt"),
                str(source),
                "--triton-to-annotation",
                "--triton-to-linalg=global-kernel=false named-ops=True",
                "-o",
                str(linalg),
            ],
            [
                "bishengir-compile",
                str(linalg),
                "--enable-auto-multi-buffer=true",
                "--enable-hfusion-compile=true",
                "--enable-hivm-compile=true",
                "--enable-triton-kernel-compile=true",
                f"--target={CHIP}",
                "-o",
                str(target),
            ],
        ):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{source.stem}: {done.stderr[-1500:]}"
        found[source.stem] = Path(f"{target}.hivm.mlir").read_text()
    return found


def unified_buffer(ir: str) -> int:
    """Bytes from the start of the unified buffer to the end of the last tensor placed in it."""
    constants = {name: int(value) for name, value in re.findall(r"(%[\w]+) = \S*constant[ (]+(\d+)\S* : i64", ir)}
    ends = [0]
    for names, shape in re.findall(r"pointer_cast\(([^)]*)\)[^\n]*?memref<([^>,]*)[^>]*#hivm\.address_space<ub>", ir):
        *sizes, kind = shape.split("x")
        count = 1
        for size in sizes:
            count *= int(size)
        ends += [constants[name.strip()] + count * BITS[kind] // 8 for name in names.split(",")]
    return max(ends)


@pytest.mark.slow
def test_every_kernel_compiles_for_the_chip_within_its_unified_buffer(compiled: dict[str, str]) -> None:
    used = {name: unified_buffer(ir) for name, ir in compiled.items()}
    assert set(used) == {"coefficients", "gates", "weighted_sum", "index_scores", "pool", "pool_overlap"}
    for name, size in used.items():
        assert 0 < size <= UNIFIED_BUFFER, used
        assert f'"UB_SIZE", {UNIFIED_BUFFER * 8}' in compiled[name]  # bits, as the compiler's own table has them


@pytest.mark.slow
def test_the_products_of_the_index_kernel_run_on_the_cube(compiled: dict[str, str]) -> None:
    assert "mma_tile_bfloat16_t_to_float" in compiled["index_scores"]
    for name in ("coefficients", "gates", "weighted_sum", "pool", "pool_overlap"):
        assert "mma_tile" not in compiled[name]
