"""The loss that counts a round's tokens, and modules that grow: against enumeration, and against what they said."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

pytest.importorskip("deepinfer_demo_v4")

from deepinfer_demo_v4 import CHECKPOINT
from deepinfer_demo_v4.recipe import checkpoint
from deepinfer_demo_v4.recipe.drafters.grown import grown, own_places
from deepinfer_demo_v4.recipe.drafters.losses import agreement, gained, plain_loss, position_weights, reach
from deepinfer_demo_v4.recipe.drafters.modules import PROGRAMS, Blocks, Kind, block_rows, initial, stage_prefix
from deepinfer_demo_v4.recipe.layers import Weights
from deepinfer_demo_v4.recipe.rotary import angles
from deepinfer_demo_v4.recipe.shape import Shape

V, K = 4, 3
TAPS = (1, 3, 4, 5)


def every_text() -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(V), repeat=K)))


def test_reach_weighs_to_the_expected_length_of_a_round() -> None:
    """Over all texts of a target that knows the tokens before, and over all drafts, which do not, by rejection."""
    torch.manual_seed(int(torch.randint(9999, ())))
    target = torch.randn(K, V, V, V, dtype=torch.float64) * 2  # scores of position k after the two tokens before it
    draft = torch.randn(K, V, dtype=torch.float64) * 2
    p = lambda k, x: torch.softmax(target[k, x[k - 2] if k > 1 else 0, x[k - 1] if k else 0], -1)  # noqa: E731
    d = draft.softmax(-1)
    length = 0.0
    for x in every_text():  # drafts: each is accepted with probability min(1, p / d), all before it accepted
        chance, alive = 1.0, 1.0
        for k in range(K):
            chance *= float(d[k, x[k]])
            alive *= min(1.0, float(p(k, x)[x[k]] / d[k, x[k]]))
            length += alive * chance * V ** (k + 1 - K)  # so many texts begin alike
    texts = every_text()
    logits = torch.stack([torch.stack([p(k, x).log() for k in range(K)]) for x in texts]).float()
    scores = draft.float().expand(len(texts), K, V)
    overlap, _, kept = agreement(scores, logits, texts, torch.ones(len(texts)))
    truth = logits.double().gather(-1, texts[..., None])[..., 0].sum(1).exp()
    assert float(truth.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float((truth * (reach(kept) * overlap).sum(1)).sum()) == pytest.approx(length, rel=1e-5)


def test_the_distance_is_the_paper_s() -> None:
    y, hidden, head = torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(11, 8)
    truth, temperature = torch.randint(11, (2, 5)), torch.tensor([1.0, 0.0])
    weights, norm = position_weights(5, y.device), torch.ones(8)
    loss = plain_loss(y, norm, head, hidden, truth, temperature, weights, 1e-6)[0]
    scores = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()) @ head.T
    expected = torch.zeros(())
    for n, scale in ((0, 1.0), (1, 1 / 0.3)):
        logd, logp = (torch.log_softmax(s[n] * scale, -1) for s in (scores, hidden @ head.T))
        distance = (logd.exp() - logp.exp()).abs().sum(-1)
        entropy = -logd[torch.arange(5), truth[n]]
        expected = expected + ((0.1 * entropy + 0.9 * distance) * weights).sum() / 10
    torch.testing.assert_close(loss, expected)


def test_late_positions_count_as_much_as_they_are_reached() -> None:
    """Where the first draft is never accepted, those behind it get no gradient."""
    overlap, entropy = torch.rand(2, 4, requires_grad=True), torch.rand(2, 4, requires_grad=True)
    kept = torch.tensor([[-100.0, 0.0, 0.0, 0.0], [0.0, 0.0, -100.0, 0.0]])
    loss = gained(overlap, entropy, kept, torch.tensor([0.0, 1.0]), torch.ones(4), "length")
    loss.sum().backward()
    expected = torch.tensor([[-1.8, 0, 0, 0], [-3.6, -3.6, -3.6, 0]])
    torch.testing.assert_close(overlap.grad, expected)
    torch.testing.assert_close(entropy.grad, expected / -18)


@pytest.fixture(scope="module")
def target() -> tuple[Weights, Shape]:
    return checkpoint.load(CHECKPOINT), Shape.read(json.loads((CHECKPOINT / "config.json").read_text()))


@pytest.mark.parametrize("stages", [3, 5])
def test_a_grown_module_says_what_it_said(target: tuple[Weights, Shape], stages: int) -> None:
    weights, shape = target
    small, large = Kind.of("dspark-2", 8), Kind.of(f"dspark-{stages}", 8)
    w, first = initial(small, weights, shape, TAPS, 0), initial(large, weights, shape, TAPS, 1)
    more = grown(w, large, first, shape)
    assert {n: t.shape for n, t in more.items()} == {n: t.shape for n, t in first.items()}
    newest, features = torch.randint(3, shape.vocab, (6,)), torch.randn(2, 80, len(TAPS) * shape.hidden)
    blocks = Blocks(torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([5, 70, 66, 9, 79, 30]))
    table = angles(shape, "window", 90, newest.device)

    def rows(kind: Kind, w: Weights) -> torch.Tensor:
        given = (weights["embed.weight"], newest, features, blocks, 7, shape, table, PROGRAMS)
        return block_rows(kind, w, *given)

    with torch.no_grad():
        before, after = rows(small, w), rows(large, more)
    # A new stage's mixing keeps each stream to itself but for e^-8 of the others; a row may turn to other experts.
    apart = (after - before).norm(dim=-1) / before.norm(dim=-1)
    assert float(apart.median()) < 0.01
    last = stage_prefix(stages - 1)
    assert torch.equal(more[last + "norm.weight"], w["mtp.1.norm.weight"])
    assert grown(w, small, initial(small, weights, shape, TAPS, 1), shape) is w


def test_own_stages_are_spread() -> None:
    assert own_places(3, 5) == [0, 2, 4]
    assert own_places(2, 3) == [0, 2]
    assert own_places(3, 4) == [0, 2, 3]


def test_more_stages_than_layers_that_serve(target: tuple[Weights, Shape]) -> None:
    """Layers that look experts up are left out: the first stages begin alike."""
    weights, shape = target
    w = initial(Kind.of("dflash-5", 8), weights, shape, TAPS, 0)
    assert not any("tid2eid" in name for name in w)
    assert torch.equal(w["mtp.0.attn.wkv.weight"], w["mtp.1.attn.wkv.weight"])
    assert torch.equal(w["mtp.4.attn.wkv.weight"], weights["layers.5.attn.wkv.weight"])
