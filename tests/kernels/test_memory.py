"""Fresh memory is zero, with and without large pages."""

import errno
import mmap

import pytest
import torch

from kernels import fresh_zeros


@pytest.mark.parametrize("shape", [(3, 5), (2, 1 << 20)])
def test_fresh_memory_is_zero(shape):
    assert torch.equal(fresh_zeros(shape, torch.float32), torch.zeros(shape))


def test_a_system_without_large_pages_uses_small_ones(monkeypatch):
    class Pages(mmap.mmap):
        def madvise(self, option):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Pages)
    assert not fresh_zeros((2, 1 << 20), torch.float32).any()
