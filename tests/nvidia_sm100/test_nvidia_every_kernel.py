"""No kernel without a test: each is compiled for both generations and compared with the reference."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import deepinfer_nvidia_sm100
import pytest
from gpu_support import ON_GPU, providers
from test_nvidia_cross_compile import ALL, BY_WARPS, IN_FP8, ON_MATRIX_UNIT

from deepinfer_core.api import LazyRef

HERE = Path(__file__).parent
PACKAGE = Path(deepinfer_nvidia_sm100.__file__).parent

COMPARED = {
    "append_kernel": "test_nvidia_sampling.py::test_runner_operators",
    "apply_kernel": "test_nvidia_sampling.py::test_temperature",
    "attention_kernel": "test_nvidia_attention.py::test_windows",
    "band_kernel": "test_nvidia_sampling.py::test_top_p",
    "begin_kernel": "test_nvidia_sampling.py::test_temperature",
    "bias_kernel": "test_nvidia_sampling.py::test_bias",
    "bits_kernel": "test_nvidia_sampling.py::test_mask",
    "chosen_kernel": "test_nvidia_sampling.py::test_logprobs",
    "combine_kernel": "test_nvidia_attention.py::test_fixed_chunks_have_the_same_bits_however_many_programs_take_them",
    "count_kernel": "test_nvidia_sampling.py::test_penalties",
    "decode_kernel": "test_nvidia_attention.py::test_soft_cap_and_sinks",
    "described_gated_kernel": "test_nvidia_fused.py::test_gated_tiles",
    "described_rows_kernel": "test_nvidia_linear.py::test_tiles_that_descriptors_bring",
    "embedding_kernel": "test_nvidia_pointwise.py::test_embedding",
    "few_rows_kernel": "test_nvidia_linear.py::test_every_number_of_rows",
    "fixed_attention_kernel": "test_nvidia_attention.py::test_fixed_chunks_equal_the_formula",
    "fp8_few_rows_kernel": "test_nvidia_fp8_linear.py::test_results_in_float32",
    "fp8_many_rows_kernel": "test_nvidia_fp8_linear.py::test_tiles_of_many_rows",
    "held_rows_kernel": "test_nvidia_weight_in_registers.py::test_every_number_of_rows",
    "ids_kernel": "test_nvidia_sampling.py::test_mask",
    "input_ids_kernel": "test_nvidia_sampling.py::test_runner_operators",
    "inputs_kernel": "test_nvidia_fused.py::test_attention_inputs",
    "lagging_kernel": "test_nvidia_sampling.py::test_temperature",
    "left_kernel": "test_nvidia_sampling.py::test_temperature",
    "levels_kernel": "test_nvidia_sample_tokens.py::test_what_is_above_a_few_levels_is_summed",
    "list_kernel": "test_nvidia_work_list.py::test_contexts_of_all_lengths",
    "many_rows_kernel": "test_nvidia_fixed_order.py::test_every_tile_cuts_and_sums_alike",
    "merge_kernel": "test_nvidia_attention.py::test_a_context_in_many_chunks",
    "norm_kernel": "test_nvidia_pointwise.py::test_norm",
    "one_row_kernel": "test_nvidia_weight_in_registers.py::test_every_number_of_rows",
    "peak_kernel": "test_nvidia_sampling.py::test_temperature",
    "penalise_kernel": "test_nvidia_sampling.py::test_penalties",
    "quantise_rows_kernel": "test_nvidia_fp8_linear.py::test_rows_are_rounded_as_the_reference_rounds",
    "race_kernel": "test_nvidia_sample_tokens.py::test_flat_rows_are_read_twice_and_no_more",
    "remove_kernel": "test_nvidia_sampling.py::test_top_k",
    "rope_kernel": "test_nvidia_pointwise.py::test_rope",
    "settle_kernel": "test_nvidia_sampling.py::test_top_p",
    "shortlist_kernel": "test_nvidia_sampling.py::test_draws_are_the_references",
    "slot_mapping_kernel": "test_nvidia_sampling.py::test_runner_operators",
    "survey_kernel": "test_nvidia_sampling.py::test_draws_are_the_references",
    "swiglu_kernel": "test_nvidia_pointwise.py::test_swiglu",
    "weigh_kernel": "test_nvidia_sample_tokens.py::test_flat_rows_are_read_twice_and_no_more",
    "widen_kernel": "test_nvidia_fp8_linear.py::test_a_weight_is_widened_exactly",
    "write_kernel": "test_nvidia_pointwise.py::test_write_kv",
}
"""The test that compares a kernel with the reference, in the interpreter too."""
ON_A_GPU_ALONE = {"fp8_hopper_kernel": "test_nvidia_fp8_hopper.py::test_tiles"}
"""In Gluon, which has no interpreter; it runs where there is a GPU of 9.0."""


@cache
def jitted() -> dict[str, ast.FunctionDef]:
    """Every function of the package that Triton or Gluon compiles."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {f.name: f for f in functions if any(".jit" in ast.unparse(d) for d in f.decorator_list)}


