"""Requests of a load generator, their records, and the endpoints that they are sent to."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

__all__ = [
    "BenchRequest",
    "EndpointDescription",
    "LostRequestError",
    "MeasuredRequest",
    "Target",
    "Workload",
    "with_fresh_tokens",
]

_STRIDE = 7919  # a prime, so that shifts of different numbers differ in any vocabulary


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt_token_ids: the prompt.
        num_output_tokens: how many tokens to generate; the end of sequence is ignored.
        arrival_s: seconds after the start of the run at which it is sent. None: it is sent as soon
            as the limit of concurrency allows.
        after: index of the request that must have ended first (the turn before in a conversation);
            None for none.
    """

    prompt_token_ids: Sequence[int]
    num_output_tokens: int
    arrival_s: float | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, in the order they are to be sent.

    Attributes:
        name: a description, such as "random 128:32".
        requests: the requests.
    """

    name: str
    requests: Sequence[BenchRequest]


@dataclass(slots=True)
class MeasuredRequest:
    """The record of one request. All times are seconds after the start of the run.

    Attributes:
        num_prompt_tokens: length of the prompt.
        sent_s: when it was sent.
        token_times_s: when each token arrived; tokens of one message share a time.
        ended_s: when its last message arrived.
        error: why it failed; None if it succeeded.
    """

    num_prompt_tokens: int
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    error: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """TTFT: seconds from sending the request to its first token. None without a token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def token_gap_s(self) -> float | None:
        """TPOT: mean seconds per token after the first. None below two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def latency_s(self) -> float:
        """E2E: seconds from sending the request to its end."""
        return self.ended_s - self.sent_s


def with_fresh_tokens(
    requests: Sequence[BenchRequest], number: int, vocab_size: int
) -> list[BenchRequest]:
    """Returns the same requests with other tokens: each id is shifted by an amount per `number`.

    Prompts keep their lengths and their common prefixes, so they cost as much as before. Those of
    different numbers share no prefix, so no cache finds them.
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
    """A request failed, or its stream ended early; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """Description of an endpoint.

    Attributes:
        model: the name that requests give.
        vocab_size: every token id is smaller; None if the endpoint does not report it.
    """

    model: str
    vocab_size: int | None


class Target(Protocol):
    """An endpoint that requests are sent to. It is opened and used in one event loop."""

    async def describe(self) -> EndpointDescription:
        """Returns what the endpoint serves.

        Raises:
            BatonError: the endpoint does not answer, or its answer is malformed.
        """

    def stream(self, request: BenchRequest) -> AsyncGenerator[int, None]:
        """Generates greedily past the end of sequence; yields the number of tokens of each message.

        Closing the generator cancels the request.

        Raises:
            LostRequestError: the request failed, or the stream ended before its end.
        """

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
