"""Several prompts at once, with parameters of their own.

python examples/offline.py [MODEL]
"""

import sys

from deepinfer_core import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
prompts = ["The capital of France is", "Water boils at", "Once upon a time"]
params = [
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=0, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24, n=2),
]

with LLM(model) as llm:
    for result in llm.generate(prompts, params):
        if result.error is not None:
            print(f"{result.prompt!r} failed: {result.error.code}: {result.error.message}")
        for output in result.outputs:
            print(f"{result.prompt!r} -> {output.text!r} ({output.finish_reason})")
            for token, entries in zip(output.token_ids, output.logprobs or [], strict=False):
                best = ", ".join(f"{e.decoded_token!r} {e.logprob:.2f}" for e in entries.values())
                print(f"    {token}: {best}")
