"""Streams through a router, with known expected tokens."""

import asyncio
import time
from dataclasses import replace
from functools import cache

from baton import AsyncClient, SamplingParams, StructuredOutputs
from baton.common.errors import UnavailableError
from baton.common.request.request_spec import RequestSpec
from engine.request import EngineRequest
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.constrained_requests import expected_tokens

__all__ = ["ConstrainedJob", "Job", "retry_until_served"]

NUM_TOKENS = 100
TIMEOUT_S = 60.0


class Job:
    """A prompt and the tokens it must give.

    Args:
        seed: seed of the prompt.
        num_tokens: number of tokens to generate.
        num_prompt_tokens: length of the prompt; None for one that depends on the seed.

    Attributes:
        tokens: tokens received so far.
        has_first_token: set once prefill's token has arrived.
        has_tokens: set once tokens from decode have arrived too.
    """

    def __init__(
        self, seed: int, num_tokens: int = NUM_TOKENS, num_prompt_tokens: int | None = None
    ) -> None:
        self.prompt = prompt_of(num_prompt_tokens or 20 + 11 * seed, seed=seed)
        self.params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.expected = self.expected_tokens()
        self.tokens: list[int] = []
        self.has_first_token = asyncio.Event()
        self.has_tokens = asyncio.Event()

    def expected_tokens(self) -> list[int]:
        return _reference_tokens(tuple(self.prompt), self.params.max_tokens)

    async def run(self, client: AsyncClient, timeout_s: float = TIMEOUT_S) -> None:
        """Streams the completion; checks each message against the reference's tokens."""
        self.tokens = []
        async for chunk in client.stream(self.prompt, self.params, timeout_s=timeout_s):
            self.tokens += chunk.token_ids
            assert self.tokens == self.expected[: len(self.tokens)]
            self.has_first_token.set()
            if len(self.tokens) > 1:
                self.has_tokens.set()
        assert self.tokens == self.expected


@cache
def _reference_tokens(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return reference_greedy(tiny_checkpoint("llama"), prompt, num_tokens)


class ConstrainedJob(Job):
    """A job whose text must match an expression, some of whose characters are forced."""

    def expected_tokens(self) -> list[int]:
        outputs = StructuredOutputs(regex="([a-f]{3}-long-){12}[0-9]")
        self.params = replace(self.params, structured_outputs=outputs)
        request = EngineRequest(
            spec=RequestSpec.with_defaults("", tuple(self.prompt), self.params, eos_token_ids=())
        )
        return expected_tokens(tiny_checkpoint("llama"), request, 0)


async def retry_until_served(job: Job, client: AsyncClient) -> None:
    """Runs a job again while it fails with UNAVAILABLE, which means that a retry is safe."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return await job.run(client)
        except UnavailableError:
            assert time.monotonic() < deadline, "the restarted replica is not used"
            await asyncio.sleep(0.05)
