"""What a load generator sends and notes: plain data shared by workloads, targets and metrics.

The same requests in other tokens: for engines new, in all that costs time alike. Pure.

What a load generator needs of an endpoint.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

__all__ = [
    "BenchRequest",
    "EndpointDescription",
    "LostRequestError",
    "RequestRecord",
    "Target",
    "Workload",
    "with_fresh_tokens",
]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt_token_ids: the prompt.
        num_output_tokens: how many tokens to generate; the end of sequence is ignored.
        arrival_s: seconds after the run's start at which it is sent; None: when
            the arrival process or the concurrency cap lets it.
        after: index of the request that must have ended first (the turn before
            in a conversation); None for none.
    """

    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    arrival_s: float | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in the order they are to be sent.

    Attributes:
        name: says what it is, such as "random 128:32".
        requests: what to send.
    """

    name: str
    requests: Sequence[BenchRequest]


@dataclass(slots=True)
class RequestRecord:
    """What became of one request; all times are seconds after the run's start.

    Attributes:
        num_prompt_tokens: of the request.
        sent_s: when it was sent.
        token_times_s: when each token arrived; tokens of one message share a time.
        ended_s: when its last message arrived.
        error: why it failed; None if it did not.
    """

    num_prompt_tokens: int
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from sending it to its first token: TTFT. None without a token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def token_gap_s(self) -> float | None:
        """Mean seconds per token after the first: TPOT. None below two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def latency_s(self) -> float:
        """Seconds from sending it to its end: E2E."""
        return self.ended_s - self.sent_s


_STRIDE = 7919  # a prime, so that shifts of a few numbers differ whatever the vocabulary


def with_fresh_tokens(
    requests: Sequence[BenchRequest], number: int, vocab_size: int
) -> list[BenchRequest]:
    """Shifts every token id by the same amount, another one for each `number`.

    Prompts keep their lengths and share with each other what they shared, but
    begin otherwise than those of another number: no cache finds them.
    """
    shift = number * _STRIDE % vocab_size
    return [
        replace(
            request,
            prompt_token_ids=tuple((t + shift) % vocab_size for t in request.prompt_token_ids),
        )
        for request in requests
    ]


class LostRequestError(Exception):
    """A request failed, or its stream broke off; the text says why, in a line."""


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """What an endpoint serves.

    Attributes:
        model: the name that requests give.
        vocab_size: token ids are below it; None where the endpoint does not tell.
    """

    model: str
    vocab_size: int | None


class Target(Protocol):
    """An endpoint. Made and used in one event loop."""

    async def describe(self) -> EndpointDescription:
        """Asks what is served.

        Raises:
            BatonError: nobody answers, or not so.
        """

    def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        """Generates greedily past the end of sequence, and yields for each message how many
        tokens it brings. Closing the generator cancels the request.

        Raises:
            LostRequestError: the request failed, or the stream ended before its end.
        """

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
