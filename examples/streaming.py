"""An answer, word by word.

python examples/streaming.py [MODEL]
"""

import sys

from deepinfer_core import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
messages = [{"role": "user", "content": "Name three rivers in Europe."}]

with LLM(model) as llm:
    prompt, _ = llm.chat_prompt(messages)
    for delta in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=64)):
        print(delta.text, end="", flush=True)
    print()
