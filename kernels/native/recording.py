"""Records steps as lists of the library's commands.

A step goes through Python once, and its commands are recorded instead of run. Buffers between
commands get new places in an arena, which share memory where their lifetimes allow; from then on
one call of the library runs all commands, without Python and without the GIL. The buffers
allocated while recording are never written, so the system never has to back them with memory.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from kernels.library.commands import CommandType, NativeKernels
from kernels.recorded_step import Arena, ArenaPlace, RecordedStep

__all__ = ["CommandList", "note_command", "note_mark", "record_commands"]

_ALIGNMENT = 64
_active = local()


class CommandList(RecordedStep):
    """A step as one array of commands.

    Args:
        library: runs the commands.
        commands: `[num_commands, 1 + fields]` int64.
        moving: row and column of each field that points into the arena; the field holds an
            offset.
        arena: memory for the buffers between commands.
        output: place of the result in the arena.
        marks: (number of commands before the mark, number of the mark), in order.
    """

    def __init__(
        self,
        library: NativeKernels,
        commands: np.ndarray,
        moving: tuple[np.ndarray, np.ndarray],
        arena: Arena,
        output: ArenaPlace,
        marks: Sequence[tuple[int, int]],
    ) -> None:
        self._library, self._arena = library, arena
        self._commands, self._moving = commands, moving
        self._pointer = commands.ctypes.data
        self._base = 0
        # Not the tensor: a view of the arena would keep its old memory alive after it grows.
        self._output = output
        self._marks = marks

    @override
    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        if self._base != self._arena.address:
            self._move()
        first = 0
        if on_mark is not None:
            for end, number in self._marks:
                self._run(first, end)
                on_mark(number)
                first = end
        self._run(first, len(self._commands))
        return self._arena.tensor(self._output)

    def _run(self, first: int, end: int) -> None:
        self._library.run(self._pointer + first * self._commands.strides[0], end - first)

    def _move(self) -> None:
        self._commands[self._moving] += self._arena.address - self._base
        self._base = self._arena.address


def record_commands(
    library: NativeKernels, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Records a step and runs it.

    Args:
        library: runs the step's commands.
        arena: of the recorded step.
        run: computes the step from tensors that keep their addresses. It is called again if the
            step cannot be recorded.

    Returns:
        The result; and the step, or None if anything but commands of the library computed in it.
    """
    recorder = _Recorder()
    with recorder.recording():
        output = run()
    step = recorder.finish(library, arena, output)
    return (run(), None) if step is None else (step.run(), step)


def note_command(kind: CommandType, packed: bytes, tensors: Sequence[torch.Tensor]) -> bool:
    """Records a command if this thread records a step.

    Args:
        kind: the command's type.
        packed: the command.
        tensors: the tensors that it reads or writes; they are kept alive.

    Returns:
        Whether the command was recorded; if so, the caller must not run it.
    """
    recorder: _Recorder | None = getattr(_active, "recorder", None)
    if recorder is None:
        return False
    recorder.commands.append((kind, packed))
    recorder.kept.extend(tensors)
    return True


def note_mark(number: int) -> None:
    """Records a mark after the commands so far, if this thread records a step."""
    recorder: _Recorder | None = getattr(_active, "recorder", None)
    if recorder is not None:
        recorder.marks.append((len(recorder.commands), number))


@dataclass(slots=True)
class _Buffer:
    """A storage that commands of the step use: its lifetime, and its place in the arena.

    Attributes:
        address: its address while recording.
        num_bytes: its size.
        first: index of the first command that uses it, -1 for none.
        last: index of the last command that uses it.
        is_input: a command reads it before any writes it, so it keeps its address.
        offset: in the arena, unless it is an input.
    """

    address: int
    num_bytes: int
    first: int = -1
    last: int = -1
    is_input: bool = False
    offset: int = 0


