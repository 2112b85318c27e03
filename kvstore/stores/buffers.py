"""Copies of stored values into a reader's preallocated buffers."""

from kvstore.store import GetStatus

__all__ = ["copy_into"]


def copy_into(value: bytes | None, buffer: memoryview) -> GetStatus:
    """Fills a buffer with a whole value; None stands for a missing one."""
    if value is None:
        return GetStatus.MISSING
    if len(value) != buffer.nbytes:
        return GetStatus.WRONG_SIZE
    buffer[:] = value
    return GetStatus.HIT
