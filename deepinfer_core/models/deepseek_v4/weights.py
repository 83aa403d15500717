"""Reads tensors by released name, packed ones with their scales, and remembers what it read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from deepinfer_core.api import CheckpointError, ModelContext, QuantisedWeight, WeightPart, WeightSource

from .config import V4Config
from .tensors import FP4_BLOCK, StoredFormats, scale_name


class Loader:
    """One checkpoint's tensors. Plain weights keep their stored dtype; operators convert them when they pack."""

    def __init__(
        self,
        weights: WeightSource,
        formats: StoredFormats,
        *,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[str], None],
    ) -> None:
        self._weights = weights
        self._progress = progress
        self.formats = formats
        self.device = device
        self.dtype = dtype
        self.read: set[str] = set()

    @classmethod
    def of(cls, context: ModelContext, config: V4Config) -> Loader:
        stored = {name: context.weights.describe(name).dtype for name in context.weights.names()}
        return cls(
            context.weights,
            StoredFormats.read(stored, config, context.spec.dtype),
            device=context.device,
            dtype=getattr(torch, context.spec.dtype),
            progress=context.progress,
        )

    def tensor(self, name: str) -> torch.Tensor:
        """As stored, on the host.

        Raises:
            CheckpointError: it is missing, or was read before: no tensor belongs to two places.
        """
        stored = self.formats.stored(name)
        if stored in self.read:
            raise CheckpointError(f"tensor {stored!r} is read twice")
        self.read.add(stored)
        tensor = self._weights.load(stored)
        self._progress(stored)
        return tensor

    def weight(self, name: str) -> WeightPart:
        """A matrix for ``gemm.*``, with its scales if it is packed."""
        match self.formats.packing(name):
            case "fp8:e4m3":
                return QuantisedWeight(
                    format="fp8:e4m3",
                    data=self.tensor(name),
                    scale=self.tensor(scale_name(name)),
                    block=self.formats.block,
                )
            case "fp4:e2m1":
                return QuantisedWeight(
                    format="fp4:e2m1", data=self.tensor(name), scale=self.tensor(scale_name(name)), block=FP4_BLOCK
                )
        return self.tensor(name)

    def weights(self, prefix: str, names: Iterable[str]) -> list[WeightPart]:
        return [self.weight(f"{prefix}{name}.weight") for name in names]

    def vector(self, name: str) -> torch.Tensor:
        """On the device in the compute dtype: weights of norms."""
        return self.tensor(name).to(self.device, self.dtype)

    def exact(self, name: str) -> torch.Tensor:
        """On the device, never below float32: what the checkpoint keeps in float32."""
        tensor = self.tensor(name)
        return tensor.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)
