"""Copies of stored values into a reader's preallocated buffers."""

from kvstore.store import GetStatus

__all__ = ["copy_into"]


def copy_into(value: bytes | None, *parts: memoryview) -> GetStatus:
    """Fills a buffer, or its parts in order, with a whole value; None stands for a missing one."""
    if value is None:
        return GetStatus.MISSING
    if len(value) != sum(part.nbytes for part in parts):
        return GetStatus.WRONG_SIZE
    rest = memoryview(value)
    for part in parts:
        part[:] = rest[: part.nbytes]
        rest = rest[part.nbytes :]
    return GetStatus.HIT
