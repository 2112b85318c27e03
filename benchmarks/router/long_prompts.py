"""Part `long-prompts`: the cost of prompts of 100k tokens in a router, and what others wait."""

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
    ServerProcess,
    cpu_seconds,
    run_client,
    start_router,
    start_workers,
)

__all__ = ["LongPromptRow", "long_prompt_table", "measure_long_prompts"]

_NUM_TOKENS = 100_000
_NUM_REQUESTS = 20
_PAUSE_MS = 5
_SMOKE = (2_000, 2)


@dataclass(frozen=True, slots=True)
class LongPromptRow:
    """Figures of long prompts in one form.

    Attributes:
        form: protocol, and whether prompts are texts or token ids.
        num_tokens: mean tokens per prompt.
        core_s: processor time of the router per request, from its first byte to its last.
        request_ms: median time of a long request without others.
        short_ms: median time of short requests without others.
        beside_p50_ms: median time of short requests beside long ones.
        beside_p99_ms: their 99th percentile.
    """

    form: str
    num_tokens: float
    core_s: float
    request_ms: float
    short_ms: float
    beside_p50_ms: float
    beside_p99_ms: float


def measure_long_prompts(*, is_smoke: bool) -> list[LongPromptRow]:
    """Measures prompts that a prefill worker takes, and then a decode worker with their handoffs.
    No worker has a model.
    """
    num_tokens, num_requests = _SMOKE if is_smoke else (_NUM_TOKENS, _NUM_REQUESTS)
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        router = start_router(
            folder,
            processes,
            decode=start_workers("decode", 1, 1.0, folder, processes),
            prefill=start_workers("prefill", 1, 1.0, folder, processes),
        )
        return [
            _measure(router, kind, form, num_tokens, num_requests)
            for kind in ("grpc", "http")
            for form in ("text", "tokens")
        ]


def _measure(
    router: ServerProcess, kind: str, form: str, num_tokens: int, num_requests: int
) -> LongPromptRow:
    def run(length: int, pause_ms: int) -> dict[str, list[float]]:
        arguments = kind, form, router.ports[kind], num_requests, length, pause_ms
        figures: dict[str, list[float]] = json.loads(run_client("long_client", *arguments))
        return figures

    short = run(16, 0)  # also warms the router up
    before_s = cpu_seconds(router.pid)
    alone = run(num_tokens, 0)
    core_s = (cpu_seconds(router.pid) - before_s) / num_requests
    beside = sorted(run(num_tokens, _PAUSE_MS)["short_s"])
    sys.stderr.write(f"long prompts: {kind} {form}\n")
    return LongPromptRow(
        form=f"{kind} {form}",
        num_tokens=float(alone["num_tokens"]),  # type: ignore[arg-type]  # a number
        core_s=core_s,
        request_ms=1000 * statistics.median(alone["long_s"]),
        short_ms=1000 * statistics.median(short["long_s"]),
        beside_p50_ms=1000 * statistics.median(beside),
        beside_p99_ms=1000 * beside[int(0.99 * len(beside))],
    )


def long_prompt_table(rows: Sequence[LongPromptRow]) -> Table:
    """The figures as a table."""
    columns = (
        *("prompts", "tokens", "core-seconds per request", "request, ms", "short request, ms"),
        *("beside long ones p50, ms", "p99, ms"),
    )
    return Table(
        title="Long prompts through one router process, prefill and decode",
        columns=columns,
        rows=[list(asdict(row).values()) for row in rows],
    )
