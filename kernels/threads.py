"""How many threads compute on the CPU."""

import torch

from baton.errors import InvalidArgumentError
from baton.machine_limits import usable_cores
from kernels.native.commands import library

__all__ = ["default_num_threads", "num_threads", "set_num_threads"]


def default_num_threads() -> int:
    """The cores this process can keep busy."""
    return usable_cores()


def num_threads() -> int:
    """How many threads the CPU's kernels share their work among."""
    native = library()
    return torch.get_num_threads() if native is None else int(native.num_threads())


def set_num_threads(num_threads: int) -> None:
    """Sets how many threads the CPU's kernels share their work among, for the whole process.

    Torch gets as many: beside native kernels it computes float16, norms of some models, and
    draws. So that its threads do not spin on their cores after each operation, the command
    line sets `OMP_WAIT_POLICY`.

    Raises:
        InvalidArgumentError: `num_threads` is below 1.
        ConfigurationError: the system makes no so many threads; the number stays as it was.
    """
    if num_threads < 1:
        raise InvalidArgumentError.for_field("num_threads", num_threads, ">= 1")
    native = library()
    if native is not None:
        native.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)
