"""Without a GPU, kernels run in Triton's interpreter, which must be asked for before they are imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "core"))  # reference_support: the oracle and the records it takes

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="the kernels need triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    plain_patch = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes loop bounds from arrays of one element by ``int``, which numpy 2.4 refuses."""
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch

    plain_convert = interpreter._convert_float
    e4m3 = interpreter.tl.float8e4nv

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Triton 3.6 rounds to FP8 without regard to ties and carries: torch does it as the hardware does."""
        if target == e4m3 and source == interpreter.tl.float32:
            wide = torch.from_numpy(values.view("float32").copy())
            return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == e4m3 and target == interpreter.tl.float32:
            narrow = torch.from_numpy(values.view("uint8").copy()).view(torch.float8_e4m3fn)
            return narrow.to(torch.float32).numpy().view("uint32")
        return plain_convert(values, source, target, rounding)

    interpreter._convert_float = convert
