"""`baton trace`: where the time of a request went, as a waterfall in the terminal."""

import argparse
from collections.abc import Iterator
from datetime import datetime

from google.protobuf.json_format import MessageToJson

from baton.cli.operator_calls import CALL_TIMEOUT_S, add_operator_args, calling_router
from baton.cli.terminal import end_of
from baton.v1 import cluster_pb2

__all__ = ["add_args", "format_trace", "format_traces", "main"]

_BAR_CHARS = 26
_NAME_CHARS = 19
_WHERE_CHARS = 16
_ID_CHARS = 27
_REPLICA_CHARS = 19


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "request_id",
        nargs="?",
        default="",
        metavar="REQUEST_ID",
        help="the request's id, as answers and logs have it (default: lists the latest requests)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=20,
        metavar="N",
        help="how many requests to list (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the records as JSON, with all that is known"
    )
    add_operator_args(parser)


def main(args: argparse.Namespace) -> int:
    """Prints the stages of a request that has ended, with the times at which they began and how
    long they took, in milliseconds, and why its replicas were chosen. Without an id it lists the
    latest requests.

    The router keeps the last 1,000. The exit status is 1 if it has none with this id.
    """
    request = cluster_pb2.GetTraceRequest(request_id=args.request_id, limit=args.limit)
    with calling_router(args) as router:
        response = router.stub.GetTrace(request, timeout=CALL_TIMEOUT_S, metadata=router.metadata)
    if args.json:
        print(MessageToJson(response, preserving_proto_field_name=True))
        return 0
    lines = format_trace(response.traces[0]) if args.request_id else format_traces(response)
    print(*lines, sep="\n")
    return 0


def format_traces(response: cluster_pb2.GetTraceResponse) -> Iterator[str]:
    """Yields a line per request, the latest first, below a head."""
    yield f"{'arrived':<13}{'request':<{_ID_CHARS}}{'outcome':<18}{'first ms':>10}{'ms':>10}"
    for trace in response.traces:
        arrived = datetime.fromtimestamp(trace.arrived_s).astimezone()  # the terminal's time zone
        first = f"{trace.first_token_ms:.1f}" if trace.HasField("first_token_ms") else "-"
        yield (
            f"{arrived:%H:%M:%S}.{arrived.microsecond // 1000:03d} "
            f"{end_of(trace.request_id, _ID_CHARS - 1):<{_ID_CHARS}}"
            f"{end_of(trace.outcome, 17):<18}{first:>10}{trace.total_ms:>10.1f}"
        )


def format_trace(trace: cluster_pb2.RequestTrace) -> Iterator[str]:
    """Yields the lines of a request's waterfall; stages fit into 80 columns."""
    yield from _facts(trace)
    yield ""
    yield f"{'stage':<{_NAME_CHARS}}{'where':<{_WHERE_CHARS}}{'':{_BAR_CHARS}}{'start':>9}{'ms':>9}"
    for stage in trace.stages:
        name, where = end_of(stage.name, _NAME_CHARS - 1), end_of(stage.where, _WHERE_CHARS - 1)
        yield (
            f"{name:<{_NAME_CHARS}}{where:<{_WHERE_CHARS}}{_bar(stage, trace.total_ms)}"
            f"{stage.start_ms:>9.1f}{stage.end_ms - stage.start_ms:>9.1f}"
        )
    for choice in trace.choices:
        yield ""
        yield from _choice(choice)


def _facts(trace: cluster_pb2.RequestTrace) -> Iterator[str]:
    usage = trace.usage
    yield f"request  {ascii(trace.request_id)[1:-1]}"
    yield f"model    {ascii(trace.model)[1:-1]}, {trace.operation}, {trace.outcome}"
    if trace.tenant:
        yield f"tenant   {ascii(trace.tenant)[1:-1]}"
    if trace.trace_id:
        yield f"trace    {trace.trace_id}"
    yield (
        f"tokens   {usage.prompt_tokens} prompt, {usage.cached_tokens} cached, "
        f"{usage.completion_tokens} generated"
    )
    total = f"{trace.total_ms:.1f} ms in all, {trace.send_wait_ms:.1f} ms of it sending"
    if trace.HasField("first_token_ms"):
        total = f"first token after {trace.first_token_ms:.1f} ms, {total}"
    yield f"time     {total}"
    if trace.HasField("local_prefill_s"):
        yield (
            f"prompt   costs all requests {trace.local_prefill_s * 1000:.1f} ms on decode, "
            f"{trace.remote_prefill_s * 1000:.1f} ms on prefill"
        )


def _choice(choice: cluster_pb2.ReplicaChoice) -> Iterator[str]:
    """Yields the costs that a replica was chosen by, in milliseconds, the chosen one first."""
    yield f"{choice.tier}: {choice.reason} ({choice.policy}, {choice.num_candidates} replicas)"
    yield (
        f"  {'replica':<{_REPLICA_CHARS}}{'cost':>8}{'queue':>8}{'compute':>8}{'load':>8}"
        f"{'decode':>8}{'tokens':>7}{'runs':>5}{'share':>6}"
    )
    for cost in choice.costs:
        parts = (cost.seconds, cost.queue_s, cost.compute_s, cost.load_s, cost.decode_s)
        yield (
            f"  {end_of(cost.replica, _REPLICA_CHARS - 1):<{_REPLICA_CHARS}}"
            f"{''.join(f'{seconds * 1000:>8.1f}' for seconds in parts)}"
            f"{cost.uncached_tokens:>7}{cost.num_requests:>5}{cost.weight:>6.1f}"
        )


def _bar(stage: cluster_pb2.TraceStage, total_ms: float) -> str:
    """The stage's share of the whole time, at least one character wide."""
    per_char = max(total_ms, 1e-9) / _BAR_CHARS
    start = min(int(stage.start_ms / per_char), _BAR_CHARS - 1)
    end = min(max(round(stage.end_ms / per_char), start + 1), _BAR_CHARS)
    return f"{' ' * start}{'#' * (end - start)}".ljust(_BAR_CHARS)
