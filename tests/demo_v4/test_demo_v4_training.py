"""Training: what learns from what, the optimiser's pieces, and that a piece learns and resumes."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from deepinfer_demo_v4.recipe import attention, checkpoint, forward, layers, optimiser, train
from deepinfer_demo_v4.recipe.attention import Selection
from deepinfer_demo_v4.recipe.shape import Shape

from .support import SMALL, random_weights

SHAPE = Shape.read(SMALL)
CPU = torch.device("cpu")


def tokens(seed: int, *size: int) -> torch.Tensor:
    return torch.randint(2, SHAPE.vocab, size, generator=torch.Generator().manual_seed(seed))


def gradients(what: str) -> dict[str, torch.Tensor]:
    """Gradients of the indexer's loss, or of the next-token loss."""
    weights = train.leaves(random_weights(SHAPE, 1), CPU)
    ids = tokens(2, 2, 60)
    out = forward.forward(weights, ids[:, :-1], SHAPE, Selection(learn=True))
    loss = out.index_loss if what == "index" else train.head_loss(out.hidden, weights["head.weight"], ids[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: t.grad for name, t in weights.items() if t.grad is not None and bool(t.grad.any())}


def test_the_indexer_learns_from_its_own_loss_alone() -> None:
    index, main = gradients("index"), gradients("main")
    assert index.keys() == {n for n in random_weights(SHAPE, 1) if ".indexer." in n}
    learned = {n for n, t in random_weights(SHAPE, 1).items() if t.is_floating_point()}
    assert main.keys() == {n for n in learned if ".indexer." not in n and not n.endswith("gate.bias")}


def test_indexer_loss_is_the_divergence_over_allowed_entries() -> None:
    generator = torch.Generator().manual_seed(3)
    index, mass = torch.randn(1, 3, 4, generator=generator), torch.rand(1, 3, 4, generator=generator)
    allowed = torch.tensor([[[False] * 4, [True, True, False, False], [True] * 4]])
    mass = mass * allowed
    total = 0.0
    for row, count in ((1, 2), (2, 4)):
        p = mass[0, row, :count].double() / mass[0, row, :count].double().sum()
        q = torch.softmax(index[0, row, :count].double(), 0)
        total += float((p * (p / q).log()).sum()) / 2
    assert abs(float(attention.indexer_loss(index, mass, allowed)) - total) < 1e-6


def test_the_indexers_gradient_makes_it_agree_with_attention() -> None:
    """After some steps on its loss alone, the choice holds more of the attention that dense layers would give."""
    weights = train.leaves(random_weights(SHAPE, 4), CPU)
    ids = tokens(5, 4, 64)
    learned = [t for n, t in weights.items() if ".indexer." in n]
    adam = torch.optim.Adam(learned, lr=3e-3)
    losses = []
    for _ in range(30):
        loss = forward.forward(weights, ids, SHAPE, Selection(sparse=False, learn=True)).index_loss
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_the_dense_warm_up_sees_every_entry() -> None:
    """One program serves both: a flag puts back what the indexer left out."""
    weights, ids = random_weights(SHAPE, 6), tokens(7, 1, 60)

    def run(sparse: bool, flag: bool | None) -> torch.Tensor:
        dense = None if flag is None else torch.tensor(flag)
        return forward.forward(weights, ids, SHAPE, Selection(sparse=sparse), dense=dense).hidden

    assert torch.allclose(run(True, True), run(False, None), atol=1e-5)
    assert torch.equal(run(True, False), run(True, None))
    assert not torch.allclose(run(True, None), run(False, None), atol=1e-2)


def test_choices_are_the_best_visible_entries() -> None:
    scores = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(8))
    visible = (torch.arange(12) < torch.arange(9)[:, None] + 1)[None]
    for exact in (False, True):
        mask = attention.choose(scores, visible, 4, exact)
        for b in range(2):
            for t in range(9):
                best = sorted(range(t + 1), key=lambda i: -float(scores[b, t, i]))[:4]
                assert mask[b, t].nonzero().flatten().tolist() == sorted(best)


