"""`BlockCopier`: copies objects between a pool on any device and staging segments.

The engine's thread starts copies, but neither waits for a device nor converts anything: other
threads wait for copies that are not over at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from kvstore.mover.pool_objects import PoolObjects, open_pool
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, RangeError

__all__ = ["BlockCopier", "ConvertingCopier", "Copy", "HostCopier"]


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Returns once the bytes are copied. Any thread may call it.

        Raises:
            RangeError: the new type cannot hold the numbers; the bytes must not be used.
            RuntimeError: the device failed; the bytes are undefined.
        """


class BlockCopier(ABC):
    """Copies objects between a pool and segments. Engine thread only, except `rows`.

    Until a copy is over, nothing else writes to its segment and its blocks, or reads what it
    writes.
    """

    @abstractmethod
    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy | None:
        """Copies objects of the pool into the payloads of a segment's first slots.

        Args:
            object_ids: numbers of the objects; see `BlockSlicing`.
            segment: has a slot for each.

        Returns:
            The copy under way; None if it is over.

        Raises:
            RuntimeError: the device refused, and nothing is under way.
        """

    @abstractmethod
    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy | None:
        """Copies the payloads of a segment's first slots into objects of the pool; see `gather`."""

    def rows(self, object_ids: Sequence[int]) -> list[memoryview] | None:
        """Returns where objects lie in the pool. Any thread may call it.

        Returns:
            Each object's bytes, writable; None if the pool is not in host memory, or its bytes are
            not the objects'.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Returns once no copy is under way. Idempotent."""


class HostCopier(BlockCopier):
    """Copies objects in host memory without conversion. Copies are over when the call returns.

    numpy copies in the calling thread. torch takes two to four times as long for rows, and on busy
    cores waits milliseconds for its other threads. `gather` copies block by block, because numpy
    would copy twice to leave gaps for headers; `scatter` makes one call, which takes the GIL once.

    Args:
        pool: the objects, `[num_objects, *layout.block_shape]`.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._blocks = pool.view(len(pool), -1).view(torch.uint8).numpy()  # [blocks, bytes]

    @override
    def gather(self, object_ids: Sequence[int], segment: Segment) -> None:
        payload = segment.payload.numpy()
        for slot, object_id in enumerate(object_ids):
            payload[slot] = self._blocks[object_id]

    @override
    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> None:
        self._blocks[np.asarray(object_ids)] = segment.payload.numpy()[: len(object_ids)]

    @override
    def rows(self, object_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._blocks[object_id]) for object_id in object_ids]

    @override
    def close(self) -> None:
        """Does nothing: no copy is ever under way."""


class ConvertingCopier(BlockCopier):
    """Copies objects in host memory that are converted, or are parts of blocks.

    The thread that waits for a copy makes it, because it takes milliseconds, which would delay the
    engine's step.

    Args:
        pool: the pool, `[num_blocks, *slicing.layout.block_shape]`.
        slicing: how the pool is cut into objects.
    """

    def __init__(self, pool: torch.Tensor, slicing: BlockSlicing) -> None:
        self._objects = open_pool(pool, slicing)

    @override
    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy:
        return _Gather(self._objects, object_ids, segment)

    @override
    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy:
        return _Scatter(self._objects, object_ids, segment)

    @override
    def close(self) -> None:
        """Does nothing: the threads that make the copies have ended."""


@dataclass(frozen=True, slots=True)
class _Gather(Copy):
    objects: PoolObjects
    object_ids: Sequence[int]
    segment: Segment

    @override
    def wait(self) -> None:
        payload = self.segment.payload[: len(self.object_ids)]
        _check_range(self.objects.read(self.object_ids, payload))


@dataclass(frozen=True, slots=True)
class _Scatter(Copy):
    objects: PoolObjects
    object_ids: Sequence[int]
    segment: Segment

    @override
    def wait(self) -> None:
        payload = self.segment.payload[: len(self.object_ids)]
        _check_range(self.objects.write(payload, self.object_ids))


def _check_range(overflowed: torch.Tensor | None) -> None:
    if overflowed is not None and bool(overflowed):
        raise RangeError
