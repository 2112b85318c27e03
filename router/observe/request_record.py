"""`RequestRecord`: the times and counts of one request, each measured once.

The client's `Timings`, the router's spans and the stages of `baton trace` are made from it.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from baton.common.errors import BatonError
from baton.common.observe.traceparent import TraceContext, parse_traceparent
from baton.common.request.answer import CandidateOutput, TokenCounts
from baton.common.request.results import STAGES, Timings
from baton.common.request.sampling_params import SamplingParams
from router.routing.costs import PrefillPlaces
from router.routing.policy import Choice

__all__ = ["Attempt", "RequestRecord"]

_SPAN_PARAMS = (
    *("temperature", "top_p", "top_k", "max_tokens"),
    *("frequency_penalty", "presence_penalty"),
)
"""Parameters with an attribute `gen_ai.request.NAME`."""
_MIN_WAIT_S = 1e-3
"""Shorter waits are part of the choice of a replica."""


@dataclass(kw_only=True)
class Attempt:
    """One call of a worker for a request.

    Attributes:
        tier: prefill or decode.
        where: the worker's `host:port`.
        traceparent: what the worker receives; empty if the request is not traced.
        trace: the span of the attempt; None if this router sends no spans.
        started_at: `time.monotonic()` of the call.
        first_output_at: when the first output came; None until then.
        ended_at: when the attempt ended; None until then.
        timings: the worker's own times.
        cached_tokens: prompt tokens whose KV the worker found or loaded.
        error: the status name of the error that ended it; empty without one.
        choice: why the worker was chosen; None if it was not chosen by costs.
        pulled_from: `host:port` of the worker that was asked to lend the prompt's beginning; empty
            if none was.
        asked_s: seconds until it answered, before the call of the worker began.
        pulled_tokens: tokens that it lent; 0 if it lent none.
    """

    tier: str
    where: str
    traceparent: str
    trace: TraceContext | None
    started_at: float = field(default_factory=time.monotonic)
    first_output_at: float | None = None
    ended_at: float | None = None
    timings: Timings = field(default_factory=Timings)
    cached_tokens: int = 0
    error: str = ""
    choice: Choice | None = None
    pulled_from: str = ""
    asked_s: float = 0.0
    pulled_tokens: int = 0

    def take(self, output: CandidateOutput) -> None:
        """Notes the times of an output; later ones of decode have nothing new."""
        if self.first_output_at is None:
            self.first_output_at = time.monotonic()
            self.cached_tokens = output.cached_tokens
        if output.stages is not None:
            new = {name: ms for name in STAGES if (ms := getattr(output.stages, name))}
            self.timings = replace(self.timings, **new) if new else self.timings


@dataclass(kw_only=True)
class RequestRecord:
    """One request from its arrival to its end. Times are those of `time.monotonic()`.

    Attributes:
        request_id: the client's name for the request.
        model: the model's name.
        operation: text_completion or chat.
        tenant: the client's name; empty if clients have none.
        is_awaited: whether a client waits for the answer: not for those of batches.
        session: what the conversation is known by that it belongs to (`router.routing.sessions`);
            empty if the client names none.
        traceparent: the client's span; empty if it sent none.
        trace: the request's own span; None if this router sends no spans.
        parent_span_id: the client's span; empty if the request begins the trace.
        arrived_at: when the client's call began.
        accepted_at: when the call was read, parsed and validated.
        routed_at: when it went to the tiers; None until then.
        first_token_at: when its first token was ready for the client; None until then.
        ended_at: its end; None until then.
        send_wait_s: how long it waited, in all, until the client had taken a message.
        usage: its tokens.
        sampling: parameters for the attributes of its span.
        finish_reasons: of the candidates that have ended.
        is_over: whether every candidate has ended.
        error: the status name of the error that ended it; empty without one.
        attempts: its calls of workers, in order.
        waits: when it waited for a replica: starts and ends, in order.
        choices: by tier, why the replica of the next attempt was chosen.
        places: what its prompt cost on decode and on prefill; None if they were not compared.
    """

    request_id: str = ""
    model: str = ""
    operation: str = "text_completion"
    tenant: str = ""
    is_awaited: bool = True
    session: bytes = b""
    traceparent: str = ""
    trace: TraceContext | None = None
    parent_span_id: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
    accepted_at: float = field(default_factory=time.monotonic)
    routed_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    send_wait_s: float = 0.0
    usage: TokenCounts = field(default_factory=TokenCounts)
    sampling: dict[str, float | int] = field(default_factory=dict)
    finish_reasons: list[str] = field(default_factory=list)
    is_over: bool = False
    error: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    places: PrefillPlaces | None = None

    @property
    def wait_s(self) -> float:
        """How long it has waited, in all, for replicas."""
        return sum(end - start for start, end in self.waits)

    def queue_left_s(self, timeout_s: float) -> float:
        """Seconds for which it may still wait, of `timeout_s` in all."""
        return max(timeout_s - self.wait_s, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Notes that the request waits for a replica while the context is open."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            ended_at = time.monotonic()
            if ended_at - started_at >= _MIN_WAIT_S:
                self.waits.append((started_at, ended_at))

    @property
    def trace_id(self) -> str:
        """The trace that the request belongs to; empty if it is not traced."""
        sent = self.trace or parse_traceparent(self.traceparent)
        return sent.trace_id if sent else ""

    @property
    def outcome(self) -> str:
        """How the request ended: its finish reasons, or an error's status name."""
        return self.error or ",".join(dict.fromkeys(self.finish_reasons)) or "RUNNING"

    @property
    def first_token_s(self) -> float | None:
        """Seconds from its arrival to its first token; None without one."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def token_s(self) -> float | None:
        """Seconds from its first token to its end, per later token. None if it did not run to its
        end, has no later token, or has several candidates, whose tokens come at the same time.
        """
        num_later = self.usage.completion_tokens - 1
        if self.error or len(self.finish_reasons) != 1 or num_later < 1:
            return None
        if self.first_token_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.first_token_at) / num_later

    def note_params(self, params: SamplingParams) -> None:
        """Keeps the parameters that its span has."""
        self.sampling = {name: getattr(params, name) for name in _SPAN_PARAMS}

    def mark_routed(self) -> None:
        """Notes that the request now goes to the tiers."""
        self.routed_at = time.monotonic()

    def mark_first_token(self) -> None:
        """Notes that a token is ready for the client; later ones change nothing."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()

    def add_end(self, reason: str, *, is_over: bool) -> None:
        """Notes the end of a candidate.

        Args:
            reason: why it ended.
            is_over: whether it was the last one.
        """
        self.finish_reasons.append("aborted" if reason == "abort" else reason)
        self.is_over = is_over

    def end(self, error: BaseException | None, deadline: float) -> None:
        """Notes the end.

        Args:
            error: what ended the request; None if it ran to its end. A client that leaves with
                the whole answer ends it too.
            deadline: when the request must have ended.
        """
        self.ended_at = time.monotonic()
        if error is not None and not self.is_over:
            self.error = _status_name(error, has_expired=self.ended_at >= deadline)

    @contextmanager
    def attempt(self, tier: str, where: str) -> Iterator[Attempt]:
        """Adds an attempt, which ends with the context.

        Args:
            tier: prefill or decode.
            where: the worker's `host:port`.
        """
        trace = self.trace.child() if self.trace else None
        traceparent = trace.header if trace else self.traceparent
        choice = self.choices.pop(tier, None)
        attempt = Attempt(
            tier=tier, where=where, traceparent=traceparent, trace=trace, choice=choice
        )
        self.attempts.append(attempt)
        try:
            yield attempt
        except BaseException as error:
            # A call that is cancelled after its first output has given all that was needed.
            if isinstance(error, Exception) or attempt.first_output_at is None:
                attempt.error = _status_name(error, has_expired=False)
            raise
        finally:
            attempt.ended_at = time.monotonic()

    def ms_since_arrival(self, moment: float | None = None) -> float:
        """Milliseconds from the arrival to a moment; None is now."""
        return ((time.monotonic() if moment is None else moment) - self.arrived_at) * 1000


def _status_name(error: BaseException, *, has_expired: bool) -> str:
    if isinstance(error, BatonError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "DEADLINE_EXCEEDED" if has_expired else "CANCELLED"
    return "INTERNAL"
