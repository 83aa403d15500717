"""DeepGEMM as a provider: offered only where it can run, called as it wants to be, and done without where it fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from deepinfer_nvidia_sm100 import deep_gemm_probe
from deepinfer_nvidia_sm100.ops.deep_gemm_linear import DeepGemmLinear
from gpu_support import DEVICE, ON_GPU, context, eligible, here, on_cuda
from test_nvidia_fp8_linear import ROUNDED, check, inputs, request, rounded, weights

INSTALLED = importlib.util.find_spec("deep_gemm") is not None


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler and a folder on the path, where modules may be put."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    deep_gemm_probe.failure.cache_clear()
    return tmp_path


def chosen(**changes: Any) -> list[str]:
    return [p.name for p in eligible(request(256, 256, "bfloat16", ROUNDED, **changes))]


@pytest.mark.skipif(INSTALLED, reason="DeepGEMM is installed")
def test_without_the_package_the_reason_says_what_to_install() -> None:
    assert chosen() == ["rounded_fp8_linear"]
    assert "deepinfer-nvidia-sm100[deepgemm]" in deep_gemm_probe.missing()


@pytest.mark.skipif(INSTALLED, reason="DeepGEMM is installed")
def test_with_the_package_it_comes_first_and_is_not_imported(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (compiler / "deep_gemm.py").write_text("raise ImportError('imported')")
    assert chosen() == ["deep_gemm_linear", "rounded_fp8_linear"]
    assert chosen(out_dtype="float32") == ["rounded_fp8_linear"]
    assert chosen(weight_dtype="fp8:e4m3:32x128") == ["rounded_fp8_linear"]
    assert chosen(demands=frozenset({"batch_invariant"})) == ["rounded_fp8_linear"]
    assert "deep_gemm" not in sys.modules
    (compiler / "bin" / "nvcc").unlink()
    monkeypatch.setenv("PATH", str(compiler))
    assert chosen() == ["rounded_fp8_linear"]
    assert "CUDA_HOME" in deep_gemm_probe.missing()


@pytest.mark.skipif(INSTALLED, reason="DeepGEMM is installed")
@pytest.mark.parametrize(("text", "reason"), [("import os; os.abort()", "LD_PRELOAD"), ("raise OSError('no')", "no")])
def test_a_first_product_that_dies_is_told(compiler: Path, text: str, reason: str) -> None:
    (compiler / "deep_gemm.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(compiler))
        patch.setattr(deep_gemm_probe, "TRIAL", "import deep_gemm")
        assert reason in deep_gemm_probe.failure()
    deep_gemm_probe.failure.cache_clear()


def build(**changes: Any) -> DeepGemmLinear:
    return DeepGemmLinear(
        on_cuda(request(200, 384, "bfloat16", ROUNDED, bias=True)), attrs.evolve(context(), **changes)
    )


def run(op: DeepGemmLinear, rows: int) -> None:
    parts, values = weights((200,), 384)
    bias = torch.linspace(-3, 3, 200).to(torch.bfloat16)
    packed = op.prepare([attrs.evolve(p, data=here(p.data)) for p in parts], here(bias))
    x = inputs(rows, 384, "bfloat16")
    check(op.run(here(x), packed), rounded(x) @ values.T + bias.double(), "bfloat16")


def test_where_the_trial_fails_the_other_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm_probe, "failure", lambda: "it died")
    with pytest.warns(RuntimeWarning, match="DeepGEMM is not used: it died"):
        op = build()
    run(op, 130)


def test_it_is_called_with_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that checks shapes, types and strides as the library does, and computes in float64."""
    calls = []

    def fp8_gemm_nt(
        a: tuple[torch.Tensor, torch.Tensor],
        b: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        *,
        recipe: tuple[int, int, int],
    ) -> None:
        (x, sx), (w, sw) = a, b
        assert (x.dtype, w.dtype, out.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
        assert sx.shape == (x.shape[0], x.shape[1] // 128)
        assert sx.stride(0) == 1
        assert sx.stride(1) % 4 == 0
        assert sw.shape == (-(-w.shape[0] // 128), w.shape[1] // 128)
        assert all(t.is_contiguous() for t in (x, w, sw, out))
        assert recipe == (1, 128, 128)
        wide = w.double() * sw.double().repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)
        out.copy_((x.double() * sx.double().repeat_interleave(128, 1)) @ wide.T)
        calls.append(len(x))

    monkeypatch.setattr(deep_gemm_probe, "failure", lambda: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(fp8_gemm_nt=fp8_gemm_nt))
    op = build(max_tokens=600)
    run(op, 131)
    assert calls == [128, 256, 512, 131]  # compiled at load, then run
    run(op, 131)
    assert calls[4:] == [131]


@pytest.mark.skipif(not (ON_GPU and INSTALLED), reason="needs a GPU and DeepGEMM")
@pytest.mark.parametrize("rows", [65, 128, 1000])
def test_the_library_itself(rows: int) -> None:
    assert deep_gemm_probe.failure() == ""
    run(build(device=DEVICE), rows)
