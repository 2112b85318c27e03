"""The store connector's worker half: moves blocks between the pool and a `KvStore`.

Blocks are copied between the engine's pool and preallocated staging segments
by a `BlockCopier`, in an order that the engine's thread gives; I/O threads
move bytes between segments and the store and never touch the pool. So a store
that answers late can overwrite nothing.

A save: the engine's thread starts the copy of a piece of blocks into a
segment; an I/O thread waits for its end, seals each slot and puts it. A load:
an I/O thread reads into a segment and verifies each slot; the engine's thread
starts the copy of the verified ones into the pool, unless the load was
cancelled meanwhile; where that takes time, a thread waits for its end. Only
then is the piece over and its segment free.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
from kvstore.transfer_jobs import CANCELLED, JobState, Piece, PieceEnd, PieceRead

if TYPE_CHECKING:
    from kvstore.copier import BlockCopier, Copy
    from kvstore.staging import StagingBuffers

__all__ = ["StoreConnectorWorker"]

_NUM_IO_THREADS = 2
_MAX_LOOKUP_WAIT_S = 0.25

_logger = logging.getLogger("baton.kvstore")


def _copier_for(pool: Any, layout: KvLayout) -> "BlockCopier":
    from kvstore.copier import make_copier

    return make_copier(pool, layout)


class StoreConnectorWorker(KvConnectorWorker):
    """Staging segments and I/O threads between the pool and a store.

    Args:
        store: where blocks go; closed with the worker.
        make_copier: what copies the blocks of a pool of that layout.
    """

    def __init__(
        self,
        store: KvStore,
        make_copier: "Callable[[Any, KvLayout], BlockCopier]" = _copier_for,
    ) -> None:
        self._store = BreakerStore(store)
        self._make_copier = make_copier
        self._io = ThreadPoolExecutor(_NUM_IO_THREADS, thread_name_prefix="baton-kv-io")
        # Look-ups get a thread of their own: they must not queue behind bulk.
        self._lookups = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-lookup")
        # Copies into the pool get one as well: they end in the order in which they start.
        self._landings = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-landing")
        self._news: deque[LookupResult | PieceRead | PieceEnd] = deque()
        self._open_lookups: dict[int, LookupJob] = {}
        self._jobs: dict[int, JobState] = {}
        self._waiting: deque[JobState] = deque()  # jobs with blocks not in any piece yet
        self._wake: Callable[[], None] = lambda: None
        self._copier: BlockCopier | None = None
        self._staging: StagingBuffers

    def register_pool(self, pool: Any, layout: KvLayout) -> None:
        """See `KvConnectorWorker.register_pool`."""
        from kvstore.staging import StagingBuffers

        self._staging = StagingBuffers(layout, device=pool.device)
        self._copier = self._make_copier(pool, layout)

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
            self._jobs[job.job_id] = state = JobState(job)
            self._waiting.append(state)
        for job_id in work.cancelled_loads:
            if job_id in self._jobs:
                self._jobs[job_id].error = CANCELLED
                self._wake()
        self._start_pieces()

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        lookups: list[LookupResult] = []
        while self._news:
            news = self._news.popleft()
            if isinstance(news, LookupResult):
                lookups.append(news)
            elif isinstance(news, PieceRead):
                self._land(news)
            else:
                self._finish_piece(news)
        self._start_pieces()
        return self._collect(lookups)

    def close(self) -> None:
        """See `KvConnectorWorker.close`."""
        for executor in (self._io, self._landings, self._lookups):
            executor.shutdown(wait=True, cancel_futures=True)
        if self._copier is not None:
            self._copier.close()
        self._store.close()

    # Engine thread.

    def _start_pieces(self) -> None:
        """Gives free segments to the jobs that wait, oldest first."""
        while self._waiting:
            job = self._waiting[0]
            if job.is_started:
                self._waiting.popleft()
                continue
            segment = self._staging.take()
            if segment is None:
                return
            piece = job.start_piece(segment)
            if isinstance(job.job, LoadJob):
                self._io.submit(self._run, partial(self._read, piece), piece)
            else:
                self._start_save(piece)

    def _start_save(self, piece: Piece) -> None:
        assert self._copier is not None
        try:
            copy = self._copier.gather(piece.block_ids, piece.segment)
        except Exception:
            _logger.exception("KV blocks cannot be copied out of the pool")
            piece.job.error = "failed"
            self._tell(PieceEnd(piece, 0))
        else:
            self._io.submit(self._run, partial(self._put, piece, copy), piece)

    def _land(self, read: PieceRead) -> None:
        """Starts the copy of a load's good blocks into the pool, unless nobody wants them.

        A load that is cancelled later still lands: its blocks stay held until its result.
        """
        assert self._copier is not None
        piece, num_good = read.piece, read.num_good
        if piece.job.error == CANCELLED or not num_good:
            self._finish_piece(PieceEnd(piece, 0, read.error))
            return
        try:
            copy = self._copier.scatter(piece.segment, piece.block_ids[:num_good])
        except Exception:
            _logger.exception("KV blocks cannot be copied into the pool")
            self._finish_piece(PieceEnd(piece, 0, "failed"))
            return
        end = PieceEnd(piece, num_good, read.error)
        if copy is None:
            self._finish_piece(end)
        else:
            self._landings.submit(self._run, partial(self._await, copy, end), piece)

    def _finish_piece(self, end: PieceEnd) -> None:
        end.piece.job.end_piece(end)
        self._staging.give_back(end.piece.segment)

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
        self._tell(LookupResult(job_id, num_blocks))

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

    def _run(self, move: Callable[[], PieceRead | PieceEnd], piece: Piece) -> None:
        """Does a thread's part of a piece; whatever happens, something is told."""
        news: PieceRead | PieceEnd = PieceEnd(piece, 0, "failed")
        try:
            news = move()
        except StoreUnavailableError as cause:
            news = PieceEnd(piece, 0, "unavailable")
            _logger.warning("KV store: %s", cause)
        except Exception:
            _logger.exception("KV transfer failed")
        self._tell(news)

    def _tell(self, news: LookupResult | PieceRead | PieceEnd) -> None:
        """Leaves news for the engine's thread. Any thread may call it."""
        self._news.append(news)
        self._wake()

    def _put(self, piece: Piece, copy: "Copy | None") -> PieceEnd:
        if copy is not None:
            copy.wait()
        if piece.num_tail_tokens:
            piece.segment.clear_after(len(piece.keys) - 1, piece.num_tail_tokens)
        for slot, key in zip(piece.slots, piece.keys, strict=True):
            seal(slot, key)
        self._store.put_many(piece.keys, piece.slots)
        return PieceEnd(piece, len(piece.keys))

    def _read(self, piece: Piece) -> PieceRead:
        slots = piece.slots
        statuses = self._store.get_many_into(piece.keys, slots)
        for index, (status, slot, key) in enumerate(zip(statuses, slots, piece.keys, strict=True)):
            if status is GetStatus.MISSING:
                return PieceRead(piece, index, "missing")
            if status is not GetStatus.HIT or not verify(slot, key):
                self._store.delete([key])
                _logger.error("KV object %s is corrupt; deleted", key.hex())
                return PieceRead(piece, index, "corrupt")
        return PieceRead(piece, len(piece.keys))

    def _await(self, copy: "Copy", end: PieceEnd) -> PieceEnd:
        copy.wait()
        return end
