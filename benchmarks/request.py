"""What a load generator sends and notes: plain data shared by workloads, targets and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["BenchRequest", "RequestRecord", "Workload"]


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
