"""Steps that ran once through Python and run again without it.

For a step of a given size a model runs the same operations every time; only the contents of its
inputs change. `kernels.native.recording` records steps on CPUs, `CudaGraphRecorder` on GPUs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from typing_extensions import override

__all__ = ["Arena", "ArenaPlace", "CudaGraphRecorder", "RecordedStep"]


# Compared by identity: the arena caches the tensor at a place for as long as the place lives.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ArenaPlace:
    """The place of a tensor in an arena.

    Attributes:
        offset: in bytes.
        like: a meta tensor of the same shape and type.
    """

    offset: int
    like: torch.Tensor


class Arena:
    """Scratch memory on the CPU that several recorded steps share, of which one runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tensors: WeakKeyDictionary[ArenaPlace, torch.Tensor] = WeakKeyDictionary()

    @property
    def address(self) -> int:
        """Address of the memory; it changes when the arena grows."""
        return self._memory.data_ptr()

    def reserve(self, num_bytes: int) -> None:
        """Grows the arena to at least `num_bytes`; growing discards its contents."""
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._tensors.clear()

    def tensor(self, place: ArenaPlace) -> torch.Tensor:
        """Returns the tensor at a place, as a view of the arena."""
        tensor = self._tensors.get(place)
        if tensor is None:
            like = place.like
            part = self._memory[place.offset : place.offset + like.nbytes]
            tensor = self._tensors[place] = part.view(like.dtype).view(like.shape)
        return tensor


class RecordedStep(ABC):
    """A step that can run again."""

    @abstractmethod
    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        """Runs the step on the present contents of its inputs.

        Args:
            on_mark: called with the number of each `kernels.mark_step` of the recorded run, once
                everything before the mark is computed. Steps on a GPU have no marks: they return
                before the device has computed anything.

        Returns:
            The result; the next recorded step of the same arena overwrites it.
        """


class _CapturedStep(RecordedStep):
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph, self._output = graph, output

    @override
    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        self._graph.replay()
        return self._output


class CudaGraphRecorder:
    """Records CUDA graphs that share memory, of which one runs at a time.

    Kernels in a graph keep the addresses and scalars that they were recorded with, so everything
    that changes must lie in memory that keeps its address (CUDA programming guide, "CUDA
    Graphs"). A graph keeps its result alive; the caller should have it written to memory that the
    caller owns.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], torch.Tensor]) -> RecordedStep:
        """Records what `run` launches on the current device, without computing it.

        `run` must have run before, so that nothing is compiled or allocated for good while
        recording.

        Raises:
            RuntimeError: `run` does something that cannot be recorded, such as waiting for the
                device.
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
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return _CapturedStep(graph, output)
