"""The engine's own work per step: a model that costs nothing, at growing numbers of running requests.

    python benchmarks/host_overhead.py [--quick] [--json] [--steps N]

Prints processor time of the engine's thread per step in microseconds, and the fit ``a + b * running`` over the
requests, for token ids alone and for requests that stream text (the difference of the two slopes is the price of a
delta). Means over whole steps, so that work done every sixteenth token counts. Processor time, not wall time: it
counts the work even where other processes share the machine. The last part compares early and late steps of long
outputs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from common import finish, machine, print_table
from safetensors.torch import save_file

from deepinfer_core import LLM, SamplingParams

RUNNING, QUICK_RUNNING = (1, 32, 256, 1024), (1, 32, 128)
VOCAB, PROMPT, LONGEST, BLOCK = 96, 8, 4096, 16
WARM_UP = 2 * BLOCK


def write_checkpoint(directory: Path) -> Path:
    """The counting model, with a tokenizer of printable letters."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["CountUp"], "vocab_size": VOCAB, "max_position_embeddings": LONGEST}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"unused": torch.zeros(1)}, directory / "model.safetensors")
    letters = {chr(0x21 + i) if i < 94 else chr(0xA1 + i): i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return directory


def open_engine(directory: Path, running: int) -> LLM:
    blocks = running * (LONGEST // BLOCK) + 1
    settings: dict[str, Any] = {
        "plugins.paths": ["toymodel"],
        "kv_cache.block_size": BLOCK,
        "kv_cache.num_blocks": blocks,
        "scheduling.max_running": running,
        "scheduling.max_batch_tokens": max(2048, running * (PROMPT + 1)),
        "logging.progress": False,
    }
    return LLM(directory, accelerator="cpu", config=settings)


class Load:
    """``running`` requests that decode together until :meth:`stop`."""

    def __init__(self, llm: LLM, running: int, *, stream: bool) -> None:
        self.core = llm.engine.core
        prompts: Any = [{"prompt_token_ids": [(r + i) % VOCAB for i in range(PROMPT)]} for r in range(running)]
        params = SamplingParams(temperature=0.0, max_tokens=LONGEST - PROMPT - 1, ignore_eos=True)
        self.requests = llm._requests(prompts, [params] * running, stream=stream)
        self.core.add(self.requests)
        self.steps(WARM_UP)

    def steps(self, count: int) -> float:
        """Run ``count`` steps; processor time of one, microseconds. Deltas are taken out as a reader would."""
        started = time.thread_time()
        for _ in range(count):
            self.core.step()
            for request in self.requests:
                if request.streams:
                    while request.outbox:
                        request.outbox.popleft()
        return (time.thread_time() - started) / count * 1e6

    def stop(self) -> None:
        self.core.abort([request.request_id for request in self.requests])
        self.core.drain()


def measure(directory: Path, running: int, steps: int, repeat: int, *, stream: bool) -> float:
    """Best of some means over ``steps`` steps: what is left is the least disturbed one."""
    with open_engine(directory, running) as llm:
        load = Load(llm, running, stream=stream)
        best = min(load.steps(steps) for _ in range(repeat))
        load.stop()
    return best


def growth(directory: Path, running: int, steps: int) -> dict[str, float]:
    """Early against late steps of the same requests."""
    with open_engine(directory, running) as llm:
        load = Load(llm, running, stream=False)
        early = min(load.steps(steps) for _ in range(3))
        load.steps(LONGEST - PROMPT - WARM_UP - 7 * steps - 2)
        late = min(load.steps(steps) for _ in range(3))
        load.stop()
    return {"running": running, "early_us": early, "late_us": late, "ratio": late / early}


def fit(counts: list[int], micros: list[float]) -> tuple[float, float]:
    """Least squares of ``a + b * count``, relative to each value, so that small counts weigh as much as large."""
    weights = 1 / np.array(micros)
    matrix = np.stack([np.ones(len(counts)), np.array(counts, float)], axis=1) * weights[:, None]
    a, b = np.linalg.lstsq(matrix, np.ones(len(counts)), rcond=None)[0]
    return float(a), float(b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--steps", type=int, help="steps of one mean (a multiple of 16; default 160, quick 48)")
    parser.add_argument("--repeat", type=int, default=5, help="means to take the best of (default 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or (48 if options.quick else 160)
    counts = list(QUICK_RUNNING if options.quick else RUNNING)
    result: dict[str, Any] = {"machine": machine(), "threads": 1, "steps": steps, "quick": options.quick}
    with tempfile.TemporaryDirectory() as place:
        directory = write_checkpoint(Path(place))
        rows = []
        for count in counts:
            ids, text = (measure(directory, count, steps, options.repeat, stream=s) for s in (False, True))
            rows.append({"running": count, "token_ids_us": ids, "streamed_us": text})
        a, b = fit(counts, [row["token_ids_us"] for row in rows])
        stream_a, stream_b = fit(counts, [row["streamed_us"] for row in rows])
        long = growth(directory, 32, steps)
    result |= {"rows": rows, "a_us": a, "b_us": b, "delta_us": stream_b - b, "streamed_a_us": stream_a, "growth": long}
    print_table(("running", "token ids, us/step", "streamed, us/step"), [list(row.values()) for row in rows])
    print(f"token ids: {a:.0f} us + {b:.2f} us per request; a streamed delta: {stream_b - b:.2f} us more")
    print(f"long outputs: {long['early_us']:.0f} us early, {long['late_us']:.0f} us late ({long['ratio']:.2f}x)")
    finish(result, options.json)


if __name__ == "__main__":
    main()
