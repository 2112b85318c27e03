"""`PieceIo`: what I/O threads do with a `StagedMover`'s pieces.

Of the pool they touch what pieces move in place, and nothing else. That is safe,
for the blocks are held until the job has its result, also where nobody waits
for it any more, and it has none before the last call for it has ended. What a
save reads is computed and full, and shared with the job, so nobody writes to
it; what a load writes is in no cache, and nobody else writes or reads it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.breaker import log_level_of
from kvstore.codec import HEADER_BYTES, seal, verify
from kvstore.jobs import LoadJob, SaveJob
from kvstore.mover.backend import Backend, InDoubtError
from kvstore.mover.pieces import JobState, Piece, PieceEnd, PieceRead
from kvstore.slot import Slot
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.transfer_form import RangeError

if TYPE_CHECKING:
    from kvstore.mover.copies import Copy

__all__ = ["PieceIo", "run_part"]

_logger = logging.getLogger("baton.kvstore")


def run_part(move: Callable[[], PieceRead | PieceEnd], piece: Piece) -> PieceRead | PieceEnd:
    """Does a thread's part of a piece. Whatever happens, there is something to tell."""
    news: PieceRead | PieceEnd = PieceEnd(piece, 0, "failed")
    began_at = time.monotonic()
    try:
        news = move()
    except StoreUnavailableError as cause:
        has_settled = cause.has_settled if isinstance(cause, InDoubtError) else None
        news = PieceEnd(piece, 0, "unavailable", has_settled)
        _logger.log(log_level_of(cause), "KV transfer: %s", cause)
    except RangeError as cause:
        _logger.warning("KV transfer: %s", cause)
    except Exception:
        _logger.exception("KV transfer failed")
    piece.job.told_at = time.monotonic()
    if isinstance(news, PieceEnd):
        return replace(news, seconds=piece.job.told_at - began_at)
    return news


class PieceIo:
    """Moves bytes between segments, or the pool itself, and a backend. Any thread may call it.

    Attributes:
        backend: where they come from and go to.
        rows: where objects lie in the pool; see `BlockCopier.rows`.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rows: Callable[[Sequence[int]], list[memoryview] | None] = lambda object_ids: None

    def moves_in_place(self, job: JobState) -> bool:
        """Whether a job's pieces need no segment. A tail does: what lies behind it must not
        leave the process, nor be cleared where a sequence may still use it.
        """
        has_rows = self.rows(()) is not None
        return has_rows and self.backend.takes_frames and not job.num_tail_tokens

    def num_held(self, keys: Sequence[bytes]) -> int:
        """See `Backend.num_held`; 0 where that is not known."""
        try:
            return self.backend.num_held(keys)
        except StoreUnavailableError:
            pass  # the put will say so
        except Exception:
            _logger.exception("KV look-up failed")
        return 0

    def put(self, job: SaveJob, piece: Piece, copy: "Copy | None" = None) -> PieceEnd:
        """Seals a piece and puts it; if it was copied into a segment, once it is.

        Raises:
            RangeError: the form of the segment cannot hold what was copied.
            RuntimeError: the device failed.
            StoreUnavailableError: not all was put.
        """
        if copy is not None:
            copy.wait()
        if piece.job.error:  # of a piece before it: the save cannot be committed
            return PieceEnd(piece, 0)
        for tail in piece.tail_slots:
            piece.staged_in.clear_after(tail, piece.job.num_tail_tokens)
        slots = piece.slots if piece.segment is not None else self._slots_in_pool(piece)
        seal([slot.frame for slot in slots], piece.keys)
        self.backend.put(job, piece.keys, slots)
        return PieceEnd(piece, len(piece.keys))

    def read(self, job: LoadJob, piece: Piece) -> PieceRead:
        """Fetches a piece into its segment, and verifies it.

        Raises:
            StoreUnavailableError: it did not come.
            InDoubtError: so, and something may still write to the slots.
        """
        if piece.job.error:  # cancelled, or of a piece before it, while it waited for its turn
            return PieceRead(piece, 0)
        statuses = self.backend.fetch(job, piece.keys, piece.slots)
        return PieceRead(piece, *self._check(piece, piece.slots, statuses))

    def read_in_place(self, job: LoadJob, piece: Piece) -> PieceEnd:
        """Fetches a piece to where it shall be in the pool, and verifies it there.

        Raises:
            StoreUnavailableError: it did not come.
            InDoubtError: so, and something may still write there.
        """
        if piece.job.error:
            return PieceEnd(piece, 0)
        slots = self._slots_in_pool(piece)
        num_good = 0
        try:
            statuses = self.backend.fetch(job, piece.keys, slots)
            num_good, error = self._check(piece, slots, statuses)
        finally:
            _clear(slots[num_good:])
        return PieceEnd(piece, num_good, error)

    def clear(self, piece: Piece) -> None:
        """Zeroes where a piece shall be in the pool: something else may have been written there."""
        _clear(self._slots_in_pool(piece))

    def _slots_in_pool(self, piece: Piece) -> list[Slot]:
        rows = self.rows(piece.object_ids)
        assert rows is not None
        headers = memoryview(bytearray(HEADER_BYTES * len(rows)))
        starts = range(0, len(headers), HEADER_BYTES)
        return [
            Slot(headers[start : start + HEADER_BYTES], row)
            for start, row in zip(starts, rows, strict=True)
        ]

    def _check(
        self, piece: Piece, slots: Sequence[Slot], statuses: Sequence[GetStatus]
    ) -> tuple[int, str]:
        """Verifies what came, up to the first that cannot be used; and why not, if there is one."""
        # A third party's backend may tell of too many; and of too few: the others are missing.
        num_objects = len(piece.keys)
        told = [*statuses, *[GetStatus.MISSING] * num_objects][:num_objects]
        are_hits = (status is GetStatus.HIT for status in told)
        num_hits = next((index for index, hit in enumerate(are_hits) if not hit), num_objects)
        frames = [slot.frame for slot in slots[:num_hits]]
        num_good = verify(frames, piece.keys[:num_hits])
        if num_good == num_objects:
            return num_good, ""
        if told[num_good] is GetStatus.MISSING:
            return num_good, "missing"
        key = piece.keys[num_good]
        _logger.error("KV object %s is corrupt", key.hex())
        self._discard(key)
        return num_good, "corrupt"

    def _discard(self, key: bytes) -> None:
        """Has a corrupt object removed, as far as the backend can."""
        try:
            self.backend.discard(key)
        except StoreUnavailableError as cause:
            _logger.log(log_level_of(cause), "KV object %s stays: %s", key.hex(), cause)
        except Exception:
            _logger.exception("KV object %s stays", key.hex())


def _clear(slots: Sequence[Slot]) -> None:
    """Zeroes slots of a pool that nothing good came to.

    Kernels may touch positions behind a sequence's end, and multiply what lies there by 0. That
    makes nothing of any number, but these bytes may be none.
    """
    for slot in slots:
        slot.payload[:] = bytes(slot.payload.nbytes)
