"""`PieceIo`: the I/O threads of a `BlockMover`, and what they do with the pieces of its jobs.

The threads access only those blocks of the pool whose pieces move in place. That is safe: the
blocks are held until the job has its result, and the result comes after the job's last call, also
if the request has ended. A save reads blocks that are computed and full and shared with the job,
so nothing writes to them. A load writes to blocks that are in no cache, so nothing else uses them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from kvstore.codec import HEADER_BYTES, other_format, seal, verify
from kvstore.guard.breaker import log_level_of
from kvstore.guard.metrics import Direction, TransferMetrics
from kvstore.jobs import CORRUPT, MISSING, LoadJob, SaveJob
from kvstore.mover.backend import Backend, InDoubtError
from kvstore.mover.io_threads import IoThreads, patience_s
from kvstore.mover.pieces import JobState, Piece
from kvstore.store import GetStatus, KvObject, StoreUnavailableError
from kvstore.transfer_form import RangeError

if TYPE_CHECKING:
    from kvstore.mover.copies import Copy

__all__ = ["PieceIo"]

# One I/O thread of a job fetches while another verifies. More would let a silent peer block the
# loads that other peers serve.
_CALLS_OF_JOB = 2

_logger = logging.getLogger("baton.kvstore")


class PieceIo:
    """Moves pieces between their segment, or the pool itself, and a backend.

    The engine's thread submits pieces; `put`, `read` and `read_in_place` are the threads' parts.

    Args:
        backend: stores and fetches objects.
        wake: called from any thread when there are reports that the engine's thread must react to.
        num_threads: how many calls of the backend run at a time; at most two are for one job.
        timeout_s: longest time of a call.
        on_hang: called, and logs it, when calls hang in all threads; None lets the threads log it.

    Attributes:
        backend: see above.
        rows: returns where objects lie in the pool; see `BlockCopier.rows`.
        metrics: counts the backend's calls; None if they are not measured.
        reports: what threads have done, in order: pieces that they have moved, and saves, each with
            how many of its leading objects the backend has.
    """

    def __init__(
        self,
        backend: Backend,
        wake: Callable[[], None],
        num_threads: int,
        timeout_s: float,
        on_hang: Callable[[], None] | None = None,
    ) -> None:
        self.backend = backend
        self.reports: deque[Piece | tuple[JobState, int]] = deque()
        self._wake = wake
        self._on_hang = on_hang or (lambda: None)
        self._threads = IoThreads(
            num_threads,
            "baton-kv-io",
            patience_s(timeout_s),
            self._hang,
            _CALLS_OF_JOB,
            logging.WARNING if on_hang is None else logging.DEBUG,
        )
        # Waits for copies that no call of the backend follows. They end in their order of start,
        # so one thread suffices.
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-landing")
        self.rows: Callable[[Sequence[int]], list[memoryview] | None] = lambda object_ids: None
        self.metrics: TransferMetrics | None = None

    def moves_in_place(self, job: JobState) -> bool:
        """Whether a job's pieces need no segment.

        A partial tail needs one: the slots behind its tokens must be cleared before they leave the
        process, but not in the pool, where a sequence may still use them.
        """
        return self.rows(()) is not None and not job.num_tail_tokens

    @property
    def is_hanging(self) -> bool:
        """Whether calls hang in all I/O threads."""
        return self._threads.is_hanging

    def submit_num_held(self, job: JobState, keys: Sequence[bytes]) -> None:
        """Asks the backend how many objects of a save it has, and reports the answer."""
        not_asked = partial(self.report, (job, 0))
        self._threads.submit(self._ask_held, job, keys, instead=not_asked)

    def submit_put(self, piece: Piece, copy: "Copy | None" = None) -> None:
        """Puts a piece of a save, whose copy into its segment may still be under way."""
        job = piece.job.job
        assert isinstance(job, SaveJob)
        self._submit(partial(self.put, job, piece, copy), piece, copy)

    def submit_read(self, piece: Piece) -> None:
        """Fetches a piece of a load, into its segment if it has one."""
        job = piece.job.job
        assert isinstance(job, LoadJob)
        read = self.read_in_place if piece.segment is None else self.read
        self._submit(partial(read, job, piece), piece)

    def report_after(self, copy: "Copy", piece: Piece) -> None:
        """Reports a piece after its copy, which uses blocks and segment until then."""
        self._copies.submit(self._run, copy.wait, piece)

    def report(self, report: Piece | tuple[JobState, int]) -> None:
        """Adds a report that the engine's thread must react to. Any thread."""
        self.reports.append(report)
        self._wake()

    def drop(self) -> None:
        """Drops what no thread has begun: its pieces end as unavailable."""
        self._threads.drop()

    def close(self) -> bool:
        """Stops the threads. Idempotent.

        Returns:
            Whether all calls of the backend have ended; it does not wait for one that hangs.
        """
        has_ended = self._threads.close()
        self._copies.shutdown(wait=True, cancel_futures=True)
        return has_ended

    def _submit(self, move: Callable[[], object], piece: Piece, copy: "Copy | None" = None) -> None:
        instead = partial(self._drop, piece, copy)
        self._threads.submit(self._run, move, piece, instead=instead, group=piece.job)

    def _drop(self, piece: Piece, copy: "Copy | None") -> None:
        piece.fail("unavailable")
        if copy is None:
            self.report(piece)
        else:
            self.report_after(copy, piece)

    def _hang(self) -> None:
        self._on_hang()
        self._wake()

    # The threads' parts.

    def _ask_held(self, job: JobState, keys: Sequence[bytes]) -> None:
        self.report((job, self.num_held(keys)))

    def _run(self, move: Callable[[], object], piece: Piece) -> None:
        """Runs a thread's part of a piece, notes how that ended, and reports the piece."""
        began_at = time.monotonic()
        try:
            move()
        except StoreUnavailableError as cause:
            piece.fail("unavailable")
            piece.has_settled = cause.has_settled if isinstance(cause, InDoubtError) else None
            _logger.log(log_level_of(cause), "KV transfer: %s", cause)
        except RangeError as cause:
            piece.fail("failed")
            _logger.warning("KV transfer: %s", cause)
        except Exception:
            piece.fail("failed")
            _logger.exception("KV transfer failed")
        piece.moved_at = time.monotonic()
        piece.seconds = piece.moved_at - began_at
        self.reports.append(piece)
        if piece.is_awaited:
            self._wake()

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading objects the backend has; 0 if it does not answer."""
        try:
            num_held = self.backend.num_held(keys)
        except StoreUnavailableError:
            return 0  # the put that follows fails and is logged
        except Exception:
            _logger.exception("KV look-up failed")
            return 0
        if self.metrics is not None:
            self.metrics.skipped(num_held)
        return num_held

    def put(self, job: SaveJob, piece: Piece, copy: "Copy | None" = None) -> Piece:
        """Seals a piece and puts it, after its copy into a segment if there is one; returns it.

        Raises:
            RangeError: the objects' type cannot hold the pool's numbers.
            RuntimeError: the device failed.
            StoreUnavailableError: not all objects were put.
        """
        if copy is not None:
            copy.wait()
        if piece.job.error:  # another piece failed, so the save cannot be committed
            return piece
        for tail in piece.tail_slots:
            piece.staged_in.clear_after(tail, piece.job.num_tail_tokens, piece.job.tail_group)
        in_place = piece.segment is None
        objects = self._objects_in_pool(piece) if in_place else piece.staged_objects
        seal(objects, piece.keys)
        self._put(job, piece.keys, objects)
        piece.num_good = len(piece.keys)
        return piece

    def read(self, job: LoadJob, piece: Piece) -> Piece:
        """Fetches a piece into its segment and verifies it; returns it.

        Raises:
            InDoubtError: the fetch failed, and something may still write to the segment.
            StoreUnavailableError: the fetch failed.
        """
        if piece.job.error:  # the load was cancelled, or another piece failed
            return piece
        objects = piece.staged_objects
        statuses = self._fetch(job, piece.keys, objects)
        piece.num_good, piece.error = self._check(piece, objects, statuses)
        return piece

    def read_in_place(self, job: LoadJob, piece: Piece) -> Piece:
        """Fetches a piece into the pool and verifies it there; returns it. Blocks that failed are
        zeroed.

        Raises:
            InDoubtError: the fetch failed, and something may still write to the pool.
            StoreUnavailableError: the fetch failed.
        """
        if piece.job.error:
            return piece
        objects = self._objects_in_pool(piece)
        try:
            statuses = self._fetch(job, piece.keys, objects)
            piece.num_good, piece.error = self._check(piece, objects, statuses)
        finally:
            _clear(objects[piece.num_good :])
        return piece

    def clear(self, piece: Piece) -> None:
        """Zeroes a piece's blocks in the pool, after something may have written there."""
        _clear(self._objects_in_pool(piece))

    def _objects_in_pool(self, piece: Piece) -> list[KvObject]:
        rows = self.rows(piece.object_ids)
        assert rows is not None
        headers = memoryview(bytearray(HEADER_BYTES * len(rows)))
        starts = range(0, len(headers), HEADER_BYTES)
        return [
            KvObject(headers[start : start + HEADER_BYTES], row)
            for start, row in zip(starts, rows, strict=True)
        ]

    def _put(self, job: SaveJob, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        num_put, began_at = 0, time.perf_counter()
        try:
            self.backend.put(job, keys, objects)
            num_put = len(keys)
        finally:  # a call that timed out is counted, too
            if self.metrics is not None:
                _count_call(self.metrics, "save", began_at, objects[:num_put])

    def _fetch(
        self, job: LoadJob, keys: Sequence[bytes], objects: Sequence[KvObject]
    ) -> Sequence[GetStatus]:
        statuses: Sequence[GetStatus] = ()
        began_at = time.perf_counter()
        try:
            statuses = self.backend.fetch(job, keys, objects)
        finally:
            if self.metrics is not None:
                pairs = zip(statuses, objects, strict=False)
                hits = [found for status, found in pairs if status is GetStatus.HIT]
                _count_call(self.metrics, "load", began_at, hits)
        return statuses

    def _check(
        self, piece: Piece, objects: Sequence[KvObject], statuses: Sequence[GetStatus]
    ) -> tuple[int, str]:
        """Verifies fetched objects; returns how many leading ones are good, and why not all."""
        # A third party's backend may return a wrong number of statuses: lacking ones are MISSING.
        num_objects = len(piece.keys)
        padded = [*statuses, *[GetStatus.MISSING] * num_objects][:num_objects]
        are_hits = (status is GetStatus.HIT for status in padded)
        num_hits = next((index for index, hit in enumerate(are_hits) if not hit), num_objects)
        num_good = verify(objects[:num_hits], piece.keys[:num_hits])
        if num_good == num_objects:
            return num_good, ""
        if padded[num_good] is GetStatus.MISSING:
            return num_good, MISSING
        key = piece.keys[num_good]
        reason = other_format(objects[num_good].header)
        error = f"{CORRUPT}: {reason}" if reason else CORRUPT
        _logger.error("KV object %s is %s", key.hex(), error)
        self._discard(key)
        return num_good, error

    def _discard(self, key: bytes) -> None:
        """Removes a corrupt object from the backend if that is possible."""
        if self.metrics is not None:
            self.metrics.verify_failed()
        try:
            self.backend.discard(key)
        except StoreUnavailableError as cause:
            _logger.log(log_level_of(cause), "KV object %s stays: %s", key.hex(), cause)
        except Exception:
            _logger.exception("KV object %s stays", key.hex())


def _count_call(
    metrics: TransferMetrics, direction: Direction, began_at: float, moved: Sequence[KvObject]
) -> None:
    num_bytes = len(moved) * moved[0].nbytes if moved else 0
    metrics.called(direction, time.perf_counter() - began_at, len(moved), num_bytes)


def _clear(objects: Sequence[KvObject]) -> None:
    """Zeroes the payloads of objects in a pool.

    Kernels may read positions behind a sequence's end and multiply them by 0, which gives 0 for
    every number, but not for the NaNs that arbitrary bytes may be.
    """
    for cleared in objects:
        cleared.payload[:] = bytes(cleared.payload.nbytes)
