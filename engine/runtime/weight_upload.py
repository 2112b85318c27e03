"""Copies weights from safetensors files to a device, without a copy of the model on the host.

    file -> one of two pinned buffers -> memory of the stored type on the device -> the weight

A thread reads the next piece of a file while the device copies the one before it; the device
changes types and order. On the host there are never more than the two buffers.

Format of the files: https://huggingface.co/docs/safetensors
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import BinaryIO

import torch

from baton.errors import ConfigurationError
from engine.models.linear import WeightTarget

__all__ = ["BUFFER_BYTES", "HostBuffer", "StoredTensor", "locate_tensors", "upload"]

BUFFER_BYTES = 64 * 2**20
_NUM_BUFFERS = 2
_LENGTH_BYTES = 8  # of the header's length, which a file begins with
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: where it is.
        offset: of its first byte in the file.
        num_bytes: how many it has.
        dtype: of its elements.
        shape: of it; its last axis is contiguous.
    """

    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class HostBuffer:
    """Memory on the host that a device copies from; pinned beside a GPU, so that it does so while
    the host goes on.

    Args:
        num_bytes: its size.
        device: that copies.

    Attributes:
        memory: `[num_bytes]` uint8.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self._sent = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]

    def send(self, target: torch.Tensor) -> None:
        """Begins to copy the buffer's start to `target`, `[n]` uint8 on the device."""
        target.copy_(self.memory[: len(target)], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Returns once what was sent has been copied: the memory may be written again."""
        if self._sent is not None:
            self._sent.synchronize()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a stored tensor: `num_bytes` from `start`."""

    tensor: int
    start: int
    num_bytes: int


def locate_tensors(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file's tensors of floating types, by name. The file has been checked.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        with file.open("rb") as source:
            length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
            header = json.loads(source.read(length))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} is no readable safetensors file: {error}") from error
    first = _LENGTH_BYTES + length
    return {
        name: StoredTensor(
            file=file,
            offset=first + facts["data_offsets"][0],
            num_bytes=facts["data_offsets"][1] - facts["data_offsets"][0],
            dtype=_DTYPES[facts["dtype"]],
            shape=tuple(facts["shape"]),
        )
        for name, facts in header.items()
        if facts.get("dtype") in _DTYPES
    }


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
        weights: what is stored, and what takes it over; read in this order.
        device: where the targets are; needs room for the largest tensor as it is stored.
        on_copied: called with each target once it has been given to the device.
        buffer_bytes: size of each of the buffers.
        make_buffer: makes one for a device.

    Raises:
        ConfigurationError: a file is shorter than it says, or cannot be read.
    """
    buffers = [make_buffer(buffer_bytes, device) for _ in range(_NUM_BUFFERS)]
    sources = [stored for stored, _ in weights]
    with _Files() as files, ThreadPoolExecutor(1, "weights-reader") as reader:
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
    files: "_Files",
    reader: ThreadPoolExecutor,
) -> Iterator[tuple[_Piece, HostBuffer]]:
    """Each piece in a buffer, to be sent before the next one is asked for."""
    waiting: deque[tuple[_Piece, HostBuffer, Future[None]]] = deque()
    turns = cycle(buffers)
    for piece in _pieces(sources, len(buffers[0].memory)):
        if len(waiting) == len(buffers):
            yield _filled(*waiting.popleft())
        buffer, stored = next(turns), sources[piece.tensor]
        waiting.append((piece, buffer, reader.submit(files.read, stored, piece, buffer)))
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


class _Files:
    """Files that are being read, the latest of them open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._open: BinaryIO | None = None

    def read(self, stored: StoredTensor, piece: _Piece, buffer: HostBuffer) -> None:
        """Fills a buffer's start, once the device is done with what it held."""
        buffer.wait()
        view = buffer.memory.numpy().data[: piece.num_bytes]
        offset = stored.offset + piece.start
        try:
            descriptor = self._descriptor_of(stored.file)
            while view:
                num_read = os.preadv(descriptor, [view], offset)
                if not num_read:
                    raise ConfigurationError(f"{stored.file} ends before its last tensor does")
                view, offset = view[num_read:], offset + num_read
        except OSError as error:
            raise ConfigurationError(f"{stored.file} cannot be read: {error}") from error

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open is not None:
            self._open.close()

    def _descriptor_of(self, path: Path) -> int:
        if self._open is None or path != self._path:
            if self._open is not None:
                self._open.close()
            self._path, self._open = path, path.open("rb", buffering=0)
        return self._open.fileno()
