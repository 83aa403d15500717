"""Decode steps by graph: the forward pass of a number of rows, recorded once and launched again at once.

A device that can record work (``api.CapturesGraphs``, which has the rules) gets one graph for each number of rows on a
grid. A step takes the next larger one; the rows it pads with write to the null block and nobody reads them. Steps with
prompt chunks, drafts or rows that yield no token run operator by operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import structlog
import torch

from deepinfer_core.api import (
    CapturesGraphs,
    Choice,
    ConfigError,
    Device,
    Graph,
    LayerCache,
    Model,
    ModelBatch,
    Provider,
    StepLayout,
)
from deepinfer_core.config import EngineConfig

from .kv_cache import KVCache
from .step_inputs import StepInputs

log = structlog.get_logger("deepinfer.engine")

ON = "recorded"
CAP = "graph_capture"


def graph_mode(
    config: EngineConfig,
    device: Device,
    model_ops: Iterable[str],
    choices: Iterable[Choice],
    providers: Iterable[tuple[str, Provider]],
    *,
    with_module: bool = False,
) -> str:
    """:data:`ON`, or ``"operator by operator: <why>"``, as ``explain`` shows it.

    ``with_module``: a draft module reads layers and rows of every step, which a recording does not give out.

    Raises:
        ConfigError: ``scheduling.decode_graphs`` is true and it cannot be.
    """
    wanted = config.scheduling.decode_graphs
    if wanted is False:
        return "operator by operator: scheduling.decode_graphs is false"
    why = ""
    if not isinstance(device, CapturesGraphs):
        why = "this device records no graphs"
    elif with_module:
        why = "a draft module reads every step"
    else:
        slots = {*model_ops, "slot_mapping"}
        caps = {(p.op, f"{plugin}:{p.name}"): p.caps for plugin, p in providers}
        lacking = sorted({c.provider for c in choices if c.slot in slots and CAP not in caps[c.op, c.provider]})
        if lacking:
            why = f"cannot be recorded: {', '.join(lacking)}"
    if why and wanted is True:
        raise ConfigError(f"scheduling.decode_graphs=true: {why}")
    return f"operator by operator: {why}" if why else ON


def rows_grid(most: int) -> tuple[int, ...]:
    """Numbers of rows that get a graph, up to ``most``: closer together where a padded row costs a larger share."""
    grid = [1, 2, 4, *range(8, 64, 8), *range(64, most + 32, 32)]
    return tuple(sorted({min(rows, most) for rows in grid}))


@attrs.frozen(kw_only=True)
class _Buffers:
    """What graphs read: as long as the largest graph; others read the first rows.

    ``token_ids``, ``positions``, ``rows`` ``[P]`` int64; ``cu_seqlens [P+1]``, ``seq_lens [P]`` int32; ``tables``:
    cache group -> ``[P, B]`` int32. ``rows`` and ``cu_seqlens`` count upwards and never change.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    tables: dict[str, torch.Tensor]


class DecodeGraphs:
    """The graphs of one engine."""

    def __init__(
        self,
        *,
        device: Device,
        model: Model,
        ops: Any,
        cache: KVCache,
        layer_caches: Mapping[str, Sequence[LayerCache]],
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self._device = device
        self._model = model
        self._ops = ops
        self._caches = layer_caches
        self._block_size = cache.block_size
        self._max_model_len = max_model_len
        self._grid = rows_grid(max_rows)
        self._graphs: dict[int, Graph[torch.Tensor]] = {}
        where = device.torch_device
        self._buffers = _Buffers(
            token_ids=torch.zeros(max_rows, dtype=torch.int64, device=where),
            positions=torch.zeros(max_rows, dtype=torch.int64, device=where),
            rows=torch.arange(max_rows, dtype=torch.int64, device=where),
            cu_seqlens=torch.arange(max_rows + 1, dtype=torch.int32, device=where),
            seq_lens=torch.ones(max_rows, dtype=torch.int32, device=where),
            tables={
                name: torch.zeros((max_rows, group.table.shape[1]), dtype=torch.int32, device=where)
                for name, group in cache.groups.items()
            },
        )

    def capture(self) -> int:
        """Record every graph, the largest first, so that the smaller ones find its memory.

        Those that the memory has no room for are left out: steps of so many rows run operator by operator.

        Returns:
            The most rows of a recorded step; 0 if none could be recorded.
        """
        assert isinstance(self._device, CapturesGraphs)
        with torch.inference_mode():
            for rows in reversed(self._grid):
                try:
                    self._graphs[rows] = self._device.capture(partial(self._forward, rows))
                except Exception as error:
                    if not self._device.is_out_of_memory(error):
                        raise
                    log.warning("no memory to record a decode step", rows=rows)
        self._grid = tuple(sorted(self._graphs))
        return self._grid[-1] if self._grid else 0

    def takes(self, inputs: StepInputs) -> bool:
        """True for steps whose rows all decode and all yield a token."""
        rows = len(inputs.positions)
        return (
            bool(self._grid)
            and rows <= self._grid[-1]
            and len(inputs.counts) == rows
            and len(inputs.sample_rows) == rows
            and inputs.drafts is None
            and inputs.redirect_below is None
            and not inputs.prompts
        )

    def run(self, inputs: StepInputs, history: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` of a step that :meth:`takes` accepted; valid until the next one."""
        rows, buffers = len(inputs.positions), self._buffers
        size = next(size for size in self._grid if size >= rows)
        self._fill(buffers.positions[:size], inputs.positions, 0)
        self._fill(buffers.seq_lens[:size], inputs.seq_lens, 1)
        for name, table in inputs.tables.items():
            self._fill(buffers.tables[name][:size, : table.shape[1]], table, 0)
        slots = self._device.upload(inputs.row_slots)
        buffers.token_ids[:rows].copy_(self._ops.input_ids.run(history, slots, buffers.positions[:rows]))
        return self._graphs[size].replay()[:rows]

    def _fill(self, buffer: torch.Tensor, values: np.ndarray[Any, Any], rest: int) -> None:
        """Copy ``values`` to the first rows, and ``rest`` to the padding."""
        if len(values) < len(buffer):
            padded = np.full(tuple(buffer.shape), rest, values.dtype)
            padded[: len(values)] = values
            values = padded
        buffer.copy_(self._device.upload(values))

    def _forward(self, rows: int) -> torch.Tensor:
        buffers, longest = self._buffers, self._max_model_len
        positions, owners = buffers.positions[:rows], buffers.rows[:rows]
        layouts = {}
        for name, whole in buffers.tables.items():
            table = whole[:rows]
            layouts[name] = StepLayout(
                block_size=self._block_size,
                cu_seqlens=buffers.cu_seqlens[: rows + 1],
                seq_lens=buffers.seq_lens[:rows],
                positions=positions,
                block_table=table,
                slot_mapping=self._ops.slot_mapping.run(table, owners, positions),
                host_query_lens=np.ones(rows, np.int32),
                host_seq_lens=np.full(rows, longest, np.int32),
                max_query_len=1,
                max_seq_len=longest,
            )
        batch = ModelBatch(
            token_ids=buffers.token_ids[:rows], positions=positions, layouts=layouts, caches=self._caches
        )
        return self._model.forward(batch, self._model.plan(batch))
