"""How many threads the two kinds of kernels compute on, while something is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import kernels

__all__ = ["kernel_threads", "torch_threads"]


@contextmanager
def kernel_threads(num_threads: int) -> Iterator[None]:
    """The selected kernels compute on this many, and torch as they want it beside them."""
    with _put_back():
        kernels.set_num_threads(num_threads)
        yield


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Torch computes on this many."""
    with _put_back():
        torch.set_num_threads(num_threads)
        yield


@contextmanager
def _put_back() -> Iterator[None]:
    of_kernels, of_torch = kernels.num_threads(), torch.get_num_threads()
    try:
        yield
    finally:
        kernels.set_num_threads(of_kernels)
        torch.set_num_threads(of_torch)
