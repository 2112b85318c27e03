"""`BlockCopier`: how a pool's objects get into segments and back, whatever the pool is on.

The connector's worker starts copies in the engine's thread, which never waits
for a device nor converts: what is not over at once is waited for in a thread of the worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvstore.mover.pool_objects import PoolObjects, as_objects, open_pool
from kvstore.mover.staging import Segment
from kvstore.transfer_form import BlockSlicing, RangeError

__all__ = ["BlockCopier", "ConvertingCopier", "Copy", "HostCopier", "make_copier"]


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Returns once the bytes are where they shall be. Any thread may call it.

        Raises:
            RangeError: the type copied to cannot hold what there was; the bytes must not be used.
            RuntimeError: the device failed; the bytes are undefined.
        """


class BlockCopier(ABC):
    """Copies objects between a pool and segments. Engine thread only, but for `rows`.

    Until a copy is over, its segment and its blocks are its own: others write
    to neither, and read nothing that it writes.
    """

    @abstractmethod
    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy | None:
        """Copies objects of the pool into the payloads of the first slots.

        Args:
            object_ids: as `BlockSlicing` numbers them; where blocks go as they are, blocks.
            segment: has a slot for each.

        Returns:
            What to wait for; None if the copy is over.

        Raises:
            RuntimeError: the device refused; nothing is under way.
        """

    @abstractmethod
    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy | None:
        """Copies the payloads of the first slots into objects of the pool; as `gather`."""

    def rows(self, object_ids: Sequence[int]) -> list[memoryview] | None:
        """Where objects lie in the pool, for who needs no copy. Any thread may ask.

        Returns:
            Each object's bytes, writable; None if others cannot get at them, or they are not
            the object.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Returns once no copy is under way. Idempotent."""


class HostCopier(BlockCopier):
    """Copies blocks in memory as they are: over when the call returns.

    In the calling thread and by numpy: torch's copies of rows take two to four times as long,
    and where cores are busy they wait milliseconds for torch's other threads. Gathered block by
    block, for numpy copies rows twice to leave gaps between them; scattered in one call, which
    waits for the interpreter's lock once.

    Args:
        pool: the pool, `[num_blocks, *layout.block_shape]`.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._blocks = pool.view(len(pool), -1).view(torch.uint8).numpy()  # [blocks, bytes]

    def gather(self, object_ids: Sequence[int], segment: Segment) -> None:
        """See `BlockCopier.gather`."""
        payload = segment.payload.numpy()
        for slot, object_id in enumerate(object_ids):
            payload[slot] = self._blocks[object_id]

    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> None:
        """See `BlockCopier.scatter`."""
        self._blocks[np.asarray(object_ids)] = segment.payload.numpy()[: len(object_ids)]

    def rows(self, object_ids: Sequence[int]) -> list[memoryview]:
        """See `BlockCopier.rows`."""
        return [memoryview(self._blocks[object_id]) for object_id in object_ids]

    def close(self) -> None:
        """See `BlockCopier.close`."""


class ConvertingCopier(BlockCopier):
    """Copies in memory what is converted, or part of a block: in the thread that waits.

    What takes milliseconds would hold up the engine's step. The blocks are the copy's own, so
    it does not matter which thread touches them.

    Args:
        pool: the pool, `[num_blocks, *cut.layout.block_shape]`.
        cut: how it is cut.
    """

    def __init__(self, pool: torch.Tensor, cut: BlockSlicing) -> None:
        self._objects = open_pool(pool, cut)

    def gather(self, object_ids: Sequence[int], segment: Segment) -> Copy:
        """See `BlockCopier.gather`."""
        return _Gather(self._objects, object_ids, segment)

    def scatter(self, segment: Segment, object_ids: Sequence[int]) -> Copy:
        """See `BlockCopier.scatter`."""
        return _Scatter(self._objects, object_ids, segment)

    def close(self) -> None:
        """See `BlockCopier.close`: those who wait have ended."""


@dataclass(frozen=True, slots=True)
class _Gather:
    objects: PoolObjects
    object_ids: Sequence[int]
    segment: Segment

    def wait(self) -> None:
        """See `Copy.wait`."""
        payload = self.segment.payload[: len(self.object_ids)]
        _check_range(self.objects.read(self.object_ids, payload))


@dataclass(frozen=True, slots=True)
class _Scatter:
    objects: PoolObjects
    object_ids: Sequence[int]
    segment: Segment

    def wait(self) -> None:
        """See `Copy.wait`."""
        payload = self.segment.payload[: len(self.object_ids)]
        _check_range(self.objects.write(payload, self.object_ids))


def _check_range(overflowed: torch.Tensor | None) -> None:
    if overflowed is not None and bool(overflowed):
        raise RangeError


def make_copier(pool: torch.Tensor, cut: BlockSlicing) -> BlockCopier:
    """What copies objects of this pool."""
    if pool.device.type == "cuda":
        from kvstore.mover.side_streams import SideStreamCopier

        return SideStreamCopier(pool, cut)
    return HostCopier(as_objects(pool, cut)) if cut.is_native else ConvertingCopier(pool, cut)
