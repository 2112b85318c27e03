"""The store connector's worker half: moves blocks between the pool and a `KvStore`.

Blocks are copied between the engine's pool and preallocated staging segments
in the engine's thread; I/O threads move bytes between segments and the store
and never touch the pool. So a store that answers late can overwrite nothing.

A save: the engine's thread gathers a piece of blocks into a segment; an I/O
thread seals each slot and puts it. A load: an I/O thread reads into a segment
and verifies each slot; the engine's thread scatters the verified ones into
the pool.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.breaker import BreakerStore
from kvstore.codec import seal, verify
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
from kvstore.store import GetStatus, KvStore, StoreUnavailableError

if TYPE_CHECKING:
    from kvstore.staging import Segment, StagingBuffers

__all__ = ["StoreConnectorWorker"]

_NUM_IO_THREADS = 2
_MAX_LOOKUP_WAIT_S = 0.25

_logger = logging.getLogger("baton.kvstore")


@dataclass(slots=True, eq=False)
class _Job:
    """A load or save under way; moved in pieces of one segment each.

    Attributes:
        next_block: blocks before it have been given to pieces.
        num_open: pieces that have not ended.
        good_blocks: indices of blocks that were put, or verified and scattered.
        error: why it will not be whole; no further pieces are started then.
    """

    job: LoadJob | SaveJob
    next_block: int = 0
    num_open: int = 0
    good_blocks: set[int] = field(default_factory=set)
    error: str = ""

    @property
    def is_over(self) -> bool:
        all_started = self.next_block >= len(self.job.keys) or self.error != ""
        return all_started and self.num_open == 0

    @property
    def num_good_prefix(self) -> int:
        """Leading good blocks: pieces end in any order, only an unbroken prefix counts."""
        count = 0
        while count in self.good_blocks:
            count += 1
        return count


@dataclass(frozen=True, slots=True)
class _Piece:
    """The blocks `[first, first + len(keys))` of a job, in one segment."""

    job: _Job
    first: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    segment: "Segment"


@dataclass(frozen=True, slots=True)
class _PieceEnd:
    """What an I/O thread says of a piece: its good leading blocks, and why not all."""

    piece: _Piece
    num_good: int
    error: str


class StoreConnectorWorker(KvConnectorWorker):
    """Staging segments and I/O threads between the pool and a store.

    Args:
        store: where blocks go; closed with the worker.
    """

    def __init__(self, store: KvStore) -> None:
        self._store = BreakerStore(store)
        self._io = ThreadPoolExecutor(_NUM_IO_THREADS, thread_name_prefix="baton-kv-io")
        # Look-ups get a thread of their own: they must not queue behind bulk.
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-lookup")
        self._ends: deque[LookupResult | _PieceEnd] = deque()
        self._open_lookups: dict[int, LookupJob] = {}
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[_Job] = deque()  # jobs with blocks not in any piece yet
        self._wake: Callable[[], None] = lambda: None
        self._pool: Any = None
        self._staging: StagingBuffers

    def register_pool(self, pool: Any, layout: KvLayout) -> None:
        """See `KvConnectorWorker.register_pool`."""
        from kvstore.staging import StagingBuffers

        self._pool = pool
        self._staging = StagingBuffers(layout, device=pool.device)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See `KvConnectorWorker.set_waker`."""
        self._wake = wake

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`."""
        for lookup in work.lookups:
            self._open_lookups[lookup.job_id] = lookup
            self._lookups.submit(self._look_up, lookup.job_id, time.monotonic())
        for job_id in work.cancelled_lookups:
            self._open_lookups.pop(job_id, None)
        if work.deletes:
            self._lookups.submit(self._delete, work.deletes)
        jobs: tuple[LoadJob | SaveJob, ...] = (*work.loads, *work.saves)
        for job in jobs:
            self._jobs[job.job_id] = state = _Job(job)
            self._waiting.append(state)
        for job_id in work.cancelled_loads:
            if job_id in self._jobs:
                self._jobs[job_id].error = "cancelled"
                self._wake()
        self._start_pieces()

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        lookups: list[LookupResult] = []
        while self._ends:
            end = self._ends.popleft()
            if isinstance(end, LookupResult):
                lookups.append(end)
            else:
                self._finish_piece(end)
        self._start_pieces()
        return self._collect(lookups)

    def close(self) -> None:
        """See `KvConnectorWorker.close`."""
        for executor in (self._io, self._lookups):
            executor.shutdown(wait=True, cancel_futures=True)
        self._store.close()

    # Engine thread.

    def _start_pieces(self) -> None:
        """Gives free segments to the jobs that wait, oldest first."""
        while self._waiting:
            job = self._waiting[0]
            if job.error or job.next_block >= len(job.job.keys):
                self._waiting.popleft()
                continue
            segment = self._staging.take()
            if segment is None:
                return
            self._start_piece(job, segment)

    def _start_piece(self, job: _Job, segment: "Segment") -> None:
        first, end = job.next_block, job.next_block + segment.num_slots
        keys, block_ids = job.job.keys[first:end], job.job.block_ids[first:end]
        piece = _Piece(job, first, keys, block_ids, segment)
        job.next_block += len(keys)
        job.num_open += 1
        if isinstance(job.job, LoadJob):
            self._io.submit(self._run, self._load_piece, piece)
            return
        segment.gather(self._pool, block_ids)
        if job.job.num_tail_tokens and job.next_block == len(job.job.keys):
            segment.clear_after(len(keys) - 1, job.job.num_tail_tokens)
        self._io.submit(self._run, self._save_piece, piece)

    def _finish_piece(self, end: _PieceEnd) -> None:
        """Scatters what a load brought, unless nobody wants it, and frees the segment."""
        piece, job = end.piece, end.piece.job
        if isinstance(job.job, LoadJob) and job.error != "cancelled" and end.num_good:
            piece.segment.scatter(self._pool, piece.block_ids[: end.num_good])
        job.good_blocks.update(range(piece.first, piece.first + end.num_good))
        job.error = job.error or end.error
        job.num_open -= 1
        self._staging.give_back(piece.segment)

    def _collect(self, lookups: list[LookupResult]) -> TransferResults:
        over = [job for job in self._jobs.values() if job.is_over]
        for job in over:
            del self._jobs[job.job.job_id]
        loads = (job for job in over if isinstance(job.job, LoadJob))
        saves = (job for job in over if isinstance(job.job, SaveJob))
        return TransferResults(
            tuple(lookups),
            tuple(LoadResult(job.job.job_id, job.num_good_prefix, job.error) for job in loads),
            tuple(SaveResult(job.job.job_id, committed=not job.error) for job in saves),
        )

    # I/O threads.

    def _look_up(self, job_id: int, submitted_at: float) -> None:
        """Answers a look-up that is still wanted. One that waited long finds nothing:
        behind a slow store, computing is better than queueing.
        """
        job = self._open_lookups.pop(job_id, None)
        if job is None:
            return
        num_blocks = 0
        if time.monotonic() - submitted_at < _MAX_LOOKUP_WAIT_S:
            num_blocks = self._try("look-up", lambda: self._store.contains_prefix(job.keys)) or 0
        self._ends.append(LookupResult(job_id, num_blocks))
        self._wake()

    def _delete(self, keys: tuple[bytes, ...]) -> None:
        """What cannot be deleted stays until its TTL."""
        self._try("delete", lambda: self._store.delete(keys))

    def _try(self, name: str, call: Callable[[], int]) -> int | None:
        try:
            return call()
        except StoreUnavailableError as error:
            _logger.warning("KV store: %s failed: %s", name, error)
        except Exception:
            _logger.exception("KV store: %s failed", name)
        return None

    def _run(self, move: Callable[[_Piece], tuple[int, str]], piece: _Piece) -> None:
        """Runs a piece; whatever happens, its end is told."""
        num_good, error = 0, "failed"
        try:
            num_good, error = move(piece)
        except StoreUnavailableError as cause:
            error = "unavailable"
            _logger.warning("KV store: %s", cause)
        except Exception:
            _logger.exception("KV transfer failed")
        self._ends.append(_PieceEnd(piece, num_good, error))
        self._wake()

    def _save_piece(self, piece: _Piece) -> tuple[int, str]:
        slots = piece.segment.slots[: len(piece.keys)]
        for slot, key in zip(slots, piece.keys, strict=True):
            seal(slot, key)
        self._store.put_many(piece.keys, slots)
        return len(piece.keys), ""

    def _load_piece(self, piece: _Piece) -> tuple[int, str]:
        slots = piece.segment.slots[: len(piece.keys)]
        statuses = self._store.get_many_into(piece.keys, slots)
        for index, (status, slot, key) in enumerate(zip(statuses, slots, piece.keys, strict=True)):
            if status is GetStatus.MISSING:
                return index, "missing"
            if status is not GetStatus.HIT or not verify(slot, key):
                self._store.delete([key])
                _logger.error("KV object %s is corrupt; deleted", key.hex())
                return index, "corrupt"
        return len(piece.keys), ""
