"""`JoinedResults`: what became of the jobs of a connector that several ranks move. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.jobs import LoadResult, LookupResult, SaveResult, TransferResults

__all__ = ["JoinedResults"]

_Result = LookupResult | LoadResult | SaveResult
_CANCELLED = "cancelled"


@dataclass(slots=True)
class _Job:
    """A job that several ranks move.

    Attributes:
        num_missing: number of ranks that have not reported their result.
        results: of the others.
        num_holders: number of ranks that lend their parts of its blocks.
        was_released: whether a rank lends its part no longer.
        is_doubted: whether the engine knows that something may still write to its blocks.
    """

    num_missing: int
    results: list[Any] = field(default_factory=list)
    num_holders: int = 0
    was_released: bool = False
    is_doubted: bool = False


class JoinedResults:
    """Joins the results of the ranks.

    A load has brought what all ranks have loaded, and is in doubt if that of a rank is. A save is
    committed if that of every rank is. Its blocks are held until all ranks that lend their parts
    have released them.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._ended: list[_Result] = []
        self._released: list[int] = []
        self._doubted: list[int] = []

    def expect(self, job_ids: Iterable[int], num_ranks: int) -> None:
        """Notes jobs that some ranks will report."""
        for job_id in job_ids:
            self._jobs[job_id] = _Job(num_ranks)

    def forget(self, job_ids: Iterable[int]) -> None:
        """Drops look-ups that were cancelled: what is reported of them is ignored."""
        for job_id in job_ids:
            self._jobs.pop(job_id, None)

    def add(self, results: TransferResults) -> None:
        """Adds what one rank reports."""
        every: tuple[_Result, ...] = (*results.lookups, *results.loads, *results.saves)
        for result in every:
            self._add_result(result)
        for job_id in results.released:
            self._release(job_id)
        for job_id in results.doubted:
            job = self._jobs[job_id]
            if not job.is_doubted:
                job.is_doubted = True
                self._doubted.append(job_id)

    def take(self) -> TransferResults:
        """Returns the results that all ranks have reported since the last call."""
        ended, self._ended = self._ended, []
        released, self._released = self._released, []
        doubted, self._doubted = self._doubted, []
        return TransferResults.of(ended, released, doubted)

    def _add_result(self, result: _Result) -> None:
        job = self._jobs.get(result.job_id)
        if job is None:
            return  # a look-up that was cancelled
        job.results.append(result)
        job.num_missing -= 1
        job.num_holders += isinstance(result, SaveResult) and result.is_held
        if not job.num_missing:
            self._ended.append(_joined(job))
            self._drop_settled(result.job_id)

    def _release(self, job_id: int) -> None:
        job = self._jobs[job_id]
        job.num_holders -= 1
        job.was_released = True
        if not job.num_missing and not job.num_holders:
            self._released.append(job_id)
        self._drop_settled(job_id)

    def _drop_settled(self, job_id: int) -> None:
        job = self._jobs[job_id]
        if not job.num_missing and not job.num_holders:
            del self._jobs[job_id]


def _joined(job: _Job) -> _Result:
    """Returns the result that holds for all ranks."""
    first = job.results[0]
    if isinstance(first, LookupResult):
        fewest: LookupResult = min(job.results, key=lambda result: result.num_blocks)
        return fewest
    seconds = max(result.seconds for result in job.results)
    if isinstance(first, LoadResult):
        least: LoadResult = min(job.results, key=lambda result: result.num_blocks)
        return replace(least, seconds=seconds)
    worst: SaveResult = min(job.results, key=lambda result: result.committed)
    if job.was_released:  # the lease has ended before all ranks had lent their parts
        worst = replace(worst, committed=False, error=worst.error or _CANCELLED)
    return replace(worst, is_held=job.num_holders > 0, seconds=seconds)
