"""Variables that torch_npu and HCCL read when they are imported, set in the process that chose this backend alone.

A variable that the user has set stays as it is. torch imports torch_npu by itself as soon as both are installed,
unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; then these come too late and :func:`apply` says so.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping

import attrs

DEFAULTS = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # the pool of blocks grows without fragments
    "TASK_QUEUE_ENABLE": "1",  # launches are queued to a thread of their own
    "HCCL_OP_EXPANSION_MODE": "AIV",  # collectives are launched from the vector cores, not from the host
    "HCCL_DETERMINISTIC": "true",  # the same reduction order every time
}


@attrs.frozen
class Applied:
    """``set`` here, ``kept`` as the user had them, and whether torch_npu had been imported before."""

    set: tuple[str, ...]
    kept: tuple[str, ...]
    too_late: bool


def apply(environ: MutableMapping[str, str], *, imported: bool | None = None) -> Applied:
    """Set what is not set yet. ``imported``: whether torch_npu is imported already; None: look."""
    late = "torch_npu" in sys.modules if imported is None else imported
    missing = tuple(name for name in DEFAULTS if name not in environ)
    if not late:
        environ.update({name: DEFAULTS[name] for name in missing})
    return Applied(() if late else missing, tuple(name for name in DEFAULTS if name not in missing), late)
