"""Part `streams`: streamed tokens and small requests in a router, beside bare servers."""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.report import Table
from benchmarks.router.servers import (
    ServerProcess,
    cpu_seconds,
    run_client,
    start_floor,
    start_router,
    start_workers,
)

__all__ = ["StreamRow", "measure_streams", "stream_table"]

_NUM_PROBES = 20
_SHARE_OF_CAPACITY = 0.8
_MANY_STREAMS = 400
_BUSY_MS = 5_000


@dataclass(frozen=True, slots=True)
class _RouterLoad:
    """Streams that start together, each `num_rounds` times: how many, of how many tokens, one
    per `step_ms`.
    """

    name: str
    num_streams: int
    num_rounds: int
    num_tokens: int
    step_ms: float


_FLOODED = _RouterLoad("flooded", 800, 1, 100, 50.0)
_LOADS = (
    _RouterLoad("steady", 64, 1, 100, 50.0),
    _RouterLoad("crowded", 400, 1, 80, 50.0),
    _FLOODED,
    _RouterLoad("requests", 32, 40, 1, 5.0),
)
_SMOKE_LOADS = (_RouterLoad("smoke", 4, 2, 5, 5.0),)


@dataclass(frozen=True, slots=True)
class StreamRow:
    """Figures of one server under one load.

    Attributes:
        server: "grpc" or "http", of a router or of a bare server.
        load: the load's name.
        tokens_per_s: streamed tokens per second.
        tokens_per_message: how many tokens a message had.
        cpu_us_per_token: processor time of the server's process per token.
        tokens_per_cpu_s: its inverse: what one core could stream at this load.
        first_token_ms: median time to the first token of requests beside the streams.
    """

    server: str
    load: str
    tokens_per_s: float
    tokens_per_message: float
    cpu_us_per_token: float
    tokens_per_cpu_s: float
    first_token_ms: float


def measure_streams(*, is_smoke: bool, num_processes: int = 1) -> list[StreamRow]:
    """Measures each load on all servers; then 400 streams at 80% of what the router could stream,
    and no streams: the load of which the first tokens are compared.

    Args:
        is_smoke: whether everything is tiny.
        num_processes: processes of the router.
    """
    loads = _SMOKE_LOADS if is_smoke else _LOADS
    rows = [row for load in loads for row in _measure(load, num_processes)]
    if is_smoke:
        return rows
    for kind in ("grpc", "http"):
        capacity = next(
            row.tokens_per_s
            for row in rows
            if (row.server, row.load) == (f"router {kind}", _FLOODED.name)
        )
        step_ms = 1000 * _MANY_STREAMS / (_SHARE_OF_CAPACITY * capacity)
        num_tokens = round(_BUSY_MS / step_ms)
        busy = _RouterLoad("80% of capacity", _MANY_STREAMS, 1, num_tokens, step_ms)
        for load in (busy, replace(busy, name="unloaded", num_streams=1)):
            with _servers(load, num_processes, has_floors=False) as servers:
                rows += [
                    _run_load(name, served, server, load)
                    for name, served, server in servers
                    if served == kind
                ]
    return rows


_Server = tuple[str, str, ServerProcess]
"""Its name, its protocol and its process."""


def _measure(load: _RouterLoad, num_processes: int) -> list[StreamRow]:
    with _servers(load, num_processes) as servers:
        return [_run_load(name, kind, server, load) for name, kind, server in servers]


@contextmanager
def _servers(
    load: _RouterLoad, num_processes: int, *, has_floors: bool = True
) -> Iterator[list[_Server]]:
    """Starts the bare servers and a router over a scripted worker."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder, servers = Path(name), []
        for kind in ("grpc", "http") if has_floors else ():
            floor = start_floor(kind, load.step_ms, folder, processes)
            servers.append((f"bare {kind}", kind, floor))
        decode = start_workers("decode", 1, load.step_ms, folder, processes)
        flags = ("--processes", str(num_processes))
        router = start_router(folder, processes, decode=decode, flags=flags)
        yield [*servers, *((f"router {kind}", kind, router) for kind in router.ports)]


def _run_load(name: str, kind: str, server: ServerProcess, load: _RouterLoad) -> StreamRow:
    before_s = cpu_seconds(server.pid)
    output = run_client(
        "client",
        kind,
        server.ports[kind],
        *(load.num_streams, load.num_rounds, load.num_tokens, _NUM_PROBES),
    )
    cpu_s = cpu_seconds(server.pid) - before_s
    figures = json.loads(output)
    num_tokens = load.num_streams * load.num_rounds * load.num_tokens
    row = StreamRow(
        server=name,
        load=load.name,
        tokens_per_s=num_tokens / figures["seconds"],
        tokens_per_message=num_tokens / figures["num_messages"],
        cpu_us_per_token=1e6 * cpu_s / num_tokens,
        tokens_per_cpu_s=num_tokens / max(cpu_s, 1e-9),
        first_token_ms=statistics.median(figures["first_token_ms"]),
    )
    sys.stderr.write(
        f"{name}, {load.name}: {row.tokens_per_s:.0f} tokens/s, {row.tokens_per_cpu_s:.0f} per CPU "
        f"second, {row.tokens_per_message:.1f} per message, first {row.first_token_ms:.1f} ms\n"
    )
    return row


def stream_table(rows: Sequence[StreamRow]) -> Table:
    """The figures as a table."""
    columns = (
        *("server", "load", "tokens/s", "tokens per message", "CPU us per token"),
        *("tokens per CPU second", "first token beside it, ms"),
    )
    return Table(
        title="A router, and bare servers that send one message per token",
        columns=columns,
        rows=[list(asdict(row).values()) for row in rows],
        note="The load 'requests' has one token per request: its rows count requests.",
    )
