"""Part `connections`: many streams at the same time, and the router's memory for each."""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Table
from benchmarks.router.servers import (
    cpu_seconds,
    memory_bytes,
    run_client,
    start_router,
    start_workers,
)

__all__ = ["ConnectionRow", "connection_table", "measure_connections"]

_NUM_STREAMS, _NUM_TOKENS, _STEP_MS = 10_000, 16, 5_000.0
_SMOKE_STREAMS, _SMOKE_STEP_MS = 20, 100.0  # the first stream lasts until the last has begun
_NUM_WORKERS = 4
_NUM_PROBES = 5
_STARTS_PER_S = 250
"""A router refuses more than 4,096 requests that wait to be read."""


@dataclass(frozen=True, slots=True)
class ConnectionRow:
    """Figures of many streams over one protocol.

    Attributes:
        server: "router grpc" or "router http".
        num_streams: streams that ran at the same time; over HTTP each has a connection.
        tokens_per_s: streamed tokens per second.
        cpu_us_per_token: processor time of the router per token, starts of streams included.
        first_token_ms: median time to the first token of requests beside the streams.
        memory_kib: what a stream adds to the router's memory at its largest.
    """

    server: str
    num_streams: int
    tokens_per_s: float
    cpu_us_per_token: float
    first_token_ms: float
    memory_kib: float


def measure_connections(*, is_smoke: bool) -> list[ConnectionRow]:
    """Measures each protocol on a new router. An error of a stream ends the benchmark."""
    num_streams = _SMOKE_STREAMS if is_smoke else _NUM_STREAMS
    step_ms = _SMOKE_STEP_MS if is_smoke else _STEP_MS
    return [_measure(kind, num_streams, step_ms) for kind in ("grpc", "http")]


def _measure(kind: str, num_streams: int, step_ms: float) -> ConnectionRow:
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        decode = start_workers("decode", _NUM_WORKERS, step_ms, folder, processes)
        router = start_router(
            folder,
            processes,
            decode=decode,
            flags=(
                *("--max-connections", str(num_streams + _NUM_STREAMS // 10)),
                # Steps of 5 s make the router expect that a burst takes hours, and refuse it.
                *("--default-timeout-s", "86400"),
            ),
        )
        before_s, before_bytes = cpu_seconds(router.pid), memory_bytes(router.pid)
        output = run_client(
            "client",
            kind,
            router.ports[kind],
            *(num_streams, 1, _NUM_TOKENS, _NUM_PROBES, _STARTS_PER_S),
        )
        added = memory_bytes(router.pid, peak=True) - before_bytes
        cpu_s, figures = cpu_seconds(router.pid) - before_s, json.loads(output)
        row = ConnectionRow(
            server=f"router {kind}",
            num_streams=figures["max_running"],
            tokens_per_s=num_streams * _NUM_TOKENS / figures["seconds"],
            cpu_us_per_token=1e6 * cpu_s / (num_streams * _NUM_TOKENS),
            first_token_ms=statistics.median(figures["first_token_ms"]),
            memory_kib=added / num_streams / 1024,
        )
        sys.stderr.write(
            f"{row.server}: {row.num_streams} streams, {row.memory_kib:.0f} KiB each\n"
        )
        return row


def connection_table(rows: Sequence[ConnectionRow]) -> Table:
    """The figures as a table."""
    return Table(
        title=f"Many streams at once through one router process over {_NUM_WORKERS} workers",
        columns=(
            *("server", "streams", "tokens/s", "CPU us per token"),
            *("first token beside them, ms", "memory per stream, KiB"),
        ),
        rows=[list(asdict(row).values()) for row in rows],
    )
