"""`JobScheduler`: the scheduler half of connectors whose jobs all take the same way. Pure.

Stores and peers differ in their worker halves alone.
"""

import itertools
from collections.abc import Sequence

from kvstore.codec import DIGEST_SCHEME
from kvstore.connector import (
    ConnectorWork,
    KvConnectorScheduler,
    LoadJob,
    LookupJob,
    SaveJob,
    TransferResults,
    WorkBuffer,
)
from kvstore.handoff import KvHandoff

__all__ = ["JobScheduler"]


class JobScheduler(KvConnectorScheduler):
    """Numbers jobs and gathers them for the worker half.

    Args:
        scheme: the connector's name, as tiers compare it.
        lease_s: how long what a handoff names can be loaded once it is told, unless its lease
            is renewed.
        finds_by_key: see `KvConnectorScheduler`.
        params: what a reader must know of this process, for every handoff.
        saves_ahead: see `KvConnectorScheduler`.
    """

    def __init__(
        self,
        scheme: str,
        *,
        lease_s: float,
        finds_by_key: bool = True,
        params: bytes = b"",
        saves_ahead: bool = False,
    ) -> None:
        self.scheme = scheme
        self.finds_by_key = finds_by_key
        self.saves_ahead = saves_ahead
        self._lease_ms = int(lease_s * 1000)
        self._params = params
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

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], handoff: KvHandoff | None = None
    ) -> int:
        """See `KvConnectorScheduler.load`."""
        job = LoadJob(next(self._job_ids), tuple(keys), tuple(block_ids), handoff)
        self._work.loads.append(job)
        return job.job_id

    def cancel_load(self, job_id: int) -> None:
        """See `KvConnectorScheduler.cancel_load`."""
        self._work.cancelled_loads.append(job_id)

    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        *,
        num_found: int = 0,
        lease_id: str = "",
    ) -> int:
        """See `KvConnectorScheduler.save`."""
        job_id = next(self._job_ids)
        self._work.saves.append(
            SaveJob(job_id, tuple(keys), tuple(block_ids), num_tail_tokens, num_found, lease_id)
        )
        return job_id

    def save_ahead(
        self, keys: Sequence[bytes], block_ids: Sequence[int], step: int, *, lease_id: str = ""
    ) -> int:
        """See `KvConnectorScheduler.save_ahead`."""
        job_id = next(self._job_ids)
        blocks = tuple(keys), tuple(block_ids)
        self._work.saves.append(SaveJob(job_id, *blocks, lease_id=lease_id, step=step))
        return job_id

    def make_handoff(
        self,
        handoff_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
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
            connector_params=self._params,
        )

    def keep(self, handoff: KvHandoff) -> None:
        """See `KvConnectorScheduler.keep`."""
        self._work.kept.append(handoff)

    def drop(self, handoff_id: str) -> None:
        """See `KvConnectorScheduler.drop`."""
        self._work.dropped.append(handoff_id)

    def offer(self, lease_id: str) -> None:
        """See `KvConnectorScheduler.offer`."""
        self._work.offered.append(lease_id)

    def end_lease(self, lease_id: str) -> None:
        """See `KvConnectorScheduler.end_lease`."""
        self._work.ended.append(lease_id)

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `KvConnectorScheduler.delete`."""
        self._work.deletes.extend(keys)

    def build_work(self) -> ConnectorWork:
        """See `KvConnectorScheduler.build_work`."""
        return self._work.drain()

    def update(self, results: TransferResults) -> TransferResults:
        """See `KvConnectorScheduler.update`. Answers to forgotten look-ups are dropped."""
        for result in results.lookups:
            if result.job_id in self._found:
                self._found[result.job_id] = result.num_blocks
        return results
