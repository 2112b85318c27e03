"""Fresh memory of the CPU for what is large and read in full each step: weights and KV."""

import mmap
from contextlib import suppress

import torch

__all__ = ["fresh_zeros"]

_LARGE_BYTES = 1 << 21  # of a large page


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros whose pages the system gives when they are first written.

    Large ones ask for large pages, which take fewer look-ups of addresses.

    Raises:
        OSError: there is not that much memory.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes < _LARGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
