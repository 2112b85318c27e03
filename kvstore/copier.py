"""`BlockCopier`: how blocks get from the pool into segments and back, whatever the pool is on.

The connector's worker starts copies in the engine's thread, which never waits
for a device: what is not over at once is waited for in a thread of the worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from kernels import gather_blocks, scatter_blocks
from kvstore.layout import KvLayout
from kvstore.staging import Segment

__all__ = ["BlockCopier", "Copy", "HostCopier", "make_copier"]


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Returns once the bytes are where they shall be. Any thread may call it.

        Raises:
            RuntimeError: the device failed; the bytes are undefined.
        """


class BlockCopier(ABC):
    """Copies blocks between a pool and segments. Engine thread only.

    Until a copy is over, its segment and its blocks are its own: others write
    to neither, and read nothing that it writes.
    """

    @abstractmethod
    def gather(self, block_ids: Sequence[int], segment: Segment) -> Copy | None:
        """Copies blocks of the pool into the payloads of the first slots.

        Returns:
            What to wait for; None if the copy is over.

        Raises:
            RuntimeError: the device refused; nothing is under way.
        """

    @abstractmethod
    def scatter(self, segment: Segment, block_ids: Sequence[int]) -> Copy | None:
        """Copies the payloads of the first slots into blocks of the pool; as `gather`."""

    @abstractmethod
    def close(self) -> None:
        """Returns once no copy is under way. Idempotent."""


class HostCopier(BlockCopier):
    """Copies in memory: over when the call returns.

    Args:
        pool: the pool, `[num_blocks, *layout.block_shape]`.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool

    def gather(self, block_ids: Sequence[int], segment: Segment) -> None:
        """See `BlockCopier.gather`."""
        gather_blocks(self._pool, block_ids, segment.payload[: len(block_ids)])

    def scatter(self, segment: Segment, block_ids: Sequence[int]) -> None:
        """See `BlockCopier.scatter`."""
        scatter_blocks(segment.payload[: len(block_ids)], self._pool, block_ids)

    def close(self) -> None:
        """See `BlockCopier.close`."""


def make_copier(pool: torch.Tensor, layout: KvLayout) -> BlockCopier:
    """What copies blocks of this pool."""
    if pool.device.type != "cuda":
        return HostCopier(pool)
    from kvstore.side_streams import SideStreamCopier

    return SideStreamCopier(pool, layout)
