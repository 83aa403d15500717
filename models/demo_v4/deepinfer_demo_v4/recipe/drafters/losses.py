"""What a draft module is trained to: the target's own distribution (arXiv:2607.05147, training).

``0.1 CE + 0.9 ||p_d - p_t||_1``, and for the confidence ``BCE(c, 1 - ||p_d - p_t||_1 / 2)``, which is the chance that
the draft is accepted. Position k of a block weighs ``exp(-(k-1)/gamma)``. Both distributions are taken at the
temperature that the sequence was drawn at, greedy text at :data:`SHARPEST`: there the gradient still is one. Scores are
float32: in bfloat16 a score of 15 is off by up to 0.03, which a low temperature multiplies.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from deepinfer_demo_v4.recipe.layers import rms

SHARPEST = 0.3


def agreement(
    scores: torch.Tensor, logits: torch.Tensor, truth: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlap ``1 - ||p_d - p_t||_1 / 2`` and cross entropy of the true token, both ``[N, K]`` float32.

    Args:
        scores, logits: ``[N, K, V]`` of the module and of the target. truth: ``[N, K]`` tokens.
        temperature: ``[N]`` of the sequences.
    """
    scale = 1 / temperature.clamp(min=SHARPEST)[:, None, None]
    logp = torch.log_softmax(scores.float() * scale, -1)
    distance = (logp.exp() - torch.softmax(logits.float() * scale, -1)).abs().sum(-1)
    return 1 - distance / 2, -logp.gather(-1, truth[..., None])[..., 0]


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Without heads: ``y [N, K, D]`` not normed, ``hidden [N, K, D]`` the target's, normed; ``weights [K]``.

    Returns:
        the loss, each position's overlap ``[N, K]``, and whether the best-scored token is the true one.
    """
    scores = functional.linear(rms(y.float(), norm, eps), head)
    overlap, entropy = agreement(scores, functional.linear(hidden.float(), head), truth, temperature)
    each = 0.1 * entropy + 1.8 * (1 - overlap)
    return (each * weights).mean(), overlap, scores.detach().argmax(-1) == truth


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With Markov and confidence head: every draft knows the true token before it, ``previous [N, K]``.

    Returns:
        as :func:`plain_loss`, and the confidence's logits ``[N, K]``.
    """
    tie = functional.embedding(previous, table)
    scores = functional.linear(rms(y.float(), norm, eps), head) + functional.linear(tie, out)
    overlap, entropy = agreement(scores, functional.linear(hidden.float(), head), truth, temperature)
    # What the confidence says may not change what is drafted.
    said = functional.linear(torch.cat((y.float(), tie), -1).detach(), confidence)[..., 0]
    wanted = overlap.detach().clamp(0, 1)
    each = 0.1 * entropy + 1.8 * (1 - overlap)
    each = each + functional.binary_cross_entropy_with_logits(said, wanted, reduction="none")
    return (each * weights).mean(), overlap, scores.detach().argmax(-1) == truth, said
