"""Records steps as lists of the library's commands.

A step runs once through Python, and its commands are noted. What they hand to each other is
laid out anew in an arena, as small as their lifetimes allow; from then on one call of the
library runs them all, without Python and without its lock.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.native.commands import CommandType, Library
from kernels.recorded_step import Arena, RecordedStep

__all__ = ["CommandList", "note_command", "record_commands"]

_ALIGNMENT = 64
_active = local()


class CommandList(RecordedStep):
    """A step as commands that lie one after the other.

    Args:
        library: what runs it.
        commands: `[num_commands, 1 + fields]` int64.
        moving: row and column of each field that points into the arena, as an
            offset.
        arena: where the commands put what they hand to each other.
        output: the result as it was when recorded.
        output_offset: where it will be.
    """

    def __init__(
        self,
        library: Library,
        commands: np.ndarray,
        moving: tuple[np.ndarray, np.ndarray],
        arena: Arena,
        output: torch.Tensor,
        output_offset: int,
    ) -> None:
        self._library, self._arena = library, arena
        self._commands, self._moving = commands, moving
        self._pointer = commands.ctypes.data
        self._base = 0
        self._like, self._output_offset = torch.empty_like(output, device="meta"), output_offset
        self._move()

    def run(self) -> torch.Tensor:
        """See `RecordedStep.run`."""
        if self._base != self._arena.address:
            self._move()
        self._library.run(self._pointer, len(self._commands))
        return self._output

    def _move(self) -> None:
        self._commands[self._moving] += self._arena.address - self._base
        self._base = self._arena.address
        self._output = self._arena.tensor(self._output_offset, self._like)


def record_commands(
    library: Library, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Runs a step and records it.

    Args:
        library: what runs its commands.
        arena: of the recorded step.
        run: computes the step from tensors that stay where they are.

    Returns:
        What `run` returned; the step, None if anything but commands of the library
        computed in it.
    """
    recorder = _Recorder()
    with recorder.recording():
        output = run()
    return output, recorder.finish(library, arena, output)


def note_command(kind: CommandType, packed: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Notes a command that was run, if this thread records.

    Args:
        kind: of command.
        packed: the command.
        tensors: of the step that it reads or writes.
    """
    recorder: _Recorder | None = getattr(_active, "recorder", None)
    if recorder is not None:
        recorder.commands.append((kind, packed))
        recorder.kept.extend(tensors)


@dataclass(slots=True)
class _Buffer:
    """A storage that commands of the step fill: its life, and its place in the arena."""

    address: int
    num_bytes: int
    first: int = -1
    last: int = -1
    offset: int = 0


class _Recorder:
    def __init__(self) -> None:
        self.commands: list[tuple[CommandType, bytes]] = []
        self.kept: list[torch.Tensor] = []  # so that no two of the step share an address
        self._foreign: set[str] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        _active.recorder = self
        try:
            with _ForeignOperations(self._foreign):
                yield
        finally:
            _active.recorder = None

    def finish(self, library: Library, arena: Arena, output: torch.Tensor) -> RecordedStep | None:
        if self._foreign:
            return None
        buffers = self._buffers()
        result = _holding(output.data_ptr(), buffers)
        if result is None:
            return None
        result.last = len(self.commands)
        arena.reserve(_place(buffers))
        commands = np.frombuffer(b"".join(packed for _, packed in self.commands), np.int64)
        commands = commands.reshape(len(self.commands), -1).copy()
        moving: list[tuple[int, int]] = []
        for row, column, buffer in self._uses(buffers):
            commands[row, column] += buffer.offset - buffer.address
            moving.append((row, column))
        rows, columns = np.array(moving).T
        offset = result.offset + output.data_ptr() - result.address
        return CommandList(library, commands, (rows, columns), arena, output, offset)

    def _buffers(self) -> list[_Buffer]:
        """The storages that the step fills. One that it reads first is an input, and stays."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.kept}
        buffers = [_Buffer(address, storage.nbytes()) for address, storage in storages.items()]
        inputs = set()
        for row, column, buffer in self._uses(buffers):
            if buffer.first < 0:
                buffer.first = row
                if column not in self.commands[row][0].outputs:
                    inputs.add(buffer.address)
            buffer.last = row
        return [buffer for buffer in buffers if buffer.address not in inputs]

    def _uses(self, buffers: list[_Buffer]) -> Iterator[tuple[int, int, _Buffer]]:
        """(command, field, buffer) of each pointer into a buffer."""
        for row, (kind, packed) in enumerate(self.commands):
            fields = kind.layout.unpack(packed)
            for column in kind.pointers:
                buffer = _holding(fields[column], buffers)
                if buffer is not None:
                    yield row, column, buffer


class _ForeignOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of torch that compute; views and fresh memory do not."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = function._schema
        is_view = not schema.is_mutable and any(a.alias_info for a in schema.arguments)
        if not is_view and function is not torch.ops.aten.empty.memory_format:
            self._names.add(function.name())
        return function(*args, **(kwargs or {}))


def _place(buffers: list[_Buffer]) -> int:
    """Gives each buffer the lowest offset free throughout its life; returns the arena's size."""
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda b: -b.num_bytes):
        offset = 0
        for other in sorted(placed, key=lambda b: b.offset):
            if other.last < buffer.first or buffer.last < other.first:
                continue
            if offset + buffer.num_bytes <= other.offset:
                break
            end = other.offset + other.num_bytes
            offset = max(offset, -(-end // _ALIGNMENT) * _ALIGNMENT)
        buffer.offset = offset
        placed.append(buffer)
    return max((b.offset + b.num_bytes for b in buffers), default=0)


def _holding(address: int, buffers: list[_Buffer]) -> _Buffer | None:
    for buffer in buffers:
        if buffer.address <= address < buffer.address + buffer.num_bytes:
            return buffer
    return None
