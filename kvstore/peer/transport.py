"""`PeerTransport`: one-sided transfers between the registered memory of two processes.

The data plane of peer connectors. Who may read what, and when, is settled on
the control plane (`kvstore.peer.service`); a transport only moves bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PeerTransport", "RangeTable", "TransferError", "make_ranges"]

RangeTable = NDArray[np.uint64]
"""Runs of bytes in registered memory, `[ranges, 3]`: the address of the first byte in the process
that registered it, the length, and the GPU that it lies on, 0 for host memory.
"""


class TransferError(Exception):
    """The bytes did not arrive; nothing of the targets may be used.

    Attributes:
        is_settled: whether nothing will write to the targets any more. If not, the remote
            or the library may do so until `PeerTransport.has_settled` says otherwise.
    """

    def __init__(self, message: str, *, is_settled: bool) -> None:
        super().__init__(message)
        self.is_settled = is_settled


def make_ranges(
    addresses: Sequence[int], num_bytes: ArrayLike, device_ids: ArrayLike = 0
) -> RangeTable:
    """A table of ranges.

    Args:
        addresses: of their first bytes.
        num_bytes: their lengths, or the length of all.
        device_ids: of their GPUs, or of the one of all.
    """
    table = np.empty((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = addresses, num_bytes, device_ids
    return table


class PeerTransport(ABC):
    """One process's agent. Any thread may call any method; peers do not wait for each other.

    A peer's id names a *generation* of a process: a restart is another peer.
    """

    name: ClassVar[str]
    """As it stands in URLs."""

    @abstractmethod
    def register(self, address: int, num_bytes: int, *, device: str) -> None:
        """Makes memory reachable, once, before use.

        Args:
            address: of the first byte; the memory stays until `close`.
            num_bytes: length.
            device: "cpu" or, say, "cuda:0".
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What another agent needs to reach this one; after all `register` calls."""

    @abstractmethod
    def add_peer(self, peer_id: str, metadata: bytes) -> None:
        """Makes a peer reachable. Adding one that is there does nothing.

        Raises:
            TransferError: it cannot be reached; settled.
        """

    @abstractmethod
    def remove_peer(self, peer_id: str) -> Callable[[], bool]:
        """Forgets a peer; transfers with it that are under way fail. Unknown ids are fine.

        Returns:
            What tells whether nothing that was begun with it until now can write to memory any
            more; what is begun when it has been added again does not matter.
        """

    @abstractmethod
    def has_settled(self, peer_id: str) -> bool:
        """Whether nothing that was begun with a peer before it was last removed can write to
        memory any more: neither this agent's reads nor the peer's own writes to it, if it is gone.
        """

    @abstractmethod
    def watch(self, peer_id: str) -> Callable[[], bool] | None:
        """What tells, whenever it is called, whether a peer's process has ended; None where that
        cannot be seen, or if the peer is not added.

        It does not block, and goes on telling once the peer is removed.
        """

    @abstractmethod
    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        """Pulls: copies a peer's ranges into own ones; returns when the bytes are there.

        Args:
            peer_id: whose memory `sources` are.
            sources: what to copy; one to one with the targets, of equal lengths.
            targets: where to.
            timeout_s: longest wait.

        Raises:
            TransferError: see there.
        """

    @abstractmethod
    def write(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        """Pushes: as `read`, with own sources and a peer's targets."""

    @abstractmethod
    def close(self) -> None:
        """Gives up what is under way, within bounded time. Idempotent."""
