"""`StatsLog`: a line of an engine's numbers in the log, while the engine is not idle."""

import asyncio
import logging
from collections.abc import Mapping

from baton.common.observe.metrics import MetricsSource, Series
from engine.metrics.counts import WAITS

__all__ = ["StatsLog"]

_INTERVAL_S = 10.0

_logger = logging.getLogger("baton.engine")


class StatsLog:
    """Logs what an engine has done since the line before.

    Args:
        source: the engine's metrics.
        interval_s: seconds between lines.
    """

    def __init__(self, source: MetricsSource, interval_s: float = _INTERVAL_S) -> None:
        self._source = source
        self._interval_s = interval_s
        self._before: Mapping[Series, float] = source.snapshot().values
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Logs from now on, on the running event loop, until `close`."""
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._log)

    def close(self) -> None:
        """Stops. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def next_line(self) -> str | None:
        """Returns the line of the time since the last call; None if the engine was idle."""
        before, now = self._before, self._source.snapshot().values
        self._before = now

        def grown(name: str, *labels: str) -> float:
            return now[name, *labels] - before[name, *labels]

        running = now["baton_engine_running_sequences",]
        waiting = sum(now["baton_engine_waiting_requests", reason] for reason in WAITS)
        num_prompt = grown("baton_engine_prompt_tokens")
        num_generated = grown("baton_engine_generated_tokens")
        if not (running or waiting or num_prompt or num_generated):
            return None
        num_asked = grown("baton_engine_prefix_cache_queries")
        num_found = grown("baton_engine_prefix_cache_hits")
        num_blocks = now["baton_engine_kv_blocks",]
        num_preempted = sum(
            grown("baton_engine_preemptions", kind) for kind in ("recompute", "swap")
        )
        return (
            f"stats running={running:.0f} waiting={waiting:.0f}"
            f" kv_usage={now['baton_engine_used_kv_blocks',] / num_blocks:.1%}"
            f" prompt_tokens_per_s={num_prompt / self._interval_s:.1f}"
            f" generated_tokens_per_s={num_generated / self._interval_s:.1f}"
            f" prefix_hit_rate={num_found / max(1.0, num_asked):.1%}"
            f" preemptions={num_preempted:.0f}"
        )

    def _log(self) -> None:
        if (line := self.next_line()) is not None:
            _logger.info("%s", line)
        self.start()
