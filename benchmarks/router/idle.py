"""Part `idle`: processor time of a router that has replicas and no requests."""

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import Table
from benchmarks.router.servers import cpu_seconds, memory_bytes, start_router, start_workers

__all__ = ["IdleRow", "idle_table", "measure_idle"]

_NUMBERS_OF_REPLICAS = (1, 64)
_SETTLE_S, _SECONDS = 3.0, 20.0
_SMOKE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class IdleRow:
    """Figures of a router without requests.

    Attributes:
        num_replicas: decode replicas that it follows.
        cores: processor time per second.
        cores_per_100: what 100 further replicas add, by the difference from the row before.
        memory_mib: resident memory.
    """

    num_replicas: int
    cores: float
    cores_per_100: float
    memory_mib: float


def measure_idle(*, is_smoke: bool) -> list[IdleRow]:
    """Measures routers over different numbers of replicas."""
    rows: list[IdleRow] = []
    for num_replicas in _NUMBERS_OF_REPLICAS:
        cores, memory_mib = _measure(num_replicas, _SMOKE_SECONDS if is_smoke else _SECONDS)
        added = (cores - rows[-1].cores) / (num_replicas - rows[-1].num_replicas) if rows else 0.0
        rows.append(IdleRow(num_replicas, cores, 100 * added, memory_mib))
    return rows


def _measure(num_replicas: int, seconds: float) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder = Path(name)
        decode = start_workers("decode", num_replicas, 1000.0, folder, processes)
        router = start_router(folder, processes, decode=decode)
        time.sleep(min(_SETTLE_S, seconds))
        before_s, started_at = cpu_seconds(router.pid), time.monotonic()
        time.sleep(seconds)
        cores = (cpu_seconds(router.pid) - before_s) / (time.monotonic() - started_at)
        sys.stderr.write(f"idle: {num_replicas} replicas\n")
        return cores, memory_bytes(router.pid) / 2**20


def idle_table(rows: Sequence[IdleRow]) -> Table:
    """The figures as a table."""
    return Table(
        title="A router process without requests",
        columns=("decode replicas", "cores", "cores per 100 further replicas", "memory, MiB"),
        rows=[list(asdict(row).values()) for row in rows],
    )
