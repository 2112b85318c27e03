"""An engine's metrics for Prometheus, under its own names and those of vLLM, and in its log."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from baton.common.observe.metrics import Histogram, MetricInfo, MetricsSource, Series, Snapshot
from engine.metrics.counts import METRICS, WAITS, EngineMetrics
from engine.request import EngineLoad

__all__ = ["VLLM_METRICS", "EngineDescription", "EngineExport", "StatsLog", "VllmExport"]

_LABELS: dict[str, None] = {"model_name": None, "engine": None}
# The metrics of vLLM, each with the series of ours that it is the sum of.
_VALUES: dict[str, tuple[Series, ...]] = {
    "vllm:num_requests_running": (("baton_engine_running_sequences",),),
    "vllm:num_requests_waiting": tuple(("baton_engine_waiting_requests", wait) for wait in WAITS),
    "vllm:prompt_tokens": (("baton_engine_prompt_tokens",),),
    "vllm:generation_tokens": (("baton_engine_generated_tokens",),),
    "vllm:prefix_cache_queries": (("baton_engine_prefix_cache_queries",),),
    "vllm:prefix_cache_hits": (("baton_engine_prefix_cache_hits",),),
    "vllm:num_preemptions": (
        ("baton_engine_preemptions", "recompute"),
        ("baton_engine_preemptions", "swap"),
    ),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "baton_engine_first_token_seconds",
    "vllm:inter_token_latency_seconds": "baton_engine_inter_token_seconds",
    "vllm:e2e_request_latency_seconds": "baton_engine_request_seconds",
    "vllm:request_queue_time_seconds": "baton_engine_queue_seconds",
}
_FINISHED_REASONS = ("stop", "length", "abort", "error")
_INTERVAL_S = 10.0
_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """The constants that are exported as labels."""

    model: str
    block_size: int
    kv_dtype: str
    caches_prefixes: bool


class EngineExport:
    """The counts of an engine, and its load.

    Args:
        metrics: the counts.
        read_load: returns the load now. Any thread may call it.
        description: of the engine.

    Attributes:
        infos: the table of metrics.
        description: of the engine.
    """

    def __init__(
        self,
        metrics: EngineMetrics,
        read_load: Callable[[], EngineLoad],
        description: EngineDescription,
    ) -> None:
        self.infos: Mapping[str, MetricInfo] = METRICS
        self._metrics = metrics
        self._read_load = read_load
        self.description = description

    def snapshot(self) -> Snapshot:
        """Returns the metrics as of now."""
        values, histograms = self._metrics.snapshot()
        load = self._read_load()
        values |= _values_of(load)
        values["baton_engine_info", self.description.model, load.role.label] = 1
        return Snapshot(values, histograms)


def _values_of(load: EngineLoad) -> dict[Series, float]:
    num_elsewhere = load.num_loading + load.num_compiling + load.num_swapped
    waits = (
        load.num_waiting - num_elsewhere,
        load.num_loading,
        load.num_compiling,
        load.num_swapped,
    )
    return {
        ("baton_engine_running_sequences",): load.num_running,
        **{
            ("baton_engine_waiting_requests", reason): number
            for reason, number in zip(WAITS, waits, strict=True)
        },
        ("baton_engine_queued_prompt_tokens",): load.num_queued_tokens,
        ("baton_engine_draining",): load.draining,
        ("baton_engine_stalled",): load.stalled,
        ("baton_engine_kv_blocks",): load.num_blocks,
        ("baton_engine_used_kv_blocks",): load.num_blocks - load.num_free_blocks,
        ("baton_engine_cached_kv_blocks",): load.num_cached_blocks,
        ("baton_engine_swapped_kv_blocks",): load.num_swapped_blocks,
        ("baton_engine_prefix_cache_queries",): load.prefix_cache_queries,
        ("baton_engine_prefix_cache_hits",): load.prefix_cache_hits,
        ("baton_engine_preemptions", "recompute"): load.num_preemptions - load.num_swap_preemptions,
        ("baton_engine_preemptions", "swap"): load.num_swap_preemptions,
        ("baton_engine_state_slots",): load.num_slots,
        ("baton_engine_used_state_slots",): load.num_slots - load.num_free_slots,
        ("baton_engine_cached_state_slots",): load.num_cached_slots,
        ("baton_engine_state_ends", "kept"): load.num_kept_states,
        ("baton_engine_state_ends", "skipped"): load.num_skipped_states,
        ("baton_engine_state_hits",): load.num_state_hits,
        ("baton_engine_state_lost_tokens",): load.num_state_lost_tokens,
    }


def _vllm_infos() -> Iterator[tuple[str, MetricInfo]]:
    for name, (series, *_) in _VALUES.items():
        yield name, MetricInfo(METRICS[series[0]].kind, f"vLLM's name of {series[0]}.", _LABELS)
    for name, ours in _HISTOGRAMS.items():
        buckets = METRICS[ours].buckets
        yield name, MetricInfo("histogram", f"vLLM's name of {ours}.", _LABELS, buckets)
    yield (
        "vllm:kv_cache_usage_perc",
        MetricInfo("gauge", "Share of the KV blocks that requests hold; 1 is all.", _LABELS),
    )
    yield (
        "vllm:request_success",
        MetricInfo(
            "counter",
            "vLLM's name of baton_engine_requests, without those handed over.",
            {**_LABELS, "finished_reason": _FINISHED_REASONS},
        ),
    )
    constants = dict.fromkeys(
        ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")
    )
    yield (
        "vllm:cache_config_info",
        MetricInfo("gauge", "1; the labels describe the KV cache.", {**_LABELS, **constants}),
    )


VLLM_METRICS: dict[str, MetricInfo] = dict(_vllm_infos())
"""The metrics of vLLM that mean the same here."""


class VllmExport:
    """An engine's metrics by the names of vLLM, from the same counts.

    Args:
        source: the engine's metrics by our names.

    Attributes:
        infos: the table of metrics.
    """

    def __init__(self, source: EngineExport) -> None:
        self.infos: Mapping[str, MetricInfo] = VLLM_METRICS
        self._source = source

    def snapshot(self) -> Snapshot:
        """Returns the metrics as of now."""
        values, found = self._source.snapshot()
        labels = (self._source.description.model, "0")
        named: dict[Series, float] = {
            (name, *labels): sum(values[one] for one in series) for name, series in _VALUES.items()
        }
        for reason in _FINISHED_REASONS:
            named["vllm:request_success", *labels, reason] = values["baton_engine_requests", reason]
        num_blocks = values["baton_engine_kv_blocks",]
        used = values["baton_engine_used_kv_blocks",] / num_blocks
        named["vllm:kv_cache_usage_perc", *labels] = used
        named["vllm:cache_config_info", *labels, *self._constants(int(num_blocks))] = 1
        histograms: dict[Series, Histogram] = {
            (name, *labels): found[ours,] for name, ours in _HISTOGRAMS.items()
        }
        return Snapshot(named, histograms)

    def _constants(self, num_blocks: int) -> Series:
        about = self._source.description
        return str(about.block_size), str(num_blocks), about.kv_dtype, str(about.caches_prefixes)


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
