"""Computes in a process whose memory is limited; the argument names what runs out of memory.

It runs as its own process, since a memory limit and a crash affect the whole process.
"""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import torch

import kernels
from baton.common.errors import ConfigurationError
from tests.support.attention_cases import make_case
from tests.support.kernel_checks import filled_weight, normal

_MIB = 2**20
_ROOM_BYTES = 24 * _MIB
# A unit of attention needs 1 KiB per element of a head: 64 MiB.
_HEAD_DIM = 65536
_NUM_THREADS = 3
_TOO_MANY_THREADS = 1000


@contextmanager
def _little_memory() -> Iterator[None]:
    """Leaves memory for tensors, but not for a unit of attention or many threads' stacks."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _attention_without_memory() -> None:
    kernels.set_num_threads(_NUM_THREADS)
    case = make_case([(0, 1)] * 8, num_heads=1, num_kv_heads=1, head_dim=_HEAD_DIM, block_size=1)
    _some_linear()
    with _little_memory():
        for _ in range(2):
            with pytest.raises(MemoryError, match="kernels ran out of memory"):
                case.attend()
    case.check()


def _threads_without_memory() -> None:
    kernels.set_num_threads(_NUM_THREADS)
    expected = _some_linear()
    refusal = pytest.raises(ConfigurationError, match=f"--num-threads is {_TOO_MANY_THREADS}:")
    with _little_memory(), refusal:
        kernels.set_num_threads(_TOO_MANY_THREADS)
    assert kernels.num_threads() == _NUM_THREADS
    assert torch.equal(_some_linear(), expected)


def _some_linear() -> torch.Tensor:
    return kernels.linear(normal(17, 8), filled_weight(normal(700, 8)))


if __name__ == "__main__":
    {
        "attention": _attention_without_memory,
        "threads": _threads_without_memory,
    }[sys.argv[1]]()
