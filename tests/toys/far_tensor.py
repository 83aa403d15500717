"""A device type that exists only in Python: torch's PrivateUse1, registered as ``far``.

Its tensors are wrappers around host tensors that nobody else sees. Every operation on them goes through :func:`run`,
which unwraps, computes on the host and wraps again, so views and writes in place behave as on a device. A tensor of
the host among the arguments is an error, as it is on a device, but for the few operations that copy.

torch's interface for this is private and experimental: :data:`SETUP` is None where it is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree, backend_registration

NAME = "far"
SETUP = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
_CROSSING = {"aten::copy_", "aten::_to_copy", "aten::set_.source_Tensor"}
"""Operations that may see tensors of both sides."""
_keep: list[Any] = []
calls = 0
"""Operations that ran on the device."""


class FarTensor(torch.Tensor):
    """Geometry of a device tensor; ``raw`` is where its values are."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> FarTensor:
        # An ordinary tensor, whatever the mode: a view of one must not be an inference tensor.
        with torch.inference_mode(False):
            made: FarTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.size(),
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=torch.device(NAME, 0),
            )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        """torch refuses this for subclasses; a device's own tensors have it."""
        return self.raw.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"FarTensor({self.raw!r})"


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Do ``func`` on the host's side of far tensors."""
    global calls
    calls += 1
    name = func._schema.name + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
    flat, spec = _pytree.tree_flatten((args, kwargs))
    far = [value for value in flat if isinstance(value, FarTensor)]
    host = [v for v in flat if isinstance(v, torch.Tensor) and not isinstance(v, FarTensor) and v.dim() > 0]
    if far and host and name not in _CROSSING:
        raise RuntimeError(f"{name}: expected all tensors on device {NAME}, found one on the host")
    target = next((value for value in flat if isinstance(value, torch.device)), None)
    stays = bool(far) if target is None else target.type == NAME
    flat = [_to_host(value) for value in flat]
    args, kwargs = _pytree.tree_unflatten(flat, spec)
    result = func(*args, **kwargs)
    same = {id(value.raw): value for value in far}
    if not stays:
        return result

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return same.get(id(value)) if id(value) in same else FarTensor(value)

    return _pytree.tree_map(wrap, result)


def _to_host(value: Any) -> Any:
    if isinstance(value, FarTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def register() -> None:
    """Make the device type known to torch, once a process."""
    if _keep:
        return
    assert SETUP is not None
    SETUP(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(run, "PrivateUse1")
    _keep.append(library)
