"""CUDA graphs: what a function launches, recorded once and launched again in one call.

See CUDA's programming guide, "CUDA Graphs": kernels keep the addresses and the scalars that
they were recorded with, so everything that changes must lie in memory that stays where it is.
"""

from collections.abc import Callable
from contextlib import suppress

import torch

from kernels.recorded_step import RecordedStep

__all__ = ["CudaGraphRecorder"]


class _CapturedStep(RecordedStep):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph, self._output = graph, output

    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        """See `RecordedStep.run`; does not wait for the device."""
        self._graph.replay()
        return self._output


class CudaGraphRecorder:
    """Records graphs that share memory, of which one runs at a time.

    What a graph returns is kept for as long as the graph: it had better lie in memory of the
    caller's.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> RecordedStep:
        """Records what `run` launches on the current device, without computing it.

        `run` has run before, so that nothing is compiled or allocated for good while recording.

        Raises:
            RuntimeError: it does what cannot be recorded, such as waiting for the device.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Not torch.cuda.graph, which collects garbage and empties the cache each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                output = run()
            except BaseException:
                with suppress(RuntimeError):  # what went wrong tells more
                    graph.capture_end()
                raise
            graph.capture_end()
        return _CapturedStep(graph, output)
