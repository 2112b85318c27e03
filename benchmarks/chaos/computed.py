"""Counts the tokens that workers compute, over their restarts."""

import asyncio
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from baton.up.plan import Server

__all__ = ["ComputedTokens", "counting_computed"]

_METRIC = "baton_engine_step_tokens"
_INTERVAL_S = 1.0
_TIMEOUT_S = 2.0


class ComputedTokens:
    """Sums of counters that begin at 0 when their process starts again. Pure.

    Attributes:
        total: tokens since the first reading of each worker.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._last: dict[str, float] = {}

    def read(self, name: str, value: float) -> None:
        """Takes a worker's counter."""
        last = self._last.get(name, value)
        self.total += value - last if value >= last else value
        self._last[name] = value


@contextmanager
def counting_computed(workers: Sequence[Server]) -> Iterator[ComputedTokens]:
    """Reads the workers' metrics once a second while the context is open."""
    computed = ComputedTokens()

    async def follow(worker: Server) -> None:
        while True:
            try:
                value = await asyncio.to_thread(_computed_by, worker.metrics_url)
            except OSError:  # it is down or frozen
                pass
            else:
                computed.read(worker.spec.name, value)
            await asyncio.sleep(_INTERVAL_S)

    tasks = [asyncio.create_task(follow(worker)) for worker in workers]
    try:
        yield computed
    finally:
        for task in tasks:
            task.cancel()


def _computed_by(url: str) -> float:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - http
        text: str = response.read().decode()
    for family in text_string_to_metric_families(text):
        if family.name == _METRIC:
            return next(s.value for s in family.samples if s.name.endswith("_sum"))
    return 0.0
