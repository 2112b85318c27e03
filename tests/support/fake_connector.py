"""A connector worker over a dict, whose jobs end when and how the test says.

It is as unkind as the interface allows: saves read the pool, and loads write
it, only at their end, even when the load was cancelled meanwhile.
"""

from collections.abc import Callable
from typing import Any

from kvstore.connector import (
    ConnectorWork,
    KvConnectorWorker,
    LoadJob,
    LoadResult,
    LookupJob,
    LookupResult,
    SaveJob,
    SaveResult,
    TransferResults,
)
from kvstore.layout import KvLayout

Job = LookupJob | LoadJob | SaveJob
Store = dict[bytes, list[Any]]


class FakeWorker(KvConnectorWorker):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.pending: list[Job] = []
        self.lost: list[Job] = []
        self._results: list[LookupResult | LoadResult | SaveResult] = []

    def register_pool(self, pool: Any, layout: KvLayout) -> None:
        self._pool = pool

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def start(self, work: ConnectorWork) -> None:
        self.pending += (*work.lookups, *work.loads, *work.saves)
        for key in work.deletes:
            self.store.pop(key, None)

    def lose(self, index: int) -> None:
        """One pending job does not report until `find`; it may move bytes until then."""
        self.lost.append(self.pending.pop(index))

    def find(self) -> None:
        """What was lost is pending again."""
        self.pending += self.lost
        self.lost.clear()

    def end_all(self) -> None:
        while self.pending:
            self.end(0, fails=False)

    def end(self, index: int, *, fails: bool) -> None:
        """Ends one pending job."""
        job = self.pending.pop(index)
        match job:
            case LookupJob(job_id, keys):
                found = next((i for i, key in enumerate(keys) if key not in self.store), len(keys))
                self._results.append(LookupResult(job_id, 0 if fails else found))
            case LoadJob():
                self._results.append(self._load(job, fails=fails))
            case SaveJob():
                self._results.append(self._save(job, fails=fails))

    def _load(self, job: LoadJob, *, fails: bool) -> LoadResult:
        limit = len(job.keys) // 2 if fails else len(job.keys)
        for index in range(limit):
            block = self.store.get(job.keys[index])
            if block is None:
                return LoadResult(job.job_id, index, "missing")
            self._pool[job.block_ids[index]][:] = block
        for block_id in job.block_ids[limit:]:
            self._pool[block_id][:] = [("garbage",)] * len(self._pool[block_id])
        return LoadResult(job.job_id, limit, "failed" if fails else "")

    def _save(self, job: SaveJob, *, fails: bool) -> SaveResult:
        if fails:
            return SaveResult(job.job_id, committed=False)
        for key, block_id in zip(job.keys, job.block_ids, strict=True):
            block = list(self._pool[block_id])
            if job.num_tail_tokens and key == job.keys[-1]:
                block[job.num_tail_tokens :] = [None] * (len(block) - job.num_tail_tokens)
            assert None not in block[: job.num_tail_tokens or len(block)]
            self.store.setdefault(key, block)
        return SaveResult(job.job_id, committed=True)

    def poll(self) -> TransferResults:
        results, self._results = self._results, []
        return TransferResults(
            tuple(r for r in results if isinstance(r, LookupResult)),
            tuple(r for r in results if isinstance(r, LoadResult)),
            tuple(r for r in results if isinstance(r, SaveResult)),
        )

    def close(self) -> None:
        self.pending.clear()
        self.lost.clear()
