"""Encodes and decodes the messages of `ReadBlocks` with as few copies as gRPC allows. Pure.

The messages are those of protobuf's `ReadBlocksResponse`, made and parsed by
hand: protobuf would copy the bytes once more on each side, and once more for
Python. They carry one stream of bytes: header and payload of the first block,
header and payload of the second, and so on.
"""

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["MAX_CHUNK_BYTES", "FrameFiller", "FramingError", "pack_chunks", "to_message", "to_view"]

MAX_CHUNK_BYTES = 1 << 20

_TAG = 0x0A  # field 1: a length and bytes


class FramingError(ValueError):
    """A message is not one that a lender sends."""


def pack_chunks(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Splits buffers into lists of `MAX_CHUNK_BYTES`; the last list may be shorter."""
    chunk: list[memoryview] = []
    room = MAX_CHUNK_BYTES
    for buffer in buffers:
        rest = buffer
        while len(rest):
            part, rest = rest[:room], rest[room:]
            chunk.append(part)
            room -= len(part)
            if not room:
                yield chunk
                chunk, room = [], MAX_CHUNK_BYTES
    if chunk:
        yield chunk


def to_message(chunk: Sequence[memoryview]) -> bytes:
    """Returns the message that carries a chunk; copies it once."""
    length = sum(map(len, chunk))
    prefix = bytearray([_TAG])
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return b"".join((prefix, *chunk))


def to_view(message: bytes) -> memoryview:
    """Returns a view of the bytes that a message carries.

    Raises:
        FramingError: it is not such a message.
    """
    length = shift = 0
    for index in range(1, min(len(message), 6)):
        length |= (message[index] & 0x7F) << shift
        shift += 7
        if message[index] < 0x80:
            if message[0] != _TAG or index + 1 + length != len(message):
                break
            return memoryview(message)[index + 1 :]
    raise FramingError("not a message of blocks")


class FrameFiller:
    """Copies a stream of bytes into buffers, one after the other.

    Args:
        buffers: writable and not empty: header and payload of each block.

    Attributes:
        num_full: number of buffers that are filled to the end.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._offset = 0
        self.num_full = 0

    def feed(self, data: memoryview) -> None:
        """Copies the next bytes.

        Raises:
            FramingError: more bytes came than fit.
        """
        while len(data):
            if self.num_full == len(self._buffers):
                raise FramingError("more bytes came than were asked for")
            buffer = self._buffers[self.num_full]
            part = data[: len(buffer) - self._offset]
            buffer[self._offset : self._offset + len(part)] = part
            data = data[len(part) :]
            self._offset += len(part)
            if self._offset == len(buffer):
                self.num_full, self._offset = self.num_full + 1, 0
