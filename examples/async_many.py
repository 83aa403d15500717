"""Many requests at once from asyncio tasks: one streams, one is cancelled, one runs out of time, the rest finish.

python examples/async_many.py [MODEL]
"""

import asyncio
import contextlib
import sys

from deepinfer_core import AsyncLLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
short = SamplingParams(temperature=0, max_tokens=12)
endless = SamplingParams(temperature=1, seed=1, max_tokens=None, ignore_eos=True)


async def stream(llm: AsyncLLM) -> str:
    text = ""
    async for delta in llm.stream("The capital of France is", short):
        text += delta.text
    return text


async def main() -> None:
    async with AsyncLLM(model, scheduling={"max_running": 8}) as llm:
        abandoned = asyncio.create_task(llm.generate("A very long story:", endless))
        late = asyncio.create_task(llm.generate("Another one:", endless, timeout=0.2))
        streamed = asyncio.create_task(stream(llm))
        finished = await asyncio.gather(*(llm.generate(f"The number after {i} is", short) for i in range(12)))
        abandoned.cancel()  # ends that request and no other
        with contextlib.suppress(asyncio.CancelledError):
            await abandoned
        print("streamed:", repr(await streamed))
        print("finished:", [result.outputs[0].finish_reason for result in finished])
        error = (await late).error
        print("late:", error.code if error else "finished in time")


asyncio.run(main())