class _ByAddress:
    """Storages sorted by address; no two of them overlap."""

    def __init__(self, buffers: list[_Buffer]) -> None:
        self._buffers = sorted(buffers, key=lambda buffer: buffer.address)
        self._addresses = [buffer.address for buffer in self._buffers]

    def holding(self, address: int) -> _Buffer | None:
        """Returns the storage that `address` points into; None if there is none."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        buffer = self._buffers[index]
        return buffer if address < buffer.address + buffer.num_bytes else None


class _Recorder:
    def __init__(self) -> None:
        self.commands: list[tuple[CommandType, bytes]] = []
        self.marks: list[tuple[int, int]] = []
        self.kept: list[
            torch.Tensor
        ] = []  # kept alive so that no two tensors of the step share an address
        self._foreign: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        _active.recorder = self
        try:
            with _ForeignOperations(self._foreign):
                yield
        finally:
            _active.recorder = None

    def finish(
        self, library: NativeKernels, arena: Arena, output: torch.Tensor
    ) -> RecordedStep | None:
        if self._foreign or not self.commands:
            return None
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.kept}
        buffers = [_Buffer(start, storage.nbytes()) for start, storage in storages.items()]
        by_address = _ByAddress(buffers)
        uses = [use for use in self._uses(by_address) if not use[2].is_input]
        result = self._result(by_address, output)
        if result is None:
            return None
        arena.reserve(_place([buffer for buffer in buffers if not buffer.is_input]))
        commands = np.frombuffer(b"".join(packed for _, packed in self.commands), np.int64)
        commands = commands.reshape(len(self.commands), -1).copy()
        for row, column, buffer in uses:
            commands[row, column] += buffer.offset - buffer.address
        rows, columns = np.array([use[:2] for use in uses], np.intp).reshape(-1, 2).T
        offset = result.offset + output.data_ptr() - result.address
        place = ArenaPlace(offset, torch.empty_like(output, device="meta"))
        return CommandList(library, commands, (rows, columns), arena, place, self.marks)

    def _result(self, buffers: _ByAddress, output: torch.Tensor) -> _Buffer | None:
        """Finds the output's buffer and extends its life to the end.

        Returns:
            None if the output cannot be returned as a view of the arena.
        """
        if not output.numel():
            return _Buffer(output.data_ptr(), 0)
        buffer = buffers.holding(output.data_ptr())
        # The arena returns contiguous tensors alone.
        if buffer is None or buffer.is_input or not output.is_contiguous():
            return None
        buffer.last = len(self.commands)
        return buffer

    def _uses(self, buffers: _ByAddress) -> list[tuple[int, int, _Buffer]]:
        """Returns (command, field, buffer) of each pointer into a buffer, and sets the buffers'
        lifetimes.
        """
        uses = []
        for row, (kind, packed) in enumerate(self.commands):
            fields = kind.layout.unpack(packed)
            for column in kind.pointers:
                buffer = buffers.holding(fields[column])
                if buffer is None:
                    continue
                if buffer.first < 0:
                    buffer.first = row
                    buffer.is_input = column not in kind.outputs
                buffer.last = row
                uses.append((row, column, buffer))
        return uses


class _ForeignOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of torch operations that compute, unlike views and allocations."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keeps torch from importing its compiler, which takes seconds, to exclude this class."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_fresh = function is torch.ops.aten.empty.memory_format
        if not is_fresh and not _is_view(function, (args, kwargs), result):
            self._names.add(function.name())
        return result


def _is_view(function: Any, arguments: Any, result: Any) -> bool:
    """Returns whether an operation only returned views of its arguments.

    The schema alone does not decide: in inference mode `reshape` and similar operations arrive
    undivided, and some of their calls copy.
    """
    schema = function._schema
    if schema.is_mutable or not any(argument.alias_info for argument in schema.arguments):
        return False
    arguments_storages = _storages(arguments)
    return _storages(result) <= arguments_storages


def _storages(values: Any) -> set[int]:
    """Returns the addresses of the storages of all tensors in nested tuples, lists and dicts."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _place(buffers: list[_Buffer]) -> int:
    """Assigns each buffer an offset that is free throughout its life; returns the arena's size.

    First fit in order of first use: each buffer takes the lowest gap that is large enough among
    the buffers alive at that command.
    """
    alive: list[_Buffer] = []  # by offset
    size = 0
    for buffer in sorted(buffers, key=lambda b: (b.first, -b.num_bytes)):
        alive = [other for other in alive if other.last >= buffer.first]
        offset = 0
        for other in alive:
            if offset + buffer.num_bytes <= other.offset:
                break
            end = -(-(other.offset + other.num_bytes) // _ALIGNMENT) * _ALIGNMENT
            offset = max(offset, end)  # an empty buffer may end before one that lies there too
        buffer.offset = offset
        insort(alive, buffer, key=lambda b: b.offset)
        size = max(size, offset + buffer.num_bytes)
    return size
