"""Muon for the matrices, AdamW for everything else.

Muon (Jordan et al. 2024): a matrix's momentum is replaced by its nearest orthogonal matrix, by five Newton-Schulz
steps in bfloat16; stacked experts are matrices side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

MOMENTUM = 0.95
DECAY = 0.02
MATRICES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "wgate", "w1", "w2", "w3")


def is_matrix(name: str) -> bool:
    """Whether Muon trains this tensor; the indexer learns from another loss and is left to AdamW."""
    return name.endswith(".weight") and name.split(".")[-2] in MATRICES and ".indexer." not in name


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """``[..., r, c]`` -> the same with singular values near 1, bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    found: torch.Tensor = x.mT if tall else x
    return found


class Optimiser:
    """Both, over a dict of float32 leaf tensors. Nothing of it is saved: a later piece starts with empty moments.

    What changes from step to step is in tensors, so that :meth:`update` may be captured in a CUDA graph.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], groups: int, matrix_rate: float, rate: float) -> None:
        """``groups``: the ``o_groups`` that ``wo_a`` is made of."""
        learned = {n: t for n, t in weights.items() if t.requires_grad}
        self._stacks: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for name, tensor in learned.items():
            if is_matrix(name):
                view = tensor.view(groups, -1, tensor.shape[1]) if name.endswith("wo_a.weight") else tensor
                self._stacks.setdefault((*view.shape[-2:], view.dim()), []).append(tensor)
        self._groups = groups
        self._momentum = {k: [torch.zeros_like(t) for t in ts] for k, ts in self._stacks.items()}
        self._matrix_rate = matrix_rate
        plain = [t for n, t in learned.items() if not is_matrix(n) and not n.startswith(("embed", "head"))]
        ends = [t for n, t in learned.items() if n.startswith(("embed", "head.weight"))]
        self._rates = (rate, 2 * rate)
        first = next(iter(learned.values()))
        self._share = torch.zeros((), device=first.device)
        self._adam = torch.optim.AdamW(
            [{"params": tensors, "lr": torch.zeros((), device=first.device)} for tensors in (plain, ends)],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=first.is_cuda,
            capturable=first.is_cuda,
        )
        self._plain = plain + ends

    def step(self, share: float) -> None:
        """One update at ``share`` of the full learning rates; gradients are dropped."""
        self.aim(share)
        self.update()

    def aim(self, share: float) -> None:
        """Of the full learning rates, from the next update on."""
        self._share.fill_(share)
        for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
            group["lr"].fill_(rate * share)

    def update(self) -> None:
        """One update; gradients are dropped."""
        torch.nn.utils.clip_grad_norm_(self._plain, 1.0)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            for key, tensors in self._stacks.items():
                self._muon(key, tensors)

    def _muon(self, key: tuple[int, ...], tensors: list[torch.Tensor]) -> None:
        rows, columns, _ = key
        momentum = self._momentum[key]
        grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in tensors]
        torch._foreach_lerp_(momentum, grads, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(grads, momentum, MOMENTUM)
        update = orthogonal(torch.stack([g.view(-1, rows, columns) for g in ahead]))
        rate = self._matrix_rate * self._share
        torch._foreach_mul_(tensors, 1 - rate * DECAY)
        update = update.float() * (rate * math.sqrt(max(1.0, rows / columns)))
        torch._foreach_sub_(tensors, [u.view_as(t) for u, t in zip(update, tensors, strict=True)])
        for tensor in tensors:
            tensor.grad = None
