"""`null_connector`: the connector of an engine that has none. Pure."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from kvstore.connector import Connector, KvConnectorScheduler, KvConnectorWorker
from kvstore.jobs import ConnectorWork, LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = ["null_connector"]


def null_connector() -> Connector:
    """Returns the connector of an engine that has none: it saves nothing and finds nothing.

    Look-ups find 0 blocks, loads bring none, and saves are not committed.
    """
    return KvConnectorScheduler("", lease_s=0, finds_by_key=False), _NullWorker()


_NO_RESULTS = TransferResults()


class _NullWorker(KvConnectorWorker):
    """Ends every job at the next poll, and moves nothing."""

    def __init__(self) -> None:
        self._results = _NO_RESULTS
        self._wake: Callable[[], None] = lambda: None

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        pass

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @override
    def start(self, work: ConnectorWork) -> None:
        before = self._results
        lookups = (LookupResult(job.job_id, 0) for job in work.lookups)
        loads = (LoadResult(job.job_id, 0, "missing") for job in work.loads)
        saves = (SaveResult(job.job_id, committed=False) for job in work.saves)
        self._results = TransferResults(
            (*before.lookups, *lookups), (*before.loads, *loads), (*before.saves, *saves)
        )
        if self._results:
            self._wake()

    @override
    def poll(self) -> TransferResults:
        results, self._results = self._results, _NO_RESULTS
        return results

    @override
    def close(self) -> None:
        pass
