"""`ProcessMetrics`: metrics that every process has, whatever it serves."""

import asyncio
import platform
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from baton.common.observe.metrics import MetricInfo, Metrics, Snapshot, buckets_between
from baton.common.observe.metrics_collector import MetricsCollector
from baton.common.security.certificates import Certificates
from baton.common.version import __version__

__all__ = ["METRICS", "ProcessMetrics"]

_LAG_INTERVAL_S = 0.1

METRICS: dict[str, MetricInfo] = {
    "baton_process_event_loop_lag_seconds": MetricInfo(
        "histogram",
        "How late the event loop runs what is due, measured ten times per second.",
        buckets=buckets_between(1e-4, 10.0),
    ),
    "baton_process_certificate_expiry_seconds": MetricInfo(
        "gauge",
        "Unix time at which a certificate of this process expires.",
        {"use": ("clients", "cluster")},
    ),
    "baton_process_build_info": MetricInfo(
        "gauge", "1; the labels describe the program.", {"version": None, "python": None}
    ),
}


class ProcessMetrics:
    """Measures the event loop; reads the certificates and the build.

    Args:
        certificates: the process's, by what they are for: "clients" or "cluster".

    Attributes:
        infos: the table of metrics.
    """

    def __init__(self, certificates: Mapping[str, Certificates | None]) -> None:
        self.infos: Mapping[str, MetricInfo] = METRICS
        lag = "baton_process_event_loop_lag_seconds"
        self._metrics = Metrics({lag: METRICS[lag]})
        self._certificates = certificates

    def register(self, registry: CollectorRegistry) -> None:
        """Adds these metrics to a registry, and those of prometheus_client about the process."""
        registry.register(MetricsCollector(self))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    async def measure_lag(self) -> None:
        """Measures how late this event loop is, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            late_s = max(0.0, loop.time() - due)
            self._metrics.observe("baton_process_event_loop_lag_seconds", late_s)

    def snapshot(self) -> Snapshot:
        """Returns the metrics as of now."""
        values, histograms = self._metrics.snapshot()
        for use, certificates in self._certificates.items():
            expires = None if certificates is None else certificates.expires
            if expires is not None:
                name = "baton_process_certificate_expiry_seconds"
                values[name, use] = expires.timestamp()
        values["baton_process_build_info", __version__, platform.python_version()] = 1
        return Snapshot(values, histograms)
