"""What a benchmark sends: synthetic prompts with Poisson arrivals, or the arrivals of a recorded trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from deepinfer_core.api import InvalidRequestError
from deepinfer_core.engine.sampling_params import SamplingParams
from deepinfer_core.engine.trace_file import Arrival, Trace


@attrs.frozen(kw_only=True)
class LoadItem:
    """One request: its prompt with its fields, how it is sampled, and when it comes, in seconds from the start."""

    prompt: Mapping[str, Any]
    params: SamplingParams
    at: float = 0.0


def synthetic_load(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    request_rate: float | None,
    seed: int,
    vocab_size: int,
    max_model_len: int,
) -> list[LoadItem]:
    """Random prompts of one length, answered greedily with ``output_len`` tokens each.

    Args:
        request_rate: requests per second, with exponential gaps; None: all at once.

    Raises:
        InvalidRequestError: prompt and output do not fit the context.
    """
    if input_len + output_len > max_model_len:
        raise InvalidRequestError(
            f"--input-len {input_len} and --output-len {output_len} are {input_len + output_len} tokens together; "
            f"the context holds {max_model_len}"
        )
    random = np.random.default_rng(seed)
    prompts = random.integers(0, vocab_size, (num_prompts, input_len))
    gaps = np.zeros(num_prompts) if request_rate is None else random.exponential(1 / request_rate, num_prompts)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    return [
        LoadItem(prompt={"prompt_token_ids": prompt}, params=params, at=at)
        for prompt, at in zip(prompts.tolist(), (gaps.cumsum() - gaps[0]).tolist(), strict=True)
    ]


def trace_load(trace: Trace, *, time_scale: float, seed: int, vocab_size: int, max_model_len: int) -> list[LoadItem]:
    """The trace's arrivals, with made-up tokens that share prefixes as the recorded ones did.

    Requests that ended get as many output tokens as they had; others as many as they might have had.

    Args:
        time_scale: factor on the times; 0 sends everything at once.

    Raises:
        InvalidRequestError: there is no arrival, or a prompt does not fit the context.
    """
    if not trace.arrivals:
        raise InvalidRequestError("the trace holds no arrival")
    outputs, start = trace.output_lengths(), trace.arrivals[0].time
    block = trace.header.block_size
    load = []
    for number, arrival in enumerate(trace.arrivals):
        if arrival.prompt >= max_model_len:
            raise InvalidRequestError(
                f"arrival {arrival.id!r} of the trace has prompt={arrival.prompt}; the context holds {max_model_len}"
            )
        # Blocks come from their numbers, so that equal numbers are equal tokens; the rest is the request's own.
        parts = [_tokens((seed, 0, shared), block, vocab_size) for shared in arrival.blocks]
        parts.append(_tokens((seed, 1, number), arrival.prompt - block * len(parts), vocab_size))
        output = min(outputs.get(arrival.id, arrival.max_tokens), max_model_len - arrival.prompt)
        load.append(
            LoadItem(
                prompt={"prompt_token_ids": np.concatenate(parts).tolist(), **_fields(arrival)},
                params=SamplingParams(
                    n=arrival.n,
                    temperature=arrival.temperature,
                    top_p=arrival.top_p,
                    top_k=arrival.top_k,
                    seed=seed + number,
                    max_tokens=max(1, output),
                    ignore_eos=True,
                ),
                at=(arrival.time - start) * time_scale,
            )
        )
    return load


def _tokens(key: tuple[int, int, int], count: int, vocab_size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(key).integers(0, vocab_size, count)


def _fields(arrival: Arrival) -> dict[str, Any]:
    """Request fields as a prompt carries them, times in milliseconds from the arrival."""
    fields: dict[str, Any] = {"priority": arrival.priority, "tenant": arrival.tenant}
    limits = {
        "deadline_ms": None if arrival.deadline is None else arrival.deadline - arrival.time,
        "ttft_target_ms": arrival.ttft_target,
        "tpot_target_ms": arrival.tpot_target,
    }
    return fields | {name: seconds * 1000 for name, seconds in limits.items() if seconds is not None and seconds > 0}
