"""Which kernels each case of cross_compile.py launches, by names alone: nothing is compiled.

``python launched_kernels.py CAPABILITY`` prints one JSON object: case -> names.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cross_compile
from triton.runtime.jit import JITFunction


def main() -> None:
    capability = int(sys.argv[1])
    cross_compile.compile_only(capability)
    launched: list[str] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launched.append(self.__name__)

    JITFunction.run = run
    found = {}
    for case, launch in cross_compile.CASES.items():
        launched.clear()
        if capability == 90 or case != "fp8 rounded by roles":
            launch()
        found[case] = sorted(set(launched))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
