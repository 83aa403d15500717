"""How many threads the host uses, from what the kernel says about cores and limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_support import HOST

from deepinfer_core.cpu.device import CpuDevice
from deepinfer_core.cpu.threads import choose_threads, cpu_quota, physical_cores


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Eight processors, two on each of four cores."""
    for number in range(8):
        core = number % 4
        write(tmp_path, f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", f"{core},{core + 4}\n")
    return str(tmp_path)


@pytest.mark.parametrize(("usable", "cores"), [(set(range(8)), 4), ({0, 4}, 1), ({0, 1, 5}, 2), ({7}, 1)])
def test_siblings_count_once(pairs: str, usable: set[int], cores: int) -> None:
    assert physical_cores(usable, pairs) == cores


def test_without_topology_every_processor_counts(tmp_path: Path) -> None:
    assert physical_cores({0, 1, 2}, str(tmp_path)) == 3


@pytest.mark.parametrize(
    ("text", "quota"), [("150000 100000\n", 2), ("200000 100000\n", 2), ("5000 100000\n", 1), ("max 100000\n", 1 << 20)]
)
def test_quota_of_the_control_group(tmp_path: Path, text: str, quota: int) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert cpu_quota(str(tmp_path)) == quota


@pytest.mark.parametrize("text", [None, "", "nonsense"])
def test_an_unreadable_quota_limits_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert cpu_quota(str(tmp_path)) == 1 << 20


@pytest.fixture
def torch_has_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.usefixtures("torch_has_eight")
def test_one_thread_for_each_core(pairs: str) -> None:
    assert choose_threads({}, pairs) == 4


@pytest.mark.usefixtures("torch_has_eight")
def test_the_quota_counts_too(pairs: str) -> None:
    write(Path(pairs), "sys/fs/cgroup/cpu.max", "300000 100000")
    assert choose_threads({}, pairs) == 3


@pytest.mark.usefixtures("torch_has_eight")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_the_user_set_is_kept(pairs: str, name: str) -> None:
    assert choose_threads({name: "8"}, pairs) == 8
    assert choose_threads({name: ""}, pairs) == 4


def test_fewer_threads_than_cores_stay_fewer(monkeypatch: pytest.MonkeyPatch, pairs: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert choose_threads({}, pairs) <= 2


def test_the_number_is_shown_and_used_by_the_worker_thread() -> None:
    device = CpuDevice(HOST)
    assert device.describe()["threads"] == str(device.num_threads)
    stream = device.stream(overlap=True)
    try:
        assert stream.submit(torch.get_num_threads).wait() == device.num_threads
    finally:
        stream.close()
