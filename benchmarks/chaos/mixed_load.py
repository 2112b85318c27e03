"""A mixed load for soaks: clients that read to the end, and others that leave in every way."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from baton import AsyncClient, SamplingParams
from baton.common.errors import BatonError, DeadlineExceededError

__all__ = ["KINDS", "MixedLoad"]

KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=48, ignore_eos=True),
    "several": SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=32, ignore_eos=True),
    "beams": SamplingParams(beam_width=3, max_tokens=16),
    "whole": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "cancel": SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True),
    "deadline": SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True),
    "disconnect": SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True),
}
"""Sampling parameters by kind. Requests of "cancel" end in the middle of their stream, those of
"disconnect" with their client's connection, and those of "deadline" mostly at their deadline.
"""
_NUM_PROMPTS = 24
_PROMPT_TOKENS = (8, 150)
_TIMEOUT_S = 120.0
_DEADLINE_S = 0.4

Tokens = dict[int, list[int]]


@dataclass(slots=True)
class MixedLoad:
    """Sends requests of all kinds in a closed loop, and compares equal ones with each other.

    Args:
        addresses: of the routers.
        vocab_size: bounds the tokens of prompts.
        seed: of the draws.

    Attributes:
        counts: requests by kind and outcome: "right", "left" (the client left, or the deadline
            came, and the tokens until then are right), "wrong", "missing" (a stream ended early),
            or an error's status name.
        errors: messages of errors, with their numbers.
    """

    addresses: Sequence[str]
    vocab_size: int
    seed: int
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    _expected: dict[tuple[str, int], Tokens] = field(default_factory=dict)

    async def run(self, num_clients: int, duration_s: float) -> None:
        """Runs clients for some time; each sends one request after the other."""
        deadline = asyncio.get_running_loop().time() + duration_s
        await asyncio.gather(*(self._client(number, deadline) for number in range(num_clients)))

    async def _client(self, number: int, deadline: float) -> None:
        draws = random.Random(f"{self.seed} {number}")
        address = self.addresses[number % len(self.addresses)]
        async with AsyncClient(address) as client:
            while asyncio.get_running_loop().time() < deadline:
                kind = draws.choice(list(KINDS))
                prompt = draws.randrange(_NUM_PROMPTS)
                leave_after = draws.randint(1, 40)
                try:
                    if kind == "disconnect":
                        tokens = await self._disconnect(address, prompt, leave_after)
                    else:
                        tokens = await self._send(client, kind, prompt, leave_after)
                except BatonError as error:
                    self.counts[kind, error.code] += 1
                    self.errors[f"{kind}: {error.code}: {error.message}"] += 1
                else:
                    self.counts[kind, self.judge(kind, prompt, tokens)] += 1

    async def _send(self, client: AsyncClient, kind: str, prompt: int, leave_after: int) -> Tokens:
        if kind == "whole":
            result = await client.generate(self.prompt(prompt), KINDS[kind], timeout_s=_TIMEOUT_S)
            return {0: list(result.token_ids)}
        limit = leave_after if kind == "cancel" else None
        return await self._stream(client, kind, prompt, limit)

    async def _stream(
        self, client: AsyncClient, kind: str, prompt: int, leave_after: int | None
    ) -> Tokens:
        """Reads a stream to its end, or leaves it after some messages."""
        tokens: Tokens = {}
        timeout_s = _DEADLINE_S if kind == "deadline" else _TIMEOUT_S
        stream = client.stream(self.prompt(prompt), KINDS[kind], timeout_s=timeout_s)
        try:
            async for chunk in stream:
                tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
                if leave_after is not None and sum(map(len, tokens.values())) >= leave_after:
                    break
        except DeadlineExceededError:
            if kind != "deadline":
                raise
        finally:
            await stream.aclose()
        return tokens

    async def _disconnect(self, address: str, prompt: int, leave_after: int) -> Tokens:
        """Closes the connection in the middle of a stream."""
        tokens: list[int] = []
        async with AsyncClient(address) as client:
            params = KINDS["disconnect"]
            stream = client.stream(self.prompt(prompt), params, timeout_s=_TIMEOUT_S)
            async for chunk in stream:
                tokens += chunk.token_ids
                if len(tokens) >= leave_after:
                    break
            await client.close()
            with suppress(BatonError):
                await stream.aclose()
        return {0: tokens}

    def prompt(self, number: int) -> list[int]:
        """Returns one of the prompts; equal numbers lead to equal prompts."""
        draws = random.Random(f"{self.seed} prompt {number}")
        length = draws.randint(*_PROMPT_TOKENS)
        return [draws.randrange(self.vocab_size) for _ in range(length)]

    def judge(self, kind: str, prompt: int, tokens: Tokens) -> str:
        """Returns an outcome, by comparison with earlier tokens of that prompt."""
        is_whole = kind not in ("cancel", "deadline", "disconnect")
        source = kind if is_whole and kind != "whole" else "greedy"
        if is_whole and not _is_complete(KINDS[kind], tokens):
            return "missing"
        known = self._expected.setdefault((source, prompt), {})
        for index, mine in tokens.items():
            theirs = known.get(index, [])
            common = min(len(mine), len(theirs))
            if mine[:common] != theirs[:common]:
                return "wrong"
            if len(mine) > len(theirs):
                known[index] = list(mine)
        return "right" if is_whole else "left"


def _is_complete(params: SamplingParams, tokens: Tokens) -> bool:
    """Whether all candidates have ended. Only those of beams may be short, at an end token."""
    if params.beam_width is not None:
        return bool(tokens) and all(tokens.values())
    lengths = {index: len(each) for index, each in tokens.items()}
    return lengths == dict.fromkeys(range(params.n), params.max_tokens)
