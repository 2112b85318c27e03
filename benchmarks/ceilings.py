"""Measures the machine's ceilings: bytes read and matrix operations per second.

On the CPU, a rate is the better one of torch's and the selected kernels'. The slower one would not
limit the faster.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

import kernels

__all__ = ["Rates", "kernel_threads", "measure_ceilings", "torch_threads"]

_MIN_REPEATS = 9
_MIN_SECONDS = 0.25
_STREAMED_COLUMNS = 4096
"""Columns of the weight that the kernels read. The input row stays in the first-level cache."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of the inputs: memory larger than any cache, products with work for all cores."""

    read_bytes: int
    matrix_size: int


_SIZES = {"cpu": _Sizes(1 << 29, 1024), "cuda": _Sizes(1 << 32, 8192)}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second: bytes read from memory, and operations of matrix products by type."""

    read_bytes: float
    float32_operations: float
    bfloat16_operations: float

    def or_better(self, other: "Rates") -> "Rates":
        """Returns the higher of each rate."""
        return Rates(
            max(self.read_bytes, other.read_bytes),
            max(self.float32_operations, other.float32_operations),
            max(self.bfloat16_operations, other.bfloat16_operations),
        )


def measure_ceilings(device: str, num_threads: int) -> Rates:
    """Measures a device. This takes two seconds, and half a GiB of memory on a CPU.

    Args:
        device: "cpu" or a CUDA device, as torch calls it.
        num_threads: threads of the CPU.
    """
    with torch_threads(num_threads):
        by_torch = _rates_of_torch(device)
    if _kind(device) != "cpu":
        return by_torch
    with kernel_threads(num_threads):
        return by_torch.or_better(_rates_of_kernels())


def _rates_of_torch(device: str) -> Rates:
    sizes = _SIZES[_kind(device)]
    return Rates(
        _read_by_torch(device, sizes.read_bytes),
        _multiplied_by_torch(torch.float32, device, sizes.matrix_size),
        _multiplied_by_torch(torch.bfloat16, device, sizes.matrix_size),
    )


def _rates_of_kernels() -> Rates:
    sizes = _SIZES["cpu"]
    return Rates(
        _read_by_kernels(sizes.read_bytes),
        _multiplied_by_kernels(torch.float32, sizes.matrix_size),
        _multiplied_by_kernels(torch.bfloat16, sizes.matrix_size),
    )


def _read_by_torch(device: str, num_bytes: int) -> float:
    data = torch.ones(num_bytes // torch.float32.itemsize, device=device)
    return data.nbytes / _best_seconds(data.sum, device)


def _multiplied_by_torch(dtype: torch.dtype, device: str, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_seconds(partial(torch.matmul, left, right), device)


def _read_by_kernels(num_bytes: int) -> float:
    """Multiplies a row by a weight, which is read once."""
    num_rows = max(1, num_bytes // torch.float32.itemsize // _STREAMED_COLUMNS)
    weight = _weight(num_rows, _STREAMED_COLUMNS, torch.float32)
    call = partial(kernels.linear, torch.ones(1, _STREAMED_COLUMNS), weight)
    return num_rows * _STREAMED_COLUMNS * torch.float32.itemsize / _best_seconds(call, "cpu")


def _multiplied_by_kernels(dtype: torch.dtype, size: int) -> float:
    call = partial(kernels.linear, torch.randn(size, size).to(dtype), _weight(size, size, dtype))
    return 2 * size**3 / _best_seconds(call, "cpu")


def _weight(num_rows: int, num_columns: int, dtype: torch.dtype) -> kernels.Weight:
    use = kernels.WeightUse.LINEAR
    weight = kernels.make_weight(num_rows, num_columns, dtype, _CPU, use)
    # Written, because the system maps unwritten pages to one page of zeros.
    weight.data.fill_(0.5)
    return weight


def _best_seconds(call: Callable[[], object], device: str) -> float:
    """Returns the seconds of the fastest call. Calls are repeated to outlast disturbances."""
    times: list[float] = []
    while len(times) < _MIN_REPEATS or sum(times) < _MIN_SECONDS:
        started = time.perf_counter()
        call()
        if _kind(device) == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _kind(device: str) -> str:
    return device.partition(":")[0]


@contextmanager
def kernel_threads(num_threads: int) -> Iterator[None]:
    """Makes the selected kernels compute on `num_threads`; they set torch's number to suit."""
    with _restored_threads():
        kernels.set_num_threads(num_threads)
        yield


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Makes torch compute on `num_threads`."""
    with _restored_threads():
        torch.set_num_threads(num_threads)
        yield


@contextmanager
def _restored_threads() -> Iterator[None]:
    of_kernels, of_torch = kernels.num_threads(), torch.get_num_threads()
    try:
        yield
    finally:
        kernels.set_num_threads(of_kernels)
        torch.set_num_threads(of_torch)
