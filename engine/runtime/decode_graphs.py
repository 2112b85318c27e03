"""`DecodeGraphs`: decode steps recorded as CUDA graphs, one per number of rows.

A decode step of a given size launches the same kernels on the same memory every time. What
differs, the rows and their state, lies in tensors that stay where they are. So a step is
captured once per size; steps of other sizes are padded up to the next one.
"""

import gc
from collections.abc import Callable, Sequence

import torch

from kernels import RecordedStep

__all__ = ["DecodeGraphs", "GraphRecorder", "capture_sizes", "padded_size"]

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_SIZE = 512

GraphRecorder = Callable[[Callable[[], torch.Tensor]], RecordedStep]
"""Records what a function launches, without running it: `kernels.CudaGraphRecorder`."""


def capture_sizes(max_rows: int) -> tuple[int, ...]:
    """The numbers of rows to capture: 1, 2, 4, then steps of 8, up to what holds `max_rows`.

    Beyond 512 rows the launches are a small part of a step, and none is captured.
    """
    largest = min(max_rows, _MAX_SIZE)
    sizes = [size for size in _SMALL_SIZES if size < largest]
    sizes += range(_SIZE_STEP, largest, _SIZE_STEP)
    return (*sizes, largest)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest of `sizes`, which rise, that holds `num_rows`; None: none does."""
    return next((size for size in sizes if size >= num_rows), None)


class DecodeGraphs:
    """Graphs of decode steps, by size.

    Args:
        sizes: to capture, rising.
        run: launches a step of a size on memory that stays where it is; returns the logits.
        record: records what a function launches.
    """

    def __init__(
        self, sizes: Sequence[int], run: Callable[[int], torch.Tensor], record: GraphRecorder
    ) -> None:
        self.sizes = tuple(sizes)
        self._run, self._record = run, record
        self._graphs: dict[int, RecordedStep] = {}

    def capture(self) -> None:
        """Captures every size, the largest first: the others fit in the memory that it takes."""
        gc.collect()  # what garbage frees while a graph is captured may end the capture
        for size in reversed(self.sizes):
            self.capture_one(size)

    def capture_one(self, size: int) -> None:
        """Captures one size, after a run that compiles what it launches."""
        self._run(size)
        self._graphs[size] = self._record(lambda: self._run(size))

    def run(self, size: int) -> torch.Tensor:
        """Runs the step of one of `sizes`; returns its logits, which the next run overwrites."""
        return self._graphs[size].run()
