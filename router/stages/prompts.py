"""Several prompts of one message, which run at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from baton.common.errors import BatonError
from baton.v1 import generation_pb2
from router.stages.completion import WholeGeneration

__all__ = ["WholePrompts", "run_together"]

_Response = generation_pb2.GenerateStreamResponse


async def run_together(
    prompts: Sequence[AsyncGenerator[_Response, None]],
) -> AsyncGenerator[_Response, None]:
    """Yields the messages of all prompts as they come, with the prompt's index.

    While the caller handles one message, each prompt waits with its next one, into which its
    new tokens are merged.

    Args:
        prompts: the messages of each prompt; closed when the caller closes this generator.

    Raises:
        BatonError: the first error of a prompt, which ends all of them; names the prompt.
    """
    messages: asyncio.Queue[_Response | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_run(i, prompt, messages)) for i, prompt in enumerate(prompts)]
    num_running = len(tasks)
    try:
        while num_running:
            message = await messages.get()
            if isinstance(message, Exception):
                raise message
            if message is None:
                num_running -= 1
            else:
                yield message
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    index: int,
    prompt: AsyncGenerator[_Response, None],
    messages: "asyncio.Queue[_Response | Exception | None]",
) -> None:
    """Puts a prompt's messages into the queue, then its error, or None."""
    end: Exception | None = None
    try:
        async with aclosing(prompt) as responses:
            async for response in responses:
                response.prompt_index = index
                await messages.put(response)
    except BatonError as error:
        end = error.within(f"prompts[{index}]")
    except Exception as error:  # the caller logs it
        end = error
    await messages.put(end)


class WholePrompts:
    """Joins the messages of several prompts into one response.

    Args:
        request_id: the request's name.
        num_prompts: how many prompts it has.

    Attributes:
        num_bytes: about how many bytes the response has so far; it has no fewer.
    """

    def __init__(self, request_id: str, num_prompts: int) -> None:
        self.num_bytes = 0
        self._request_id = request_id
        self._prompts = [WholeGeneration() for _ in range(num_prompts)]

    def add(self, message: _Response) -> None:
        """Adds the next message."""
        prompt = self._prompts[message.prompt_index]
        num_bytes = prompt.num_bytes
        prompt.add(message)
        self.num_bytes += prompt.num_bytes - num_bytes

    def response(self) -> generation_pb2.GenerateResponse:
        """The prompts' responses. Called once the stream has ended."""
        return generation_pb2.GenerateResponse(
            request_id=self._request_id,
            responses=[prompt.response() for prompt in self._prompts],
        )
