"""The README's table is generated, and complete."""

from __future__ import annotations

from pathlib import Path

from deepinfer_ascend950.capabilities import NATIVE, REFERENCE, providers, table

from deepinfer_core.api import OpRequest

README = Path(__file__).parents[2] / "backends" / "ascend950" / "README.md"


def _operators() -> set[str]:
    kinds, found = [OpRequest], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        found.add(kind.op)
    return {op for op in found if op.partition(".")[0] in {"attention", "gemm", "moe", "pointwise", "kv_layout"}}


def test_the_readme_has_the_table() -> None:
    assert table() in README.read_text(encoding="utf-8")


def test_every_provider_is_in_the_table() -> None:
    assert {f"{provider.op}:{provider.name}" for provider in providers()} == set(NATIVE)


def test_every_operator_of_the_core_is_native_or_has_its_reason() -> None:
    native = {key.partition(":")[0] for key in NATIVE}
    assert native | set(REFERENCE) >= _operators()
    assert not native & set(REFERENCE)
