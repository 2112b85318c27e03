"""What an engine tells Prometheus. Another collector over an engine is a line here."""

from prometheus_client import CollectorRegistry

from engine.async_engine import AsyncEngine
from kvstore.metrics_collector import KvMetricsCollector

__all__ = ["register_metrics"]


def register_metrics(engine: AsyncEngine, registry: CollectorRegistry) -> None:
    """Shows a started engine's metrics in a registry of its own."""
    registry.register(KvMetricsCollector(engine.kv_metrics))
