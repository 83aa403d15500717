"""An engine in a process of its own, with its own Python and its own number of threads, driven line by line.

Engines that share a process share thread pools and whatever each sets at import, so a comparison needs them apart.
``python peer_process.py NAME MODEL`` answers each line ``{"prompts": …, "new_tokens": N}`` of its input with one line
``{"seconds": …, "ids": …}``; :class:`Remote` is the other end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers

MAKERS: dict[str, Callable[[Path], peers.Peer | None]] = {
    "deepinfer": peers.deepinfer,
    "transformers": lambda model: peers.transformers_generate(peers.transformers_model(model)),
    "llama.cpp": lambda model: peers.llama_cpp(model, int(os.environ["OMP_NUM_THREADS"])),
    "vllm": peers.vllm,
    "weights": peers.weights_alone,
}


class Remote:
    """The engine ``name`` over the model at ``path``, run by the interpreter ``python`` with ``threads`` threads."""

    def __init__(self, name: str, path: Path, python: str, threads: int) -> None:
        self.engine = name
        self.threads = threads
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [python, str(Path(__file__)), name, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self.name = str(self._answer()["name"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like in between
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self.engine}: its process ended with {self._process.wait()}")

    def run(self, prompts: peers.Prompts, new_tokens: int) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["seconds"]), answer["ids"]

    def close(self) -> None:
        self._process.communicate()


def installed(python: str, module: str) -> bool:
    command = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", command]).returncode == 0


def main() -> None:
    name, model = sys.argv[1:]
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    peer = MAKERS[name](Path(model))
    if peer is None:
        raise SystemExit(f"{name} is not installed for {sys.executable}")
    print(json.dumps({"name": peer.name}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        seconds, ids = peer.run(work["prompts"], work["new_tokens"])
        print(json.dumps({"seconds": seconds, "ids": ids}), flush=True)


if __name__ == "__main__":
    main()
