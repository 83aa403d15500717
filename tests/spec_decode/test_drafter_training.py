"""Steps of the demo drafters' training: what they move, what they share, and that a run goes on from its files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepinfer_demo_v4")

from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.drafters.export import export
from deepinfer_demo_v4.recipe.drafters.modules import PROGRAMS, Kind
from deepinfer_demo_v4.recipe.drafters.steps import Steps
from deepinfer_demo_v4.recipe.drafters.target_text import Text
from deepinfer_demo_v4.recipe.drafters.trained import LOSSES, Data, Trained, start
from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.shape import Shape

NAMES = ("dspark-2", "dflash", "mtp")
RUN = {**PROGRAMS, **LOSSES}


def options(**changes: object) -> argparse.Namespace:
    chosen = {
        "taps": "1,3,4,5",
        "seed": 0,
        "length": 90,
        "first": 40,
        "gamma": 5,
        "batch": 3,
        "anchors": 4,
        "rank": 16,
        "sinkhorn": 4,
        "matrix_rate": 0.01,
        "rate": 1e-3,
        "texts": 5,
        "resume": None,
        "objective": "length",
    }
    return argparse.Namespace(**(chosen | changes))


@pytest.fixture(scope="module")
def target() -> tuple[Weights, Shape]:
    return checkpoint.load(CHECKPOINT), Shape.read(json.loads((CHECKPOINT / "config.json").read_text()))


def opened(target: tuple[Weights, Shape], o: argparse.Namespace, earlier: Path | None = None) -> dict[str, Trained]:
    weights, shape = target
    text = Text.noise(5, o.length, 4, shape, torch.float32, torch.device("cpu"))
    data = Data.of(text, text, weights, shape, o)
    return {
        name: start(
            Kind.of(name, o.rank), weights, data, shape, RUN, o, earlier / f"demo-v4-{name}" if earlier else None
        )
        for name in NAMES
    }


def test_a_step_moves_every_module_and_a_share_of_zero_none(target: tuple[Weights, Shape]) -> None:
    modules = opened(target, options())
    steps = Steps(modules, modules["mtp"].data, torch.Generator().manual_seed(1))
    before = {name: {n: t.detach().clone() for n, t in m.learned.items()} for name, m in modules.items()}
    steps.prepare(lambda text: None, capture=False)
    for name, module in modules.items():
        assert all(torch.equal(t, before[name][n]) for n, t in module.learned.items())
    steps.step(1.0)
    for name, module in modules.items():
        still = {n for n, t in module.learned.items() if torch.equal(t, before[name][n])}
        assert all("gate.bias" in n for n in still), still
        assert torch.isfinite(steps.losses[name])
        assert float(steps.losses[name]) > 0


def test_each_module_predicts_about_as_many_tokens(target: tuple[Weights, Shape]) -> None:
    o = options(length=192, first=48, gamma=7, batch=192, anchors=16)
    data = opened(target, options())["mtp"].data
    data = Data(data.train, data.held, data.embedding, data.head, data.table, o.first, o.gamma, o.batch, o.anchors)
    blocks = o.batch * o.anchors
    whole = data.whole(blocks, o.length)
    assert abs(whole * (o.length - 2 - o.first) / (blocks * o.gamma) - 1) < 0.01
    assert whole <= o.batch


def test_anchors_leave_room_for_their_block(target: tuple[Weights, Shape]) -> None:
    o = options(batch=64, anchors=64)
    data = opened(target, o)["mtp"].data
    places = data.places()
    data.choose(places, torch.Generator().manual_seed(2))
    assert int(places[0].max()) < 5
    assert int(places[1].min()) == o.first
    assert int(places[1].max()) == o.length - 1 - o.gamma  # the last position is the target's unasked one
    drawn = data.drawn(places)
    assert torch.equal(drawn.text.ids[drawn.blocks.rows[70]], data.train.ids[places[0][1]])


def test_a_run_goes_on_from_its_files(target: tuple[Weights, Shape], tmp_path: Path) -> None:
    """Weights come back as the checkpoint keeps them; steps add up; another module's file is refused."""
    o = options(out=tmp_path)
    modules = opened(target, o)
    steps = Steps(modules, modules["mtp"].data, torch.Generator().manual_seed(3))
    steps.prepare(lambda text: None, capture=False)
    steps.step(1.0)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    export(modules, config, 7, o, [])
    again = opened(target, o, tmp_path)
    for name, module in modules.items():
        for n, tensor in module.learned.items():
            torch.testing.assert_close(again[name].learned[n], tensor, rtol=2**-8, atol=0)
    later = export(again, config, 4, options(out=tmp_path / "next", resume=tmp_path), [])
    assert (later["steps"], later["steps_before"]) == (4, 7)
    assert [sorted(row) for row in later["course"]] == [sorted(("step", *NAMES))]
    weights, shape = target
    kind, data = Kind.of("dflash-2", 16), modules["mtp"].data
    with pytest.raises(ValueError, match="not a dflash of 2 stages"):
        start(kind, weights, data, shape, RUN, o, tmp_path / "demo-v4-dflash")
