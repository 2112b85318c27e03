"""Several prompts of one message, which run at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from baton.common.errors import BatonError
from baton.common.request.answer import CandidateOutput

__all__ = ["run_together"]


async def run_together(
    prompts: Sequence[AsyncGenerator[CandidateOutput, None]],
) -> AsyncGenerator[CandidateOutput, None]:
    """Yields the outputs of all prompts as they come, with the prompt's index.

    While the caller handles one output, each prompt waits with its next one, into which its
    new tokens are merged.

    Args:
        prompts: the outputs of each prompt; closed when the caller closes this generator.

    Raises:
        BatonError: the first error of a prompt, which ends all of them; names the prompt.
    """
    queue: asyncio.Queue[CandidateOutput | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_run(i, prompt, queue)) for i, prompt in enumerate(prompts)]
    num_running = len(tasks)
    try:
        while num_running:
            output = await queue.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_running -= 1
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    index: int,
    prompt: AsyncGenerator[CandidateOutput, None],
    queue: "asyncio.Queue[CandidateOutput | Exception | None]",
) -> None:
    """Puts a prompt's outputs into the queue, then its error, or None."""
    end: Exception | None = None
    try:
        async with aclosing(prompt) as outputs:
            async for output in outputs:
                output.prompt_index = index
                await queue.put(output)
    except BatonError as error:
        end = error.within(f"prompts[{index}]")
    except Exception as error:  # the caller logs it
        end = error
    await queue.put(end)
