"""`Slot`: where an object's bytes lie in memory: a header, and a block.

in a staging segment   | header | payload |   in one run, which `whole` is
straight in a pool     | header |  | payload |   the payload is a row of the pool
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kvstore.codec import HEADER_BYTES
from kvstore.store import Frame

__all__ = ["Slot", "wholes"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory of one object; all views are of bytes, and contiguous.

    Attributes:
        header: `HEADER_BYTES` bytes.
        payload: the block.
        whole: both, where one follows the other; None where they lie apart.
    """

    header: memoryview
    payload: memoryview
    whole: memoryview | None = None

    @classmethod
    def of(cls, whole: memoryview) -> Self:
        """Memory in one run. What is too short for a header has a short one, and no payload."""
        return cls(whole[:HEADER_BYTES], whole[HEADER_BYTES:], whole)

    @property
    def frame(self) -> Frame:
        """The two parts."""
        return self.header, self.payload

    @property
    def nbytes(self) -> int:
        """Of both parts."""
        return self.header.nbytes + self.payload.nbytes

    def to_bytes(self) -> bytes:
        """A copy of both parts."""
        return b"".join((self.header, self.payload))

    def fill(self, value: bytes | bytearray) -> None:
        """Puts as many bytes into both parts."""
        self.header[:] = value[: len(self.header)]
        self.payload[:] = value[len(self.header) :]


def wholes(slots: Sequence[Slot]) -> list[memoryview] | None:
    """Each slot's `whole`; None if one has none."""
    found = [slot.whole for slot in slots if slot.whole is not None]
    return found if len(found) == len(slots) else None
