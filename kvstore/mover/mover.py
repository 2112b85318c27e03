"""`StagedMover`: moves blocks between the pool and a backend.

What moves are objects (`kvstore.transfer_form`): where blocks go as they are, the blocks.

By way of staging segments: blocks are copied between the engine's pool and
preallocated segments by a `BlockCopier`, in an order that the engine's thread
gives; I/O threads move bytes between segments and the backend and never touch
the pool. So a backend that answers late can overwrite nothing.

A save: the engine's thread starts the copy of a piece of blocks into a
segment; an I/O thread waits for its end, seals each slot and puts it. A load:
an I/O thread reads into a segment and verifies each slot; the engine's thread
starts the copy of the verified ones into the pool, unless the load was
cancelled meanwhile; where that takes time, a thread waits for its end. Only
then is the piece over and its segment free.

In place, where the backend takes headers and blocks that lie apart and the
pool's blocks are the objects: I/O threads seal and put blocks where they lie,
and read them to where they shall be; no segment is needed, and nothing of the
engine's thread (docs/adr/0023-in-place.md).

A fetch that failed may leave something that still writes to its slots
(`InDoubtError`). Its piece then stays open, and with it the job, the pool's
blocks and the segment, until nothing writes there any more.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover.backend import Backend
from kvstore.mover.io_threads import IoThreads
from kvstore.mover.piece_io import PieceIo, run_part
from kvstore.mover.pieces import (
    CANCELLED,
    AheadPieces,
    JobHeld,
    JobState,
    Piece,
    PieceEnd,
    PieceRead,
    in_objects,
    take_results,
)
from kvstore.store import DEFAULT_TIMEOUT_S
from kvstore.transfer_form import WHOLE, HeadShare, PoolCut, TransferForm

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier, Copy
    from kvstore.mover.staging import StagingBuffers

__all__ = ["StagedMover"]

_NUM_IO_THREADS = 2
# One brings bytes while the other verifies what it brought. More would be in each other's way, and
# where a peer is silent take the threads from loads that others serve.
_CALLS_OF_JOB = 2
# Pieces that move in place: threads are to end together, and calls of a backend to be few.
_PIECES_OF_JOB = 4
_LEAST_PIECE_BYTES = 4 << 20
_MOST_PIECE_BYTES = 12 << 20

_logger = logging.getLogger("baton.kvstore")

_News = PieceRead | PieceEnd | JobHeld


def _copier_for(pool: Any, cut: PoolCut) -> "BlockCopier":
    from kvstore.mover.copies import make_copier

    return make_copier(pool, cut)


class StagedMover:
    """Pieces of jobs, and I/O threads. Methods are of the engine's thread.

    Args:
        backend: where blocks come from and go to.
        wake: called, from any thread, when `poll` has news.
        make_copier: what copies the objects of a pool that is cut so.
        num_threads: how many calls of the backend run at a time, two at most of a job.
        timeout_s: longest that a call should take. When all threads are in calls and none ends
            for some times that, jobs with blocks that no call is about fail, until a call ends.
    """

    def __init__(
        self,
        backend: Backend,
        wake: Callable[[], None],
        make_copier: "Callable[[Any, PoolCut], BlockCopier] | None" = None,
        num_threads: int = _NUM_IO_THREADS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._pieces = PieceIo(backend)
        self._wake = wake
        self._make_copier = make_copier or _copier_for
        self._io = IoThreads(num_threads, "baton-kv-io", timeout_s, wake, _CALLS_OF_JOB)
        # Copies that no call of the backend goes with get a thread of their own: they end in the
        # order in which they start.
        self._landings = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-landing")
        self._news: deque[_News] = deque()
        self._jobs: dict[int, JobState] = {}
        self._waiting: deque[JobState] = deque()  # jobs with blocks not in any piece yet
        self._ahead = AheadPieces()
        self._in_doubt: list[PieceEnd] = []  # pieces whose memory may still be written to
        self._doubted: list[int] = []  # jobs of these that `take_doubted` has not returned yet
        self._copier: BlockCopier | None = None
        self._staging: StagingBuffers
        self._cut: PoolCut

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Puts something between the mover and its backend. Before the first job."""
        self._pieces.backend = wrap(self._pieces.backend)

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """See `KvConnectorWorker.register_pool`."""
        from kvstore.mover.staging import StagingBuffers

        self._cut = PoolCut.of(layout, form, share)
        self._staging = StagingBuffers(self._cut.object_layout, device=pool.device)
        self._pool = pool
        self._copier = self._make_copier(pool, self._cut)
        self._pieces.rows = self._copier.rows

    @property
    def copier(self) -> "BlockCopier":
        """What copies blocks of the registered pool. Engine thread only."""
        assert self._copier is not None
        return self._copier

    @property
    def staging(self) -> "StagingBuffers":
        """The segments; whoever makes their memory known to others may look, and take none."""
        return self._staging

    @property
    def is_in_doubt(self) -> bool:
        """Whether something may still write to the segments or the pool."""
        return bool(self._in_doubt)

    @property
    def num_in_doubt(self) -> int:
        """Number of objects of failed loads whose blocks and segments are held."""
        return sum(len(end.piece.keys) for end in self._in_doubt)

    @property
    def memory(self) -> tuple[Any, "StagingBuffers"]:
        """All that is written to, for who has to keep it."""
        return self._pool, self._staging

    def start(
        self,
        loads: Sequence[LoadJob] = (),
        saves: Sequence[SaveJob] = (),
        cancelled_loads: Sequence[int] = (),
    ) -> None:
        """Starts jobs; returns without waiting for them."""
        jobs: tuple[LoadJob | SaveJob, ...] = (*loads, *saves)
        for job in in_objects(jobs, self._cut):
            self._jobs[job.job_id] = state = JobState(job, self._cut.objects_per_block)
            if isinstance(job, SaveJob) and job.num_found and not self._io.is_hanging:
                found = job.keys[: job.num_found]
                unasked = partial(self._tell, JobHeld(state, 0))
                self._io.submit(self._ask_held, state, found, instead=unasked)
            elif isinstance(job, SaveJob) and job.step:
                self._start_ahead(job.step, state)
            else:
                self._waiting.append(state)
        for job_id in cancelled_loads:
            if (cancelled := self._jobs.get(job_id)) is not None:
                cancelled.error = cancelled.error or CANCELLED
                self._wake()
        if self._io.is_hanging:
            self._wake()
        else:
            self._start_pieces()

    def layers_computed(self, step: int, num_layers: int) -> None:
        """See `KvConnectorWorker.layers_computed`."""
        if pieces := self._ahead.take(step, num_layers):
            self._submit_puts(pieces)

    def step_ended(self, step: int, *, computed: bool) -> None:
        """See `KvConnectorWorker.step_ended`."""
        pieces, jobs = self._ahead.end(step)
        if computed:
            self._submit_puts(pieces)
            self._waiting.extend(jobs)
            if not self._io.is_hanging:
                self._start_pieces()
            return
        for piece in pieces:
            self._tell(PieceEnd(piece, 0, "failed"))
        for job in jobs:
            job.error = "failed"
            self._wake()

    def poll(self) -> tuple[list[LoadResult], list[SaveResult]]:
        """What has ended since the last call."""
        self._end_doubts()
        while self._news:
            match self._news.popleft():
                case PieceRead() as read:
                    self._land(read)
                case PieceEnd() as end:
                    self._finish_piece(end)
                case JobHeld(job, num_blocks):
                    job.next_object = num_blocks
                    self._waiting.append(job)
        if self._io.is_hanging:
            self._give_up_waiting()
        self._start_pieces()
        return take_results(self._jobs)

    def take_doubted(self) -> list[int]:
        """Loads that are in doubt since the last call; see `TransferResults.doubted`."""
        doubted, self._doubted = self._doubted, []
        return doubted

    def close(self) -> bool:
        """Stops the threads; jobs under way are given up. Idempotent.

        Returns:
            Whether all calls of the backend have ended; one that hangs is not waited for.
        """
        has_ended = self._io.close()
        self._landings.shutdown(wait=True, cancel_futures=True)
        if self._copier is not None:
            self._copier.close()
        return has_ended

    # Engine thread.

    def _give_up_waiting(self) -> None:
        """Fails what no call has begun to move: calls hang, and nobody knows how long."""
        for job in self._jobs.values():
            if not job.is_started:
                job.error = "unavailable"
        if self._io.drop():
            self._wake()  # the last piece of a job may have been told just before

    def _start_pieces(self) -> None:
        """Starts what can be of the jobs that wait, oldest first."""
        while self._waiting:
            job = self._waiting[0]
            if job.is_started:
                self._waiting.popleft()
            elif self._pieces.moves_in_place(job):
                self._start_in_place(job)
            elif not self._start_staged(job):
                return

    def _start_in_place(self, job: JobState) -> None:
        pieces = [piece for _, piece in job.start_in_place(self._objects_in_place(job))]
        if isinstance(job.job, SaveJob):
            self._submit_puts(pieces)
            return
        for piece in pieces:
            self._submit(partial(self._pieces.read_in_place, job.job, piece), piece)

    def _start_ahead(self, step: int, job: JobState) -> None:
        """Has a save wait for its step: layer by layer, where layers can be moved from where they
        are computed.
        """
        if not self._pieces.moves_in_place(job):
            self._ahead.add_job(step, job)
            return
        num_layers = self._cut.object_layout.num_layers
        num_slices = self._cut.objects_per_block
        pieces = job.start_in_place(self._objects_in_place(job, num_slices), num_slices)
        self._ahead.add_pieces(step, [((n + 1) * num_layers, piece) for n, piece in pieces])

    def _objects_in_place(self, job: JobState, num_slices: int = 1) -> int:
        """Objects of a piece, of what is left of a job or of one slice of its blocks' layers."""
        object_bytes = self._cut.object_layout.block_bytes
        job_bytes = (len(job.job.keys) - job.next_object) * object_bytes // num_slices
        piece_bytes = max(_LEAST_PIECE_BYTES, min(job_bytes // _PIECES_OF_JOB, _MOST_PIECE_BYTES))
        return max(1, piece_bytes // object_bytes)

    def _submit_puts(self, pieces: Sequence[Piece]) -> None:
        """Has pieces saved from where they lie."""
        for piece in pieces:
            assert isinstance(piece.job.job, SaveJob)
            self._submit(partial(self._pieces.put, piece.job.job, piece), piece)
        if self._io.is_hanging:
            self._wake()

    def _start_staged(self, job: JobState) -> bool:
        """Gives a job a segment, or fails it; False while it has to wait for one.

        A job does not wait while all segments are in doubt, for that may take minutes.
        """
        segment = self._staging.take()
        if segment is None:
            num_held = sum(end.piece.segment is not None for end in self._in_doubt)
            if num_held < len(self._staging.segments):
                return False
            job.error = "unavailable"
            self._wake()
            return True
        piece = job.start_piece(segment)
        if isinstance(job.job, LoadJob):
            self._submit(partial(self._pieces.read, job.job, piece), piece)
        else:
            self._start_save(job.job, piece)
        return True

    def _start_save(self, job: SaveJob, piece: Piece) -> None:
        try:
            copy = self.copier.gather(piece.object_ids, piece.staged_in)
        except Exception:
            _logger.exception("KV blocks cannot be copied out of the pool")
            piece.job.error = "failed"
            self._tell(PieceEnd(piece, 0))
        else:
            self._submit(partial(self._pieces.put, job, piece, copy), piece, copy)

    def _submit(
        self,
        move: Callable[[], PieceRead | PieceEnd],
        piece: Piece,
        copy: "Copy | None" = None,
    ) -> None:
        """Has an I/O thread do its part of a piece, whose copy may be under way."""
        end = PieceEnd(piece, 0, "unavailable")
        instead = partial(self._finish_after, copy, end)
        self._io.submit(self._run, move, piece, instead=instead, group=piece.job)

    def _land(self, read: PieceRead) -> None:
        """Starts the copy of a load's good blocks into the pool, unless nobody wants them.

        A load that is cancelled later still lands: its blocks stay held until its result.
        """
        piece, num_good = read.piece, read.num_good
        if piece.job.error == CANCELLED or not num_good:
            self._finish_piece(PieceEnd(piece, 0, read.error))
            return
        try:
            object_ids = piece.object_ids[:num_good]
            copy = self.copier.scatter(piece.staged_in, object_ids)
        except Exception:
            _logger.exception("KV blocks cannot be copied into the pool")
            self._finish_piece(PieceEnd(piece, 0, "failed"))
            return
        self._finish_after(copy, PieceEnd(piece, num_good, read.error))

    def _finish_after(self, copy: "Copy | None", end: PieceEnd) -> None:
        """Ends a piece, after its copy: until then blocks and segment are the copy's."""
        if copy is None:
            self._finish_piece(end)
        else:
            self._landings.submit(self._run, partial(self._await, copy, end), end.piece)

    def _finish_piece(self, end: PieceEnd) -> None:
        segment = end.piece.segment
        if end.has_settled is not None and not end.has_settled():
            self._doubt(end)
            return
        if segment is not None:
            self._staging.give_back(segment)
        elif end.has_settled is not None:
            self._pieces.clear(end.piece)
        end.piece.job.end_piece(end)

    def _doubt(self, end: PieceEnd) -> None:
        """Leaves a piece open until nothing can write to its memory any more.

        Until then its job has no result, so that its blocks and its segment stay held.
        """
        job = end.piece.job
        if not job.is_in_doubt:
            job.is_in_doubt = True
            self._doubted.append(job.job.job_id)
            _logger.warning("KV blocks of a load stay held: something may still write to them")
        job.error = job.error or end.error
        self._in_doubt.append(end)

    def _end_doubts(self) -> None:
        doubts, self._in_doubt = self._in_doubt, []
        for end in doubts:
            self._finish_piece(end)

    # I/O threads.

    def _ask_held(self, job: JobState, keys: Sequence[bytes]) -> None:
        self._tell(JobHeld(job, self._pieces.num_held(keys)))

    def _run(self, move: Callable[[], PieceRead | PieceEnd], piece: Piece) -> None:
        news = run_part(move, piece)
        self._news.append(news)
        if piece.job.is_awaited(news):
            self._wake()

    def _tell(self, news: _News) -> None:
        """Leaves news for the engine's thread."""
        self._news.append(news)
        self._wake()

    def _await(self, copy: "Copy", end: PieceEnd) -> PieceEnd:
        copy.wait()
        return end
