"""`open_connector`: from a URL to both halves of a KV connector."""

from kvstore.connector import KvConnectorScheduler, KvConnectorWorker
from kvstore.handoff import connector_name
from kvstore.job_scheduler import JobScheduler
from kvstore.registry import open_store
from kvstore.store_worker import StoreConnectorWorker

__all__ = ["open_connector"]


def open_connector(url: str) -> tuple[KvConnectorScheduler, KvConnectorWorker]:
    """Opens both halves of the connector that a URL names.

    Raises:
        ConfigurationError: unknown scheme, bad option, or unreachable at start.
    """
    store = open_store(url)
    scheduler = JobScheduler(connector_name(url), lease_s=store.ttl_s)
    return scheduler, StoreConnectorWorker(store)
