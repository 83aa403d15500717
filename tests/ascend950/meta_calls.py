"""Run by a Python that has torch_npu: every adapter on meta tensors. Prints one JSON line per case.

torch_npu's real schemas take the arguments and its real Meta kernels say shapes and dtypes; nothing is computed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import torch
import torch_npu  # noqa: F401  # registers torch.ops.npu
from deepinfer_ascend950.capabilities import providers

from deepinfer_core import api

META = torch.device("meta")


def empty(*shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device=META)


@attrs.frozen(eq=False)
class _MetaReference:
    """The rotary reference and the mix of hyper-connections, as far as shapes go."""

    request: Any

    def plan(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def run(self, x: torch.Tensor, plan: Any, inverse: bool = False) -> torch.Tensor:
        return torch.empty_like(x)


def build(request: api.OpRequest) -> Any:
    (provider,) = [p for p in providers() if p.op == request.op and not p.name.startswith("triton_")]
    verdict = provider.supports(request)
    assert verdict, verdict.reason
    context = api.BuildContext(
        device=META,
        max_tokens=64,
        max_requests=8,
        max_model_len=1024,
        num_threads=1,
        settings=None,
        reference=_MetaReference,
    )
    return provider.build.load()(request, context)  # type: ignore[union-attr]


def layout() -> api.StepLayout:
    queries, contexts = np.array([1, 3], dtype=np.int32), np.array([130, 7], dtype=np.int32)
    return api.StepLayout(
        block_size=128,
        cu_seqlens=empty(3, dtype="int32"),
        seq_lens=empty(2, dtype="int32"),
        positions=empty(4, dtype="int64"),
        block_table=empty(2, 2, dtype="int32"),
        slot_mapping=empty(4, dtype="int64"),
        host_query_lens=queries,
        host_seq_lens=contexts,
        max_query_len=3,
        max_seq_len=130,
    )


Case = tuple[str, Callable[[], Any], list[tuple[list[int], str]]]


def cases() -> Iterator[Case]:
    """Name, call, and the shapes and dtypes that the contract promises."""
    for dtype in ("float16", "bfloat16", "float32"):
        yield (
            f"rms_norm-{dtype}",
            lambda d=dtype: build(api.RmsNormRequest(hidden=64, eps=1e-6, dtype=d)).run(
                empty(5, 64, dtype=d), empty(64, dtype=d)
            ),
            [([5, 64], dtype)],
        )
        for interleaved in (False, True):
            for rotary in (64, 16):
                request = api.RopeRequest(
                    head_dim=64, rotary_dim=rotary, theta=1e4, dtype=dtype, max_positions=64, interleaved=interleaved
                )

                def turn(request: api.RopeRequest = request) -> Any:
                    rope = build(request)
                    return rope.run(empty(5, 3, 64, dtype=request.dtype), rope.plan(empty(5, dtype="int64")))

                yield f"rope-{dtype}-{rotary}-{interleaved}", turn, [([5, 3, 64], dtype)]
        for limit in (None, 7.0):
            yield (
                f"swiglu-{dtype}-{limit}",
                lambda d=dtype, lim=limit: build(api.SwigluRequest(width=32, dtype=d, limit=lim)).run(
                    empty(5, 64, dtype=d)
                ),
                [([5, 32], dtype)],
            )

        def grouped(dtype: str = dtype) -> Any:
            op = build(
                api.GroupedLinearRequest(
                    groups=4, in_features=64, out_features=32, dtype=dtype, out_dtype=dtype, weight_dtype=dtype
                )
            )
            weight = op.prepare([[empty(32, 64, dtype=dtype)] for _ in range(4)])
            return op.run(empty(9, 64, dtype=dtype), empty(5, dtype="int64"), weight)

        yield f"grouped-{dtype}", grouped, [([9, 32], dtype)]

        def exchange(dtype: str = dtype) -> Any:
            op = build(api.MoeExchangeRequest(experts=8, top_k=2, hidden=64, dtype=dtype))
            sent = op.dispatch(empty(6, 64, dtype=dtype), empty(6, 2, dtype="int64"), empty(6, 2, dtype="float32"))
            return sent.rows, sent.weights, sent.offsets, op.combine(sent.rows, sent.handle)

        yield (
            f"exchange-{dtype}",
            exchange,
            [([12, 64], dtype), ([12], "float32"), ([9], "int64"), ([6, 64], "float32")],
        )
    for dtype in ("float16", "bfloat16"):

        def attend(dtype: str = dtype) -> Any:
            cache = {name: empty(10, 128, 2, 128, dtype=dtype) for name in ("key", "value")}
            write = build(
                api.WriteKVRequest(
                    cache_group="full", kv_heads=2, head_dim=128, dtype=dtype, cache_dtype=dtype, block_size=128
                )
            )
            step = layout()
            write.run(empty(4, 2, 128, dtype=dtype), empty(4, 2, 128, dtype=dtype), cache, step)
            attention = build(
                api.PagedAttentionRequest(
                    cache_group="full",
                    q_heads=8,
                    kv_heads=2,
                    head_dim=128,
                    dtype=dtype,
                    cache_dtype=dtype,
                    scale=0.1,
                    block_size=128,
                )
            )
            return attention.run(empty(4, 8, 128, dtype=dtype), cache, attention.plan(step))

        yield f"attention-{dtype}", attend, [([4, 8, 128], dtype)]

        def merge(dtype: str = dtype) -> Any:
            op = build(
                api.HyperConnectionRequest(streams=4, hidden=64, iterations=20, eps=1e-6, norm_eps=1e-6, dtype=dtype)
            )
            mixed = empty(5, 4, dtype="float32"), empty(5, 4, 4, dtype="float32")
            return op.merge(empty(5, 4, 64, dtype=dtype), empty(5, 64, dtype=dtype), mixed)

        yield f"hyper_connection-{dtype}", merge, [([5, 4, 64], dtype)]


def main() -> None:
    schemas = [
        str(schema)
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("npu::") and not schema.overload_name
    ]
    print(json.dumps({"schemas": schemas}))
    for name, call, promised in cases():
        try:
            result = call()
            tensors = result if isinstance(result, tuple) else (result,)
            found = [(list(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
            line = {"case": name, "found": found, "promised": promised}
        except Exception as error:
            line = {"case": name, "error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(line), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
