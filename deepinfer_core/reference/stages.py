"""Sampling stages between the mask and the draw.

A row whose parameter is off leaves every stage bit for bit as it came, since a stage runs as soon as one
row of the step needs it. A row with a NaN or +inf keeps one, for the draw to find.
"""

from __future__ import annotations

import torch

from deepinfer_core.api import GREEDY_TEMPERATURE, BuildContext, SamplingBatch, SamplingRequest

_REMOVED = float("-inf")


class _Stage:
    def __init__(self, request: SamplingRequest, context: BuildContext) -> None:
        pass


class Bias(_Stage):
    """Adds ``bias_values`` to the logits of ``bias_ids``."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``."""
        spare = logits.shape[1]
        ids = batch.state.bias_ids[batch.slots]
        usable = (ids >= 0) & (ids < spare)
        padded = torch.nn.functional.pad(logits, (0, 1))
        padded.scatter_add_(1, torch.where(usable, ids, spare), batch.state.bias_values[batch.slots])
        return padded[:, :spare].contiguous()


class Penalties(_Stage):
    """Repetition (prompt and output), then frequency and presence (output): tokens before the row's position."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``."""
        state, slots = batch.state, batch.slots
        history = state.history[slots, : batch.max_position].to(torch.int64)
        place = torch.arange(history.shape[1], device=logits.device)
        past = place < batch.positions[:, None]
        output = past & (place >= state.prompt_len[slots, None])
        seen = _count(history, past, logits.shape[1]) > 0
        produced = _count(history, output, logits.shape[1])

        repetition = state.repetition[slots, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        result = torch.where(seen, repeated, logits)
        result = result - state.frequency[slots, None] * produced
        return result - state.presence[slots, None] * (produced > 0)


def _count(history: torch.Tensor, counted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each token stands where ``counted``: ``[N, P]`` twice -> ``[N, vocab_size]`` int64."""
    counts = torch.zeros((history.shape[0], vocab_size + 1), dtype=torch.int64, device=history.device)
    usable = counted & (history >= 0) & (history < vocab_size)
    counts.scatter_add_(1, torch.where(usable, history, vocab_size), usable.to(torch.int64))
    return counts[:, :vocab_size]


class Temperature(_Stage):
    """``(logits - max) / temperature``; rows at exactly 1, and greedy rows, stay as they are."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``. The maximum goes first, so that no quotient overflows upwards."""
        temperature = batch.state.temperature[batch.slots, None]
        unchanged = (temperature < GREEDY_TEMPERATURE) | (temperature == 1.0)
        divisor = torch.where(unchanged, 1.0, temperature)
        peak = logits.amax(dim=-1, keepdim=True)
        peak = torch.where(peak == _REMOVED, 0.0, peak)  # a row without a token stays one, and gets no NaN
        return torch.where(unchanged, logits, (logits - peak) / divisor)


class MinP(_Stage):
    """Removes tokens less likely than ``min_p`` times the likeliest: ``logit - max < log(min_p)``."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``."""
        # The float64 logarithm rounds to the same float32 wherever the row stands in the batch.
        floor = batch.state.min_p[batch.slots, None].to(torch.float64).log().to(torch.float32)
        return logits.masked_fill(logits - logits.amax(dim=-1, keepdim=True) < floor, _REMOVED)


class TopK(_Stage):
    """Keeps exactly the ``top_k`` best, score descending, then id ascending; below 1 or above V is off."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``."""
        top_k = batch.state.top_k[batch.slots, None]
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        rank = torch.arange(logits.shape[1], device=logits.device)
        removed = (top_k > 0) & (rank >= top_k)
        return logits.masked_fill(_unsort(removed, order), _REMOVED)


class TopP(_Stage):
    """Keeps a token iff the probability of all better ones is below ``top_p``; the best always stays."""

    def run(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """``[N, V]`` float32 -> fresh ``[N, V]``. Sums, the total's too, are kept in float64 and compared in float32.

        A softmax in float32 is not enough: thousands of equal weights round alike, and its total is off by 1e-4.
        """
        top_p = batch.state.top_p[batch.slots, None]
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = (ordered - ordered[:, :1]).exp().cumsum(dim=-1, dtype=torch.float64)
        before = torch.nn.functional.pad((mass / mass[:, -1:]).to(torch.float32)[:, :-1], (1, 0))
        removed = (top_p < 1) & ~(before < top_p)
        removed[:, 0] = False
        return logits.masked_fill(_unsort(removed, order), _REMOVED)


def _unsort(flags: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Flags in sorted order -> flags by token id."""
    return torch.zeros_like(flags).scatter_(1, order, flags)
