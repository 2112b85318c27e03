"""Threads and memory of the host CPU."""

import mmap
from contextlib import suppress

import torch

from baton.common.errors import InvalidArgumentError
from baton.common.machine_limits import usable_cores
from kernels.library.commands import library

__all__ = ["default_num_threads", "fresh_zeros", "num_threads", "set_num_threads"]

_LARGE_PAGE_BYTES = 1 << 21


def default_num_threads() -> int:
    """Returns how many cores this process may use."""
    return usable_cores()


def num_threads() -> int:
    """Returns how many threads the CPU's kernels share their work among."""
    native = library()
    return torch.get_num_threads() if native is None else int(native.num_threads())


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads the CPU's kernels share their work among, for the whole process.

    Torch gets the same number: beside native kernels it computes float16, the norms of some
    models, and draws. The command line sets `OMP_WAIT_POLICY`, so that torch's threads do not
    spin on their cores after each operation.

    Raises:
        InvalidArgumentError: `num_threads` is below 1.
        ConfigurationError: the system refuses to create that many threads; the number stays as
            it was.
    """
    if num_threads < 1:
        raise InvalidArgumentError.for_field("num_threads", num_threads, ">= 1")
    native = library()
    if native is not None:
        native.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)


def fresh_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros whose pages the system allocates when they are first written.

    Meant for weights and KV, which are large and read in full each step: large tensors ask for
    large pages, which need fewer address translations.

    Raises:
        OSError: there is not that much memory.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes < _LARGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system was built without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
