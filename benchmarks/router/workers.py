"""`baton bench router --part workers`: what a choice costs among thousands of replicas.

A trace is served in virtual time by simulated replicas, and the router's look-ups and choices are
timed on the processor.
"""

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import override

from benchmarks.report import Table
from benchmarks.router.simulation.cluster import SimulatedCluster
from benchmarks.router.simulation.replica import Machine
from benchmarks.router.simulation.requests import SimulatedRequest, read_lines
from benchmarks.router.simulation.router import Placed, SimulatedRouter
from benchmarks.router.simulation.run import Setting, send_requests
from benchmarks.router.simulation.virtual_time import run_in_virtual_time
from router.routing.cache_index import CacheMatch
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

__all__ = ["WorkersRow", "measure_workers", "workers_table"]

_NUMBERS_OF_WORKERS = (128, 1_000, 7_000)
_NUM_BLOCKS = 300
"""A pool of 150,000 tokens, for which there is memory 7,000 times."""
_SMOKE_WORKERS, _SMOKE_REQUESTS = (4,), 30


@dataclass(frozen=True, slots=True)
class WorkersRow:
    """Figures of one number of workers. Times are of the processor.

    Attributes:
        num_workers: replicas, half of them of each tier.
        num_requests: requests of the trace.
        num_blocks: different blocks in the index at the end.
        look_up_p50_ms: median time to look a prompt up in the index.
        look_up_p99_ms: its 99th percentile.
        decision_p50_ms: median time to choose both replicas of a request, its look-up included.
        decision_p99_ms: its 99th percentile.
    """

    num_workers: int
    num_requests: int
    num_blocks: int
    look_up_p50_ms: float
    look_up_p99_ms: float
    decision_p50_ms: float
    decision_p99_ms: float


class _TimedRouter(SimulatedRouter):
    """A router that times its choices."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        policy = make_policy("prefix", PolicySettings())
        super().__init__(policy, cluster.prefill, cluster.decode)
        self.look_up_s: list[float] = []
        self.decision_s: list[float] = []

    @property
    def num_blocks(self) -> int:
        """Different blocks in the index."""
        return len(self._index)

    @override
    def place(self, request: SimulatedRequest, decode_ids: Iterable[str] | None = None) -> Placed:
        started = time.thread_time()
        placed = super().place(request, decode_ids)
        self.decision_s.append(time.thread_time() - started)
        return placed

    @override
    def _match(self, request: SimulatedRequest) -> CacheMatch:
        started = time.thread_time()
        match = super()._match(request)
        self.look_up_s.append(time.thread_time() - started)
        return match


def measure_workers(*, is_smoke: bool, trace: Path | None = None) -> Sequence[WorkersRow]:
    """Measures the policy `prefix` while a trace is served at its own times.

    Args:
        is_smoke: whether to make everything tiny.
        trace: a file in Mooncake's format; None for conversations that are made up.

    Raises:
        ConfigurationError: the file is bad.
    """
    lines = read_lines(trace)
    lines = lines[:_SMOKE_REQUESTS] if is_smoke else lines
    machine = Machine(num_blocks=_NUM_BLOCKS)
    return [
        run_in_virtual_time(
            _measure(Setting(lines=lines, num_replicas=number // 2, load=None, machine=machine))
        )
        for number in (_SMOKE_WORKERS if is_smoke else _NUMBERS_OF_WORKERS)
    ]


async def _measure(setting: Setting) -> WorkersRow:
    cluster = SimulatedCluster(setting.tier, setting.tier)
    router = _TimedRouter(cluster)
    cluster.start([router])
    requests = setting.requests(seed=0)
    gc.collect()
    gc.freeze()  # as servers do: the collector would visit thousands of simulated pools
    try:
        await send_requests(requests, [router], seed=0)
    finally:
        gc.unfreeze()
    return WorkersRow(
        2 * setting.num_replicas,
        len(requests),
        router.num_blocks,
        *_percentiles_ms(router.look_up_s),
        *_percentiles_ms(router.decision_s),
    )


def _percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    ascending = sorted(seconds)
    middle, high = ascending[len(seconds) // 2], ascending[len(seconds) * 99 // 100]
    return 1000 * middle, 1000 * high


def workers_table(rows: Sequence[WorkersRow]) -> Table:
    """Shows the figures."""
    return Table(
        "Choices among many workers on a trace",
        (
            *("workers", "requests", "blocks in the index", "look-up p50, ms", "p99, ms"),
            *("decision p50, ms", "p99, ms"),
        ),
        [list(asdict(row).values()) for row in rows],
        "processor time; a decision chooses the replicas of both tiers",
    )