def test_every_expert_at_once_is_the_chosen_ones() -> None:
    """Against a loop over tokens and their own experts, in float64."""
    weights = forward.layer_weights(random_weights(SHAPE, 9), 3)
    x = torch.randn(1, 5, SHAPE.hidden, generator=torch.Generator().manual_seed(9))
    found, chosen = layers.experts(x, tokens(1, 1, 5), weights, SHAPE)
    w = {name: t.double() for name, t in weights.items()}
    for t in range(5):
        row = x[0, t].double()
        score = torch.log1p(torch.exp(w["ffn.gate.weight"] @ row)).sqrt()
        best = (score + w["ffn.gate.bias"]).argsort(descending=True)[: SHAPE.top_k].tolist()
        assert sorted(best) == sorted(chosen[0, t].tolist())
        parts = [(f"experts.{e}", 1.5 * score[e] / score[best].sum()) for e in best] + [("shared_experts", 1.0)]
        wanted = torch.zeros(SHAPE.hidden, dtype=torch.float64)
        for owner, share in parts:
            kind, _, number = owner.partition(".")
            w1, w3, w2 = (w[f"ffn.{kind}.{m}.weight"] for m in ("w1", "w3", "w2"))
            w1, w3, w2 = (m[int(number)] if number else m for m in (w1, w3, w2))
            gate = (w1 @ row).clamp(max=10)
            wanted += share * (w2 @ (gate * torch.sigmoid(gate) * (w3 @ row).clamp(-10, 10)))
        assert torch.allclose(found[0, t].double(), wanted, atol=1e-5)


def test_muon_makes_matrices_orthogonal() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(10))
    values = torch.linalg.svdvals(optimiser.orthogonal(matrices).float())
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrices[0], full_matrices=False)
    aligned = (optimiser.orthogonal(matrices)[0].float() * (u @ v)).sum() / 24
    assert float(aligned) > 0.8


def options(**changes: Any) -> argparse.Namespace:
    fields: dict[str, Any] = {
        "batch": 4,
        "length": 48,
        "until": 1e9,
        "warm": 0.2,
        "bias_rate": 1e-2,
        "rate_share": 1.0,
        "compile": "no",
        "seed": 0,
    }
    return argparse.Namespace(**(fields | changes))


def trainer(weights: dict[str, torch.Tensor], **changes: Any) -> train.Trainer:
    """On a text with a pattern of period 7."""
    stream = (torch.arange(4000) * 5 % 7 + 10).int()
    leaves = train.leaves(weights, CPU)
    return train.Trainer(
        leaves, SHAPE, stream, optimiser.Optimiser(leaves, SHAPE.o_groups, 0.02, 2e-3), options(**changes)
    )


def steps(one: train.Trainer, count: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    dense = torch.tensor(False)
    return [float(one.step(generator, 1.0, dense)["loss"]) for _ in range(count)]


def test_a_piece_learns_and_the_next_one_starts_where_it_ended(tmp_path: Path) -> None:
    counts = torch.ones(SHAPE.vocab).numpy()
    first = trainer(checkpoint.initial(SHAPE, counts))
    losses = steps(first, 25)
    assert losses[0] > 3
    assert losses[-1] < 0.5 * losses[0]
    checkpoint.save(first.weights, tmp_path)
    again = steps(trainer(checkpoint.load(tmp_path)), 1)
    assert abs(again[0] - losses[-1]) < 0.5 * losses[-1] + 0.05


def test_a_piece_that_has_no_time_for_a_step_ends_with_an_error() -> None:
    one = trainer(random_weights(SHAPE, 12), until=0.0)
    with pytest.raises(SystemExit, match=r"--until 0: .* s went by before the first step"):
        train.train(one, io.StringIO())


def test_biases_move_towards_idle_experts_and_have_no_gradient() -> None:
    one = trainer(random_weights(SHAPE, 11))
    before = one.weights["layers.3.ffn.gate.bias"].clone()
    assert not one.weights["layers.3.ffn.gate.bias"].requires_grad
    chosen = [torch.zeros(1, 8, 2, dtype=torch.int64)] * 3 + [torch.tensor([[[0, 1]] * 6 + [[0, 2]] * 2])]
    worst = one._balance(chosen, 0.5)
    moved = one.weights["layers.3.ffn.gate.bias"] - before
    assert torch.allclose(moved, 0.005 * torch.tensor([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0]))
    assert float(worst) == pytest.approx(6.0)


def test_the_schedule_warms_up_and_comes_down() -> None:
    assert train.schedule(0.0, 0) == pytest.approx(0.01)
    assert train.schedule(0.0, 1000) == pytest.approx(1.0)
    assert train.schedule(0.5, 1000) == pytest.approx(0.505)
    assert train.schedule(1.0, 1000) == pytest.approx(0.01)
