"""The store connector: hands KV over through any `KvStore`. The scheduler half.

`kvstore.store_worker` is the half that moves the bytes. Pure bookkeeping here.
"""

import itertools
from collections.abc import Sequence

from kvstore.codec import DIGEST_SCHEME
from kvstore.connector import (
    ConnectorWork,
    KvConnectorScheduler,
    KvConnectorWorker,
    LoadJob,
    LookupJob,
    SaveJob,
    TransferResults,
    WorkBuffer,
)
from kvstore.handoff import KvHandoff, connector_name
from kvstore.registry import open_store
from kvstore.store_worker import StoreConnectorWorker

__all__ = ["StoreConnectorScheduler", "open_connector"]


def open_connector(url: str) -> tuple[KvConnectorScheduler, KvConnectorWorker]:
    """Opens both halves of the connector that a URL names.

    Raises:
        ConfigurationError: unknown scheme, bad option, or unreachable at start.
    """
    store = open_store(url)
    return StoreConnectorScheduler(connector_name(url), ttl_s=store.ttl_s), StoreConnectorWorker(
        store
    )


class StoreConnectorScheduler(KvConnectorScheduler):
    """Bookkeeping beside the scheduler.

    Args:
        scheme: the store's URL scheme.
        ttl_s: how long the store keeps objects.
    """

    def __init__(self, scheme: str, *, ttl_s: float) -> None:
        self.scheme = scheme
        self._lease_ms = int(ttl_s * 1000)
        self._work = WorkBuffer()
        self._job_ids = itertools.count()
        # Look-ups by job: None while open, else how many blocks were found.
        self._found: dict[int, int | None] = {}

    def lookup(self, keys: Sequence[bytes]) -> int:
        """See `KvConnectorScheduler.lookup`."""
        job = LookupJob(next(self._job_ids), tuple(keys))
        self._work.lookups.append(job)
        self._found[job.job_id] = None
        return job.job_id

    def num_found(self, job_id: int) -> int | None:
        """See `KvConnectorScheduler.num_found`."""
        return self._found[job_id]

    def forget_lookup(self, job_id: int) -> None:
        """See `KvConnectorScheduler.forget_lookup`."""
        if self._found.pop(job_id) is None:
            self._work.cancelled_lookups.append(job_id)

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """See `KvConnectorScheduler.load`."""
        job = LoadJob(next(self._job_ids), tuple(keys), tuple(block_ids))
        self._work.loads.append(job)
        return job.job_id

    def cancel_load(self, job_id: int) -> None:
        """See `KvConnectorScheduler.cancel_load`."""
        self._work.cancelled_loads.append(job_id)

    def save(
        self, keys: Sequence[bytes], block_ids: Sequence[int], num_tail_tokens: int = 0
    ) -> int:
        """See `KvConnectorScheduler.save`."""
        job = SaveJob(next(self._job_ids), tuple(keys), tuple(block_ids), num_tail_tokens)
        self._work.saves.append(job)
        return job.job_id

    def make_handoff(
        self, handoff_id: str, namespace: bytes, keys: Sequence[bytes], num_tokens: int
    ) -> KvHandoff:
        """See `KvConnectorScheduler.make_handoff`."""
        return KvHandoff(
            handoff_id=handoff_id,
            namespace=namespace,
            block_keys=tuple(keys),
            num_tokens=num_tokens,
            connector=self.scheme,
            digest_scheme=DIGEST_SCHEME,
            lease_ms=self._lease_ms,
        )

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `KvConnectorScheduler.delete`."""
        self._work.deletes.extend(keys)

    def build_work(self) -> ConnectorWork:
        """See `KvConnectorScheduler.build_work`."""
        return self._work.drain()

    def update(self, results: TransferResults) -> None:
        """See `KvConnectorScheduler.update`. Answers to forgotten look-ups are dropped."""
        for result in results.lookups:
            if result.job_id in self._found:
                self._found[result.job_id] = result.num_blocks
