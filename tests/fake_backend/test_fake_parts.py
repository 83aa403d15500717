"""The fake device's own promises: lateness, order, gifts, poison, sizes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_core.api import DeviceInfo, ProbeEnv

NEVER = 3600.0


@pytest.fixture
def device() -> Any:
    from deepinfer_fake.plugin import deepinfer_probe

    (info,) = deepinfer_probe(ProbeEnv(environ={"FAKE_MEMORY_MIB": "1"}))
    assert isinstance(info, DeviceInfo)
    return info.provider.load()(info)


@pytest.fixture
def stream() -> Iterator[Any]:
    """A stream that runs nothing unless somebody waits."""
    from deepinfer_fake.stream import LateStream

    stream = LateStream(NEVER)
    yield stream
    stream.close()


# ---- streams


def test_nothing_runs_before_somebody_waits(stream: Any) -> None:
    ran: list[int] = []
    events = [stream.submit(lambda n=n: ran.append(n)) for n in range(3)]
    assert ran == []
    assert not any(event.done() for event in events)
    events[1].wait()
    assert ran == [0, 1]
    assert [event.done() for event in events] == [True, True, False]


def test_closing_finishes_what_was_submitted_and_may_be_repeated(stream: Any) -> None:
    ran: list[int] = []
    stream.submit(lambda: ran.append(1))
    stream.close()
    stream.close()
    assert ran == [1]
    with pytest.raises(RuntimeError, match="closed"):
        stream.submit(lambda: None)


def test_work_that_nobody_waits_for_is_done_in_the_end() -> None:
    from deepinfer_fake.stream import LateStream

    stream = LateStream(0.001)
    event = stream.submit(lambda: 7)
    assert event._outcome.result(60) == 7  # unlike wait(), this does not ask for it
    assert event.done()
    stream.close()


def test_an_error_reaches_the_one_who_waits_and_the_queue_goes_on(stream: Any) -> None:
    broken = stream.submit(lambda: 1 // 0)
    after = stream.submit(lambda: 2)
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    assert after.wait() == 2


def test_a_launched_closure_sees_what_the_host_changed_meanwhile(device: Any, stream: Any) -> None:
    """What makes a missing snapshot show."""
    tokens = np.array([1, 2, 3])
    event = stream.submit(lambda: device.upload(tokens.view()).clone())
    tokens[0] = 9
    assert event.wait().tolist() == [9, 2, 3]


# ---- bytes


def test_what_was_uploaded_is_no_longer_the_hosts(device: Any) -> None:
    array = np.arange(4)
    device.upload(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64, np.bool_, np.uint8])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 0), (2, 5)])
def test_values_dtypes_and_shapes_survive_a_round_trip(device: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    array = (np.random.default_rng(3).random(shape) * 7).astype(dtype)
    back = device.download(device.upload(array.copy()))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_download_is_a_copy(device: Any) -> None:
    tensor = device.upload(np.zeros(3))
    host = device.download(tensor)
    tensor += 1
    assert host.tolist() == [0, 0, 0]


def test_fresh_memory_is_poison(device: Any, pool: Any) -> None:
    assert pool.empty((2, 3), torch.float32).isnan().all()
    assert (pool.empty((4,), torch.int64) == -1).all()


def test_memory_is_counted_until_the_last_view_is_gone(device: Any, pool: Any) -> None:
    before = device.memory()
    assert before.total == 1 << 20
    view = pool.empty((256,), torch.float32)[:1]
    assert before.free - device.memory().free == 1024
    del view
    gc.collect()
    assert device.memory().free == before.free


def test_out_of_memory_is_an_error_of_its_own_and_recognised(device: Any, pool: Any) -> None:
    with pytest.raises(RuntimeError, match=r"fake device: 2097152 bytes asked for, \d+ left") as caught:
        pool.empty((1 << 21,), torch.uint8)
    assert device.is_out_of_memory(caught.value)
    assert not device.is_out_of_memory(RuntimeError("other"))
