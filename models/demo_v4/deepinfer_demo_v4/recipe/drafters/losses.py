"""What a draft module is trained to: the target's own distribution (arXiv:2607.05147, training), or a long round.

``0.1 CE + 0.9 ||p_d - p_t||_1``, and for the confidence ``BCE(c, 1 - ||p_d - p_t||_1 / 2)``, which is the chance that
the draft is accepted; of greedy text, whether it is. Position k of a block weighs ``exp(-(k-1)/gamma)``. Both
distributions are taken at the temperature that the sequence was drawn at, greedy text at :data:`SHARPEST`: there the
gradient still is one. Scores are float32: in bfloat16 a score of 15 is off by up to 0.03, which a low temperature
multiplies.

The distance judges every position after the true tokens alike, though a draft only counts where all before it were
accepted. :func:`reach` is the chance of that: with it, drafts of a block bring ``sum_k reach_k overlap_k`` tokens on
average, exactly, when the text is the target's own at that temperature.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from deepinfer_demo_v4.recipe.layers import rms

SHARPEST = 0.3

Objective = Literal["distance", "length"]


def agreement(
    scores: torch.Tensor, logits: torch.Tensor, truth: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Overlap ``1 - ||p_d - p_t||_1 / 2``, and the true token's cross entropy and ``log min(1, p_d / p_t)``, ``[N, K]``
    float32 each.

    Args:
        scores, logits: ``[N, K, V]`` of the module and of the target. truth: ``[N, K]`` tokens.
        temperature: ``[N]`` of the sequences.
    """
    scale = 1 / temperature.clamp(min=SHARPEST)[:, None, None]
    logp = torch.log_softmax(scores.float() * scale, -1)
    target = torch.log_softmax(logits.float() * scale, -1)
    distance = (logp.exp() - target.exp()).abs().sum(-1)
    said, true = (of.gather(-1, truth[..., None])[..., 0] for of in (logp, target))
    return 1 - distance / 2, -said, (said - true).clamp(max=0.0)


def reach(kept: torch.Tensor) -> torch.Tensor:
    """Chance that the drafts before each position are all accepted and are the true tokens, over that of these tokens.

    A draft equals x and is accepted with probability ``min(p_d(x), p_t(x))``, which is ``exp(kept)`` times the chance
    ``p_t(x)`` with which text drawn from the target has x there (Leviathan et al. 2023). ``[N, K]`` -> ``[N, K]``.
    """
    return torch.cat((torch.zeros_like(kept[:, :1]), kept[:, :-1]), 1).cumsum(1).exp()


def gained(
    overlap: torch.Tensor,
    entropy: torch.Tensor,
    kept: torch.Tensor,
    temperature: torch.Tensor,
    weights: torch.Tensor,
    objective: Objective,
) -> torch.Tensor:
    """Loss of each position ``[N, K]``. For ``length`` the tokens of a round, those of text drawn at temperature 1
    twice as heavy as greedy ones, of which a round has twice as many; ``weights`` are not read.
    """
    if objective == "distance":
        return (0.1 * entropy + 1.8 * (1 - overlap)) * weights
    reached = reach(kept)
    each = 0.1 * entropy * reached.detach() + 1.8 * (1 - reached * overlap)
    return each * (1 + temperature)[:, None]


def position_weights(gamma: int, device: torch.device) -> torch.Tensor:
    """``exp(-(k-1)/gamma)`` for k = 1..gamma, with mean 1."""
    w = torch.exp(-torch.arange(gamma, device=device) / gamma)
    return w / w.mean()


def plain_loss(
    y: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    hidden: torch.Tensor,
    truth: torch.Tensor,
    temperature: torch.Tensor,
    weights: torch.Tensor,
    eps: float,
    objective: Objective = "distance",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Without heads: ``y [N, K, D]`` not normed, ``hidden [N, K, D]`` the target's, normed; ``weights [K]``.

    Returns:
        the loss; each position's overlap, whether its best-scored token is the true one, and ``log min(1, p_d / p_t)``
        of the true one, ``[N, K]`` each.
    """
    scores = functional.linear(rms(y.float(), norm, eps), head)
    found = agreement(scores, functional.linear(hidden.float(), head), truth, temperature)
    each = gained(*found, temperature, weights, objective)
    return each.mean(), found[0], scores.detach().argmax(-1) == truth, found[2]


def markov_loss(
    y: torch.Tensor,
    norm: torch.Tensor,
    head: torch.Tensor,
    hidden: torch.Tensor,
    truth: torch.Tensor,
    temperature: torch.Tensor,
    weights: torch.Tensor,
    eps: float,
    previous: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    confidence: torch.Tensor,
    objective: Objective = "distance",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With Markov and confidence head: every draft knows the true token before it, ``previous [N, K]``.

    Returns:
        as :func:`plain_loss`, and the confidence's logits ``[N, K]``.
    """
    tie = functional.embedding(previous, table)
    scores = functional.linear(rms(y.float(), norm, eps), head) + functional.linear(tie, out)
    found = agreement(scores, functional.linear(hidden.float(), head), truth, temperature)
    overlap = found[0]
    # What the confidence says may not change what is drafted.
    said = functional.linear(torch.cat((y.float(), tie), -1).detach(), confidence)[..., 0]
    hit = scores.detach().argmax(-1) == truth
    greedy = (temperature == 0)[:, None]
    wanted = torch.where(greedy, hit.to(overlap.dtype), overlap.detach().clamp(0, 1))
    each = gained(*found, temperature, weights, objective)
    each = each + functional.binary_cross_entropy_with_logits(said, wanted, reduction="none") * weights
    return each.mean(), overlap, hit, found[2], said
