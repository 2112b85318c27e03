"""The requests of a run, what their clients get, and which process is disturbed when."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton import SamplingParams
from baton.common.errors import BatonError, ResourceExhaustedError, UnavailableError
from baton.results import CompletionChunk

__all__ = [
    "KINDS",
    "ChaosRequest",
    "Event",
    "Record",
    "has_ended",
    "make_requests",
    "make_schedule",
    "send_all",
]

KINDS = ("kill", "freeze", "drain")
_RESTART_S = 15.0
"""How long a process that was killed or stopped may be down, on a busy machine."""
_PROMPT_TOKENS = (16, 120)
_OUTPUT_TOKENS = (16, 96)
_KINDS = ("greedy", "seeded", "several")
_TIMEOUT_S = 120.0


class StreamingClient(Protocol):
    """A client of a router, such as `AsyncClient`."""

    def stream(self, *arguments: Any, **options: Any) -> AsyncIterator[CompletionChunk]:
        """Streams a request."""


@dataclass(frozen=True, slots=True)
class Event:
    """One disturbance.

    Attributes:
        at_s: seconds after the first request.
        kind: kill (SIGKILL), freeze (SIGSTOP, later SIGCONT) or drain (SIGTERM).
        target: the process's name, for example "decode-0"; "router-0/1" is process 1 of a router.
    """

    at_s: float
    kind: str
    target: str

    def disturbs(self, name: str) -> bool:
        """Whether it is about a process, or about one that the process has started."""
        return self.target.partition("/")[0] == name


def make_schedule(
    targets: Sequence[str],
    kinds: Sequence[str],
    *,
    interval_s: float,
    duration_s: float,
    seed: int,
    rolling: int = 0,
) -> list[Event]:
    """Returns events at a steady interval within the duration.

    Args:
        targets: names of processes.
        kinds: some of `KINDS`; each event draws one of them and one target.
        interval_s: seconds between two events.
        duration_s: seconds until the last request is sent.
        seed: of the draws.
        rolling: if above 0, every target is restarted that many times instead; the times are then
            the earliest ones.
    """
    if rolling:
        chosen = [("drain", target) for _ in range(rolling) for target in targets]
    else:
        draws = random.Random(seed)
        count = max(0, int(duration_s / interval_s))
        chosen = [(draws.choice(kinds), draws.choice(targets)) for _ in range(count)]
    return [Event(interval_s * (i + 1), *each) for i, each in enumerate(chosen)]


def has_ended(events: Sequence[Event], target: str, since_s: float) -> bool:
    """Returns whether a process, or one that it has started, was killed or stopped so late that it
    was down at `since_s`, in seconds after the first request, or went down since then.
    """
    return any(
        event.disturbs(target) and event.kind != "freeze" and event.at_s >= since_s - _RESTART_S
        for event in events
    )


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request.

    Attributes:
        number: its place in the run, from 0.
        kind: greedy, seeded, or several (two seeded candidates).
        prompt_token_ids: the prompt, which no other request has.
        num_tokens: tokens to generate per candidate.
    """

    number: int
    kind: str
    prompt_token_ids: Sequence[int]
    num_tokens: int

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        is_greedy = self.kind == "greedy"
        return SamplingParams(
            temperature=0.0 if is_greedy else 1.0,
            seed=None if is_greedy else self.number,
            n=2 if self.kind == "several" else 1,
            max_tokens=self.num_tokens,
            ignore_eos=True,
        )


@dataclass(slots=True, kw_only=True)
class Record:
    """The result of one request at its client.

    Attributes:
        request: the request.
        router: index of the router that it was sent to first.
        sent_s: when it was sent, in seconds after the start of the run.
        ended_s: when it ended.
        tokens: the tokens per candidate.
        longest_gap_s: the longest time without a token of a candidate, before its first one
            included.
        first_tokens: the tokens that came before its router died; empty if it was sent once.
        first_error: what ended the first try then.
        error: status name of the error that ended it; empty if it ran to its end.
        message: of the error.
    """

    request: ChaosRequest
    router: int
    sent_s: float
    ended_s: float = 0.0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    first_tokens: dict[int, list[int]] = field(default_factory=dict)
    first_error: str = ""
    error: str = ""
    message: str = ""

    @property
    def num_tries(self) -> int:
        """2 if it was sent again, as its router had died."""
        return 2 if self.first_error else 1

    @property
    def is_refused(self) -> bool:
        """Whether it was refused before its first token."""
        refusals = (UnavailableError.code, ResourceExhaustedError.code)
        return self.error in refusals and not any(self.tokens.values())


def make_requests(count: int, vocab_size: int, seed: int) -> list[ChaosRequest]:
    """Returns requests of all kinds in turn; equal arguments lead to equal requests."""
    draws = random.Random(seed)
    return [
        ChaosRequest(
            number=number,
            kind=_KINDS[number % len(_KINDS)],
            prompt_token_ids=[
                draws.randrange(vocab_size) for _ in range(draws.randint(*_PROMPT_TOKENS))
            ],
            num_tokens=draws.randint(*_OUTPUT_TOKENS),
        )
        for number in range(count)
    ]


async def send_all(
    requests: Sequence[ChaosRequest],
    clients: Sequence[StreamingClient],
    *,
    rate: float,
    salt: str,
    has_ended: Callable[[int, float], bool],
    first_serving: Callable[[int], Awaitable[int]],
) -> list[Record]:
    """Sends requests at a steady rate to the routers in turn; returns their records, in order.

    A request that ends UNAVAILABLE as its router has ended is sent again, once, to the first other
    router that serves, or to its own one. No other one is.

    Args:
        requests: the requests.
        clients: one per router.
        rate: requests per second.
        salt: separates the caches of runs.
        has_ended: whether a router was down at some seconds after the run's start, or since then.
        first_serving: waits until a router serves, and returns its index; preferably the given one.
    """
    began = time.monotonic()

    async def send(request: ChaosRequest) -> Record:
        await asyncio.sleep(max(0.0, began + request.number / rate - time.monotonic()))
        index = request.number % len(clients)
        record = Record(request=request, router=index, sent_s=time.monotonic() - began)
        last: dict[int, float] = {}
        await _try(record, clients[index], salt, last)
        is_unavailable = record.error == UnavailableError.code
        if is_unavailable and has_ended(index, record.sent_s):
            record.first_error, record.first_tokens = record.message, record.tokens
            record.error, record.tokens = "", {}
            await _try(record, clients[await first_serving((index + 1) % len(clients))], salt, last)
        record.ended_s = time.monotonic() - began
        return record

    return await asyncio.gather(*(send(request) for request in requests))


async def _try(record: Record, client: StreamingClient, salt: str, last: dict[int, float]) -> None:
    """Sends a request, and adds what comes to its record.

    Args:
        record: the request's.
        client: of a router.
        salt: separates the caches of runs.
        last: when each candidate had its last token, also in an earlier try.
    """
    request, began = record.request, time.monotonic()
    for index in range(request.params.n):
        last.setdefault(index, began)
    chunks = client.stream(
        request.prompt_token_ids, request.params, cache_salt=salt, timeout_s=_TIMEOUT_S
    )
    try:
        async for chunk in chunks:
            if chunk.token_ids:
                now = time.monotonic()
                record.longest_gap_s = max(record.longest_gap_s, now - last[chunk.index])
                last[chunk.index] = now
            record.tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
    except BatonError as error:
        record.error, record.message = error.code, error.message
        record.longest_gap_s = max(record.longest_gap_s, time.monotonic() - min(last.values()))