def called(name: str) -> set[str]:
    """Jitted functions that this one names in its body."""
    body = [node for statement in jitted()[name].body for node in ast.walk(statement)]
    return {node.id for node in body if isinstance(node, ast.Name) and node.id in jitted()} - {name}


@cache
def kernels() -> frozenset[str]:
    """Those that no other calls: what is launched."""
    return frozenset(jitted()) - {other for name in jitted() for other in called(name)}


def reached(name: str) -> set[str]:
    found, fresh = set(), {name}
    while fresh:
        found |= fresh
        fresh = {other for each in fresh for other in called(each)} - found
    return found


def multiplies(name: str) -> bool:
    """Whether a matrix product is somewhere in the kernel."""
    text = " ".join(ast.unparse(jitted()[each]) for each in reached(name))
    return any(word in text for word in ("tl.dot", "warpgroup_mma", "tcgen05_mma"))


@cache
def launched(capability: int) -> dict[str, list[str]]:
    """Case of cross_compile.py -> kernels."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(HERE / "launched_kernels.py"), str(capability)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def names(cases: dict[str, list[str]]) -> Iterator[str]:
    for some in cases.values():
        yield from some


def test_the_kernels_were_found() -> None:
    assert len(kernels()) > 30
    assert {"attention_kernel", "few_rows_kernel", "survey_kernel", "fp8_hopper_kernel"} <= kernels()
    assert multiplies("attention_kernel")
    assert not multiplies("survey_kernel")


@pytest.mark.parametrize("capability", [90, 100])
def test_every_kernel_is_cross_compiled(capability: int) -> None:
    cases = launched(capability)
    assert set(cases) == set(ALL)
    for_it = kernels() if capability == 90 else kernels() - set(ON_A_GPU_ALONE)
    assert sorted(for_it - set(names(cases))) == []


@pytest.mark.parametrize("capability", [90, 100])
def test_every_product_is_looked_at_for_its_instructions(capability: int) -> None:
    """A kernel that multiplies has a case in which the matrix unit's instructions are asked for."""
    cases = launched(capability)
    asked = {kernel for case in cases.keys() & (ON_MATRIX_UNIT | IN_FP8 | BY_WARPS) for kernel in cases[case]}
    products = {name for name in names(cases) if multiplies(name)}
    assert sorted(products - asked) == []
    in_float32 = {case for case in cases if "float32" in case}
    silent = [c for c in cases if c not in ON_MATRIX_UNIT | IN_FP8 | BY_WARPS | in_float32 and set(cases[c]) & products]
    assert silent == []


def test_every_kernel_has_a_test_that_compares_it() -> None:
    assert COMPARED.keys() | ON_A_GPU_ALONE.keys() == kernels()
    for test in (*COMPARED.values(), *ON_A_GPU_ALONE.values()):
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (HERE / file).read_text(encoding="utf-8"), test


def test_every_operator_says_its_floor() -> None:
    """Bytes or operations below which nothing can be done, where a reader of the operator looks first."""
    targets = {provider.build.target for provider in providers() if isinstance(provider.build, LazyRef)}
    modules = {target.partition(":")[0] for target in targets} - {"deepinfer_nvidia_sm100.ops.kv_layout"}
    assert len(modules) > 20
    silent = [name for name in modules if "\nFloor: " not in str(importlib.import_module(name).__doc__)]
    assert sorted(silent) == []


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="watches the interpreter")
def test_those_tests_launch_their_kernels(tmp_path: Path) -> None:
    report = tmp_path / "launched.json"
    tests = [str(HERE / test) for test in sorted(set(COMPARED.values()))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "launch_report", *tests],
        env={**os.environ, "LAUNCH_REPORT": str(report), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    assert [kernel for kernel, test in COMPARED.items() if kernel not in found.get(test, ())] == []
