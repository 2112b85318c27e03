"""`PieceIo`: what I/O threads do with a `StagedMover`'s pieces. It never touches the pool."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.backend import Backend
from kvstore.breaker import log_level_of
from kvstore.codec import seal, verify
from kvstore.connector import LoadJob, SaveJob
from kvstore.store import GetStatus, MappedObjects, StoreUnavailableError
from kvstore.transfer_jobs import CANCELLED, Piece, PieceEnd, PieceRead

if TYPE_CHECKING:
    from kvstore.copier import Copy

__all__ = ["PieceIo"]

_logger = logging.getLogger("baton.kvstore")


class PieceIo:
    """Moves bytes between segments and a backend. Any thread may call it.

    Attributes:
        backend: where they come from and go to.
        maps: whether objects may be used where the backend shows them.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.maps = False

    def num_held(self, keys: Sequence[bytes]) -> int:
        """See `Backend.num_held`; 0 where that is not known."""
        try:
            return self.backend.num_held(keys)
        except StoreUnavailableError:
            pass  # the put will say so
        except Exception:
            _logger.exception("KV look-up failed")
        return 0

    def put(self, job: SaveJob, piece: Piece, copy: "Copy | None") -> PieceEnd:
        """Seals what was copied into a piece's segment, once it is, and puts it.

        Raises:
            RangeError: the form of the segment cannot hold what was copied.
            RuntimeError: the device failed.
            StoreUnavailableError: not all was put.
        """
        if copy is not None:
            copy.wait()
        for tail in piece.tail_slots:
            piece.segment.trusted.clear_after(tail, piece.num_tail_tokens)
        for slot, key in zip(piece.trusted_slots, piece.keys, strict=True):
            seal(slot, key)
        self.backend.put(job, piece.keys, piece.trusted_slots)
        return PieceEnd(piece, len(piece.keys))

    def read(self, job: LoadJob, piece: Piece) -> PieceRead:
        """Fetches or maps a piece, and verifies it.

        Raises:
            StoreUnavailableError: it did not come.
            InDoubtError: so, and something may still write to the slots.
        """
        if piece.job.error == CANCELLED:  # while it waited for its turn
            return PieceRead(piece, 0)
        mapped = self.backend.show(job, piece.keys) if self.maps else None
        if mapped is not None:
            return self._check(piece, mapped.views, mapped)
        statuses = self.backend.fetch(job, piece.keys, piece.slots)
        piece.segment.secure(len(piece.keys))
        return self._check(piece, list(map(_what_came, statuses, piece.trusted_slots)))

    def _check(
        self,
        piece: Piece,
        objects: Sequence[memoryview | None],
        mapped: MappedObjects | None = None,
    ) -> PieceRead:
        """Verifies what was read or mapped, up to the first that cannot be used."""
        for index, (found, slot, key) in enumerate(
            zip(objects, piece.slots, piece.keys, strict=True)
        ):
            if found is None:
                return PieceRead(piece, index, "missing", mapped)
            if len(found) != len(slot) or not verify(found, key):
                _logger.error("KV object %s is corrupt", key.hex())
                self._discard(key)
                return PieceRead(piece, index, "corrupt", mapped)
        return PieceRead(piece, len(piece.keys), mapped=mapped)

    def _discard(self, key: bytes) -> None:
        """Has a corrupt object removed, as far as the backend can."""
        try:
            self.backend.discard(key)
        except StoreUnavailableError as cause:
            _logger.log(log_level_of(cause), "KV object %s stays: %s", key.hex(), cause)
        except Exception:
            _logger.exception("KV object %s stays", key.hex())


def _what_came(status: GetStatus, slot: memoryview) -> memoryview | None:
    """What a fetch left of an object; of one of another size no byte, which verifies as nothing."""
    if status is GetStatus.MISSING:
        return None
    return slot if status is GetStatus.HIT else slot[:0]
