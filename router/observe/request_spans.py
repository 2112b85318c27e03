"""The spans of a request's record, with OpenTelemetry's attributes for generative AI.

A span has no text of the prompt or the answer. The workers' spans are children of the attempts.
https://opentelemetry.io/docs/specs/semconv/gen-ai/ describes the attributes.
"""

from collections.abc import Iterator

from router.observe.request_record import Attempt, RequestRecord
from rpc.tracing import AttributeValue, Span

__all__ = ["spans_of"]


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
            attributes={"baton.attempt": number, "server.address": attempt.where},
            error=attempt.error,
        )


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
