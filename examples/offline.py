"""Baton without a server: batches, answers of a given form, and streams, in one process.

    python examples/offline.py [MODEL]

Without a model it runs the demo model, which writes text of the right form that makes little
sense.
"""

import asyncio
import sys

from baton import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputs
from baton.common.model_files.named_models import DEMO_PROMPT


def main(model: str) -> None:
    """Completes a batch, then streams two completions at the same time."""
    with LLM(model, max_model_len=512) as llm:
        date = StructuredOutputs(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
        params = [
            {"max_tokens": 32, "seed": 1},  # the others are the model's defaults
            SamplingParams(temperature=0.7, max_tokens=16, structured_outputs=date),
        ]
        for result in llm.generate([DEMO_PROMPT, "Date: "], params, use_tqdm=False):
            print(f"{result.text!r} ({result.finish_reason}, {result.timings.total_ms:.0f} ms)")
        (again,) = llm.generate(DEMO_PROMPT, params[0], use_tqdm=False)
        print(f"{again.num_cached_tokens} of {again.usage.prompt_tokens} tokens were cached")
    asyncio.run(stream(model))


async def stream(model: str) -> None:
    """Prints pieces of two completions as they come."""
    params = SamplingParams(max_tokens=16, output_kind=RequestOutputKind.DELTA)

    async def read(prompt: str) -> None:
        async for result in llm.generate(prompt, params):
            print(f"{result.request_id}: {result.text!r}", flush=True)

    with AsyncLLM(model, max_model_len=512) as llm:
        await asyncio.gather(read("Open the file"), read("Return the"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
