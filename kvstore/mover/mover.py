"""`BlockMover`: moves blocks between the engine's KV pool and a backend.

A job is moved in pieces of several objects (`kvstore.transfer_form`). Pieces move in one of two
ways:

- In place (docs/adr/0023-in-place.md), if the pool's blocks are the objects and lie in host
  memory: I/O threads seal and put blocks where they lie in the pool, and fetch blocks to there.
- By way of staging segments otherwise: a `BlockCopier` copies blocks between the pool and
  preallocated segments, in the order in which the engine's thread starts the copies. I/O threads
  move bytes between segments and the backend. So a backend that answers late overwrites no block.

A staged save: the engine's thread starts the copy of a piece into a segment; an I/O thread waits
for the copy, seals the objects and puts them. A staged load: an I/O thread fetches objects into a
segment and verifies them; unless the load was cancelled meanwhile, the engine's thread starts the
copy of the verified ones into the pool, and another thread waits for the copy. Then the piece has
ended and its segment is free.

A fetch that failed may leave something that still writes to memory (`InDoubtError`). Its piece
then stays open, and with it the job, the pool's blocks and the segment, until nothing can.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.guard.metrics import TransferMetrics
from kvstore.jobs import LoadJob, LoadResult, SaveJob, SaveResult
from kvstore.layout import KvLayout
from kvstore.mover.backend import Backend
from kvstore.mover.piece_io import PieceIo
from kvstore.mover.pieces import (
    CANCELLED,
    DoubtfulPieces,
    JobState,
    Piece,
    take_results,
)
from kvstore.store import DEFAULT_TIMEOUT_S
from kvstore.transfer_form import WHOLE, BlockSlicing, PoolShare, TransferForm

if TYPE_CHECKING:
    from kvstore.mover.copies import BlockCopier
    from kvstore.mover.staging import StagingBuffers

__all__ = ["BlockMover", "copier_for"]

_NUM_IO_THREADS = 2
# In place: enough pieces for the threads to end together, and large ones to keep calls few.
_PIECES_OF_JOB = 4
_MIN_PIECE_BYTES = 4 << 20
_MAX_PIECE_BYTES = 12 << 20

_logger = logging.getLogger("baton.kvstore")


def copier_for(pool: Any, slicing: BlockSlicing) -> "BlockCopier":
    """Makes a copier for a pool: by its device, and by whether its blocks are the objects."""
    from kvstore.mover.copies import ConvertingCopier, HostCopier  # they import torch
    from kvstore.mover.pool_objects import as_objects

    if pool.device.type == "cuda":
        from kvstore.mover.side_streams import SideStreamCopier

        return SideStreamCopier(pool, slicing)
    if slicing.is_native:
        return HostCopier(as_objects(pool, slicing))
    return ConvertingCopier(pool, slicing)


class BlockMover:
    """Moves the blocks of jobs. The engine's thread calls all methods.

    Args:
        backend: stores and fetches objects.
        wake: called from any thread when `poll` has something to do or to return.
        make_copier: makes what copies objects between the pool and segments.
        num_threads: how many calls of the backend run at a time; at most two are for one job.
        timeout_s: longest time of a call. If all threads are in calls and none ends for several
            times that, jobs that have blocks in no call fail, until a call ends.
        on_hang: called, and logs it, when that begins; None lets the threads log it.
    """

    def __init__(
        self,
        backend: Backend,
        wake: Callable[[], None],
        make_copier: "Callable[[Any, BlockSlicing], BlockCopier] | None" = None,
        num_threads: int = _NUM_IO_THREADS,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        self._io = PieceIo(backend, wake, num_threads, timeout_s, on_hang)
        self._wake = wake
        self._make_copier = make_copier or copier_for
        self._jobs: dict[int, JobState] = {}
        self._waiting: deque[JobState] = deque()  # jobs with objects that are in no piece yet
        # Saves ahead, by the step that computes their blocks.
        self._ahead: defaultdict[int, list[JobState]] = defaultdict(list)
        self._doubtful = DoubtfulPieces()
        self._copier: BlockCopier | None = None
        self._staging: StagingBuffers
        self._slicing: BlockSlicing

    def wrap_backend(self, wrap: Callable[[Backend], Backend]) -> None:
        """Replaces the backend by a wrapper of it. Called before the first job."""
        self._io.backend = wrap(self._io.backend)

    def measure(self, metrics: TransferMetrics) -> None:
        """Counts the backend's calls. Called before the first job."""
        self._io.metrics = metrics

    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        """Receives the pool; see `KvConnectorWorker.register_pool`."""
        from kvstore.mover.staging import StagingBuffers

        self._slicing = BlockSlicing.of(layout, form, share)
        self._staging = StagingBuffers(self._slicing.object_layout, device=pool.device)
        self._pool = pool
        self._copier = self._make_copier(pool, self._slicing)
        self._io.rows = self._copier.rows

    @property
    def copier(self) -> "BlockCopier":
        """Copies objects of the registered pool. Engine thread only."""
        assert self._copier is not None
        return self._copier

    @property
    def staging(self) -> "StagingBuffers":
        """The segments, for connectors that register their memory. Only the mover takes any."""
        return self._staging

    @property
    def is_in_doubt(self) -> bool:
        """Whether something may still write to the segments or the pool."""
        return bool(self._doubtful)

    @property
    def num_in_doubt(self) -> int:
        """Number of objects of failed loads whose blocks and segments are held."""
        return self._doubtful.num_objects

    @property
    def memory(self) -> tuple[Any, "StagingBuffers"]:
        """The pool and the segments, for a caller that must keep their memory allocated."""
        return self._pool, self._staging

    def start(
        self,
        loads: Sequence[LoadJob] = (),
        saves: Sequence[SaveJob] = (),
        cancelled_loads: Sequence[int] = (),
    ) -> None:
        """Starts jobs and cancels others; returns without waiting for them."""
        jobs: tuple[LoadJob | SaveJob, ...] = (*loads, *saves)
        for job in jobs:
            self._start_job(JobState.start(job, self._slicing))
        for job_id in cancelled_loads:
            if (cancelled := self._jobs.get(job_id)) is not None:
                cancelled.error = cancelled.error or CANCELLED
                self._wake()
        if self._io.is_hanging:
            self._wake()
        else:
            self._start_pieces()

    def layers_computed(self, step: int, num_layers: int) -> None:
        """Saves what a step has computed; see `KvConnectorWorker.layers_computed`."""
        for job in self._ahead.get(step, ()):
            self._submit_puts(job.take_ahead(num_layers))

    def step_ended(self, step: int, *, computed: bool) -> None:
        """Saves the rest of a step, or fails it; see `KvConnectorWorker.step_ended`."""
        for job in self._ahead.pop(step, ()):
            pieces = job.take_ahead()
            if computed:
                self._submit_puts(pieces)
                self._waiting.append(job)
                continue
            job.error = job.error or "failed"
            self._io.reports.extend(pieces)
            self._wake()
        if not self._io.is_hanging:
            self._start_pieces()

    def poll(self) -> tuple[list[LoadResult], list[SaveResult]]:
        """Continues jobs under way; returns the results of those that ended since the last call."""
        for piece in self._doubtful.take_ends():
            self._finish_piece(piece)
        while self._io.reports:
            match self._io.reports.popleft():
                case Piece() as piece if piece.must_land:
                    self._land(piece)
                case Piece() as piece:
                    self._finish_piece(piece)
                case job, num_held:
                    job.next_object = num_held
                    self._waiting.append(job)
        if self._io.is_hanging:
            self._fail_waiting()
        self._start_pieces()
        return take_results(self._jobs)

    def take_doubted(self) -> list[int]:
        """Returns loads that came into doubt since the last call; see `TransferResults.doubted`."""
        return self._doubtful.take_new_jobs()

    def close(self) -> bool:
        """Stops the threads and abandons jobs under way. Idempotent.

        Returns:
            Whether all calls of the backend have ended; it does not wait for one that hangs.
        """
        has_ended = self._io.close()
        if self._copier is not None:
            self._copier.close()
        return has_ended

    # Engine thread.

    def _start_job(self, job: JobState) -> None:
        """Starts a job, or lets it wait: for a look-up, for its step, or for its turn."""
        wanted = job.job
        self._jobs[wanted.job_id] = job
        if isinstance(wanted, SaveJob) and wanted.num_found and not self._io.is_hanging:
            self._io.submit_num_held(job, wanted.keys[: wanted.num_found])
        elif isinstance(wanted, SaveJob) and wanted.step:
            self._start_ahead(wanted.step, job)
        else:
            self._waiting.append(job)

    def _fail_waiting(self) -> None:
        """Fails jobs whose objects are not all in calls, while calls hang for an unknown time."""
        for job in self._jobs.values():
            if not job.is_started:
                job.error = "unavailable"
        self._io.drop()

    def _start_pieces(self) -> None:
        """Starts pieces of the waiting jobs, oldest first, as far as segments are free."""
        while self._waiting:
            job = self._waiting[0]
            if job.is_started:
                self._waiting.popleft()
            elif self._io.moves_in_place(job):
                self._start_in_place(job)
            elif not self._start_staged(job):
                return

    def _start_in_place(self, job: JobState) -> None:
        pieces = [piece for _, piece in job.start_in_place(self._objects_in_place(job))]
        if isinstance(job.job, SaveJob):
            self._submit_puts(pieces)
            return
        for piece in pieces:
            self._io.submit_read(piece)

    def _start_ahead(self, step: int, job: JobState) -> None:
        """Lets a save wait for its step: layer by layer if it moves in place, else as a whole."""
        self._ahead[step].append(job)
        if self._io.moves_in_place(job):
            num_layers = self._slicing.object_layout.max_layers
            num_slices = self._slicing.objects_per_block
            pieces = job.start_in_place(self._objects_in_place(job, num_slices), num_slices)
            job.ahead = [((number + 1) * num_layers, piece) for number, piece in pieces]

    def _objects_in_place(self, job: JobState, num_slices: int = 1) -> int:
        """Returns the objects per piece of the rest of a job, or of one layer slice of it."""
        object_bytes = self._slicing.object_layout.block_bytes
        job_bytes = (len(job.job.keys) - job.next_object) * object_bytes // num_slices
        piece_bytes = max(_MIN_PIECE_BYTES, min(job_bytes // _PIECES_OF_JOB, _MAX_PIECE_BYTES))
        return max(1, piece_bytes // object_bytes)

    def _submit_puts(self, pieces: Sequence[Piece]) -> None:
        """Starts puts of pieces in place."""
        for piece in pieces:
            self._io.submit_put(piece)
        if self._io.is_hanging:
            self._wake()

    def _start_staged(self, job: JobState) -> bool:
        """Starts a piece in a segment, or fails the job; False if it has to wait for a segment.

        A job does not wait while all segments are in doubt, because that may take minutes.
        """
        segment = self._staging.take()
        if segment is None:
            if self._doubtful.num_segments < len(self._staging.segments):
                return False
            job.error = "unavailable"
            self._wake()
            return True
        piece = job.start_piece(segment)
        if isinstance(job.job, LoadJob):
            self._io.submit_read(piece)
        else:
            self._start_staged_save(piece)
        return True

    def _start_staged_save(self, piece: Piece) -> None:
        try:
            copy = self.copier.gather(piece.object_ids, piece.staged_in)
        except Exception:
            _logger.exception("KV blocks cannot be copied out of the pool")
            piece.job.error = "failed"
            self._io.report(piece)
        else:
            self._io.submit_put(piece, copy)

    def _land(self, piece: Piece) -> None:
        """Starts the copy of a load's good objects into the pool, unless it was cancelled.

        A load that is cancelled later is copied nevertheless: its blocks are held until its result.
        """
        if piece.job.error == CANCELLED:
            piece.num_good = 0
            self._finish_piece(piece)
            return
        try:
            copy = self.copier.scatter(piece.staged_in, piece.object_ids[: piece.num_good])
        except Exception:
            _logger.exception("KV blocks cannot be copied into the pool")
            self._finish_piece(piece.fail("failed"))
            return
        piece.has_landed = True
        if copy is None:
            self._finish_piece(piece)
        else:
            self._io.report_after(copy, piece)

    def _finish_piece(self, piece: Piece) -> None:
        if piece.has_settled is not None and not piece.has_settled():
            if self._doubtful.add(piece):
                _logger.warning("KV blocks of a load stay held: something may still write to them")
            return
        if piece.segment is not None:
            self._staging.give_back(piece.segment)
        elif piece.has_settled is not None:
            self._io.clear(piece)
        piece.job.end_piece(piece)
