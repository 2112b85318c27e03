"""Copies weights from safetensors files to a device, without a copy of the model on the host.

    file -> one of two pinned buffers -> memory of the stored type on the device -> the weight

A thread reads the next piece of a file while the device copies the previous one. The device
converts types and memory order. The host never holds more than the two buffers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import torch

from engine.models.tensor_parts import WeightTarget
from engine.runtime.weights.file_reader import FileReader
from engine.runtime.weights.safetensors_file import StoredTensor

__all__ = ["BUFFER_BYTES", "HostBuffer", "upload"]

BUFFER_BYTES = 64 * 2**20
_NUM_BUFFERS = 2


class HostBuffer:
    """Memory on the host that a device copies from. For a GPU it is pinned, so that the copies are
    asynchronous.

    Args:
        num_bytes: size of the buffer.
        device: the device that copies from it.

    Attributes:
        memory: `[num_bytes]` uint8.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._sent = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def send(self, target: torch.Tensor) -> None:
        """Starts to copy the buffer's first `n` bytes to `target`, `[n]` uint8 on the device."""
        target.copy_(self.memory[: len(target)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Returns once the last `send` has completed, so that the memory may be overwritten."""
        if self._sent is not None:
            self._sent.synchronize()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of the stored tensor of index `tensor`: `num_bytes` bytes from `start`."""

    tensor: int
    start: int
    num_bytes: int


def upload(
    weights: Sequence[tuple[StoredTensor, WeightTarget]],
    device: torch.device,
    on_copied: Callable[[WeightTarget], object],
    *,
    buffer_bytes: int = BUFFER_BYTES,
    make_buffer: Callable[[int, torch.device], HostBuffer] = HostBuffer,
) -> None:
    """Fills weights on a device from files.

    Args:
        weights: pairs of a stored tensor and its target; read in this order.
        device: the device of the targets; needs memory for the largest stored tensor.
        on_copied: called with each target once its copy has been submitted to the device.
        buffer_bytes: size of each buffer.
        make_buffer: makes a buffer of a size for a device.

    Raises:
        ConfigurationError: a file ends early or cannot be read.
    """
    buffers = [make_buffer(buffer_bytes, device) for _ in range(_NUM_BUFFERS)]
    sources = [stored for stored, _ in weights]
    with FileReader() as files, ThreadPoolExecutor(1, "weights-reader") as reader:
        landing = torch.empty(0, dtype=torch.uint8, device=device)
        for piece, buffer in _read_ahead(sources, buffers, files, reader):
            stored, target = weights[piece.tensor]
            if piece.start == 0:
                landing = torch.empty(stored.num_bytes, dtype=torch.uint8, device=device)
            buffer.send(landing[piece.start : piece.start + piece.num_bytes])
            if piece.start + piece.num_bytes == stored.num_bytes:
                target.copy_(landing.view(stored.dtype).view(stored.shape))
                on_copied(target)
    for buffer in buffers:
        buffer.wait()


def _read_ahead(
    sources: Sequence[StoredTensor],
    buffers: Sequence[HostBuffer],
    files: FileReader,
    reader: ThreadPoolExecutor,
) -> Iterator[tuple[_Piece, HostBuffer]]:
    """Yields each piece in a buffer. The caller sends it before it requests the next one."""
    waiting: deque[tuple[_Piece, HostBuffer, Future[None]]] = deque()
    buffers_in_turn = cycle(buffers)
    for piece in _pieces(sources, len(buffers[0].memory)):
        if len(waiting) == len(buffers):
            yield _filled(*waiting.popleft())
        buffer, stored = next(buffers_in_turn), sources[piece.tensor]
        waiting.append((piece, buffer, reader.submit(_read, files, stored, piece, buffer)))
    while waiting:
        yield _filled(*waiting.popleft())


def _filled(
    piece: _Piece, buffer: HostBuffer, reading: "Future[None]"
) -> tuple[_Piece, HostBuffer]:
    reading.result()
    return piece, buffer


def _pieces(sources: Sequence[StoredTensor], most_bytes: int) -> Iterator[_Piece]:
    for index, stored in enumerate(sources):
        for start in range(0, stored.num_bytes, most_bytes):
            yield _Piece(index, start, min(most_bytes, stored.num_bytes - start))


def _read(files: FileReader, stored: StoredTensor, piece: _Piece, buffer: HostBuffer) -> None:
    """Reads a piece into a buffer, after the device has copied its former content."""
    buffer.wait()
    memory = buffer.memory.numpy().data[: piece.num_bytes]
    files.read(stored.file, stored.offset + piece.start, memory)
