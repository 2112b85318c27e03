"""The timeline of a request's record: its stages for `baton trace`, and spans for a collector.

The router knows when it called a worker and when outputs came; the worker says how long its own
stages took. What is left of the call is the stage `rpc`: messages between the processes, and
waits for their event loops and for a step under way. It is shown as halves, before and after the
worker's stages, as the clocks of two machines cannot be compared.

A span has no text of the prompt or the answer. The workers' spans are children of the attempts.
https://opentelemetry.io/docs/specs/semconv/gen-ai/ describes the attributes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.observe.request_record import Attempt, RequestRecord
from rpc.tracing import AttributeValue, Span

__all__ = ["Stage", "spans_of", "stages_of"]

_ROUTER = "router"
_Part = tuple[str, str, float, float]
"""A stage's name and place, its start and its end in `time.monotonic()`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request's time.

    Attributes:
        name: what was done.
        where: "router", or a worker's address.
        start_ms: from the arrival of the request.
        end_ms: from the arrival of the request.
    """

    name: str
    where: str
    start_ms: float
    end_ms: float


def stages_of(record: RequestRecord) -> Sequence[Stage]:
    """Returns the stages of a request that has ended, by their starts."""
    ended_at = record.ended_at or record.arrived_at
    accepted_at = min(record.accepted_at, ended_at)
    parts = [
        ("receive", _ROUTER, record.arrived_at, accepted_at),
        *_routing(record, accepted_at, record.routed_at or ended_at),
    ]
    done_at = record.routed_at or ended_at
    for attempt in record.attempts:
        parts += _routing(record, done_at, attempt.started_at)
        parts += _parts_of(attempt, record.usage.prompt_tokens)
        done_at = attempt.ended_at or ended_at
    parts.append(("send", _ROUTER, done_at, ended_at))
    stages = (
        Stage(name, where, record.ms_since_arrival(start), record.ms_since_arrival(end))
        for name, where, start, end in parts
        if end > start
    )
    return sorted(stages, key=lambda stage: (stage.start_ms, stage.end_ms))


def _routing(record: RequestRecord, start: float, end: float) -> Iterator[_Part]:
    """Yields the choices of a replica between two moments, and the waits for one."""
    for wait_start, wait_end in record.waits:
        if start <= wait_start and wait_end <= end:
            yield "route", _ROUTER, start, wait_start
            yield "wait for a replica", _ROUTER, wait_start, wait_end
            start = wait_end
    yield "route", _ROUTER, start, end


def _parts_of(attempt: Attempt, num_prompt: int) -> Iterator[_Part]:
    ended_at = attempt.ended_at or attempt.started_at
    called_at = attempt.started_at + attempt.asked_s
    if attempt.pulled_from:
        yield "ask for prefix", attempt.pulled_from, attempt.started_at, called_at
    if attempt.first_output_at is None:
        result = "cancelled" if attempt.error == "CANCELLED" else "failed"
        yield f"{attempt.tier} {result}", attempt.where, called_at, ended_at
        return
    call_s = attempt.first_output_at - called_at
    worker = list(_worker_stages(attempt, num_prompt, call_s))
    rest_s = max(call_s - sum(duration_s for _, duration_s in worker), 0.0)
    moment = called_at
    for name, duration_s in (("rpc", rest_s / 2), *worker, ("rpc", rest_s / 2)):
        yield name, attempt.where, moment, moment + duration_s
        moment += duration_s
    if attempt.tier == "decode":
        yield "decode", attempt.where, attempt.first_output_at, ended_at
        return
    first_at = attempt.first_output_at - rest_s / 2  # when the worker had drawn the first token
    saved_at = min(first_at + attempt.timings.transfer_ms / 1000, ended_at)
    yield "transfer", attempt.where, first_at, saved_at
    yield "rpc", attempt.where, max(saved_at, attempt.first_output_at), ended_at


def _worker_stages(attempt: Attempt, num_prompt: int, call_s: float) -> Iterator[tuple[str, float]]:
    """The worker's stages up to its first output, with their durations in seconds, which `call_s`
    limits.
    """
    timings = attempt.timings
    computes_prompt = attempt.tier == "prefill" or num_prompt - attempt.cached_tokens > 1
    for name, duration_ms in (
        ("load", timings.load_ms),
        (f"{attempt.tier} queue", timings.queue_ms),
        ("prefill" if computes_prompt else "decode", timings.prefill_ms),
    ):
        duration_s = min(duration_ms / 1000, call_s)
        call_s -= duration_s
        yield name, duration_s


def spans_of(record: RequestRecord) -> Iterator[Span]:
    """Yields the spans of a request that has ended; none if it has no trace."""
    trace = record.trace
    if trace is None or record.ended_at is None:
        return
    yield Span(
        name=f"{record.operation} {record.model}",
        context=trace,
        parent_id=record.parent_span_id,
        start=record.arrived_at,
        end=record.ended_at,
        attributes=_attributes(record),
        error=record.error,
        is_server=True,
    )
    yield Span(
        name="route",
        context=trace.child(),
        parent_id=trace.span_id,
        start=record.arrived_at,
        end=record.routed_at or record.ended_at,
    )
    for number, attempt in enumerate(record.attempts):
        yield from _span_of_attempt(number, attempt, trace.span_id, record.ended_at)


def _span_of_attempt(
    number: int, attempt: Attempt, parent_id: str, ended_at: float
) -> Iterator[Span]:
    if attempt.trace is not None:
        yield Span(
            name=attempt.tier,
            context=attempt.trace,
            parent_id=parent_id,
            start=attempt.started_at,
            end=attempt.ended_at or ended_at,
            attributes=_attempt_attributes(number, attempt),
            error=attempt.error,
        )


def _attempt_attributes(number: int, attempt: Attempt) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "baton.attempt": number,
        "server.address": attempt.where,
    }
    if attempt.pulled_from:
        attributes["baton.pulled_from"] = attempt.pulled_from
        attributes["baton.pulled_tokens"] = attempt.pulled_tokens
    return attributes


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": record.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.usage.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(record.finish_reasons),
        "baton.request_id": record.request_id,
        "baton.send_wait_ms": record.send_wait_s * 1000,
    }
    attributes |= {f"gen_ai.request.{name}": value for name, value in record.sampling.items()}
    if record.tenant:
        attributes["baton.tenant"] = record.tenant
    if record.first_token_s is not None:
        attributes["gen_ai.server.time_to_first_token"] = record.first_token_s
    if record.error:
        attributes["error.type"] = record.error
    return attributes
