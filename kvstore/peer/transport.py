"""`PeerTransport`: reads the registered memory of other processes.

Which blocks may be read, and for how long, is agreed over gRPC
(`kvstore.peer.service`); a transport only moves bytes.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "PeerTransport",
    "RangeTable",
    "SettlementWatch",
    "TransferError",
    "UnreadablePeerError",
    "make_ranges",
]

RangeTable = NDArray[np.uint64]
"""Ranges of registered memory, `[ranges, 3]`: the address of the first byte in the process that
registered it, the number of bytes, and the index of the GPU that holds them (0 for host memory).
"""

_PERIOD_S = 0.5


class TransferError(Exception):
    """A read failed; the bytes of its targets must not be used.

    Attributes:
        is_settled: whether nothing writes to the targets any more. If False, the library or a
            device may still do so until the function that `PeerTransport.settlement` returns
            says otherwise.
    """

    def __init__(self, message: str, *, is_settled: bool) -> None:
        super().__init__(message)
        self.is_settled = is_settled


class UnreadablePeerError(Exception):
    """The transport cannot read this peer's memory.

    Attributes:
        reason: why, in words that are the same for all peers of this kind.
    """

    def __init__(self, reason: str, cause: str) -> None:
        super().__init__(f"{reason} ({cause})")
        self.reason = reason


def make_ranges(
    addresses: Sequence[int], num_bytes: ArrayLike, device_ids: ArrayLike = 0
) -> RangeTable:
    """Returns a table of ranges.

    Args:
        addresses: of the first bytes.
        num_bytes: one length for each range, or one for all.
        device_ids: one GPU index for each range, or one for all.
    """
    table = np.empty((len(addresses), 3), np.uint64)
    table[:, 0], table[:, 1], table[:, 2] = addresses, num_bytes, device_ids
    return table


class PeerTransport(ABC):
    """Reads peers' memory for one process. Any thread may call any method.

    Transfers with one peer do not wait for those with another. A process that restarted is another
    peer, and so is one that was opened anew.
    """

    name: ClassVar[str]
    """The scheme of the connector's URL."""

    @abstractmethod
    def register(self, address: int, num_bytes: int, *, device: str) -> None:
        """Makes own memory usable in transfers; called once for each memory, before its use.

        Args:
            address: of the first byte. The memory must stay allocated until `close`.
            num_bytes: length.
            device: "cpu" or a GPU such as "cuda:0".
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Returns the data by which another process reads the memory registered so far."""

    @abstractmethod
    def add_peer(self, peer_id: str, metadata: bytes, timeout_s: float) -> None:
        """Connects to a peer and reads some known bytes of it, to find out whether that works.

        Adding a peer again does nothing, unless a read of its memory failed since.

        Args:
            peer_id: name for `read` and `remove_peer`.
            metadata: what the peer's `metadata` returned.
            timeout_s: longest wait for other connections, and again for the known bytes.

        Raises:
            UnreadablePeerError: its memory cannot be read.
            TransferError: that could not be found out; settled.
        """

    @abstractmethod
    def remove_peer(self, peer_id: str) -> None:
        """Forgets a peer; reads of its memory that are under way fail. Unknown ids are ignored."""

    @abstractmethod
    def settlement(self) -> Callable[[], bool]:
        """Returns a function that says whether no read that has failed can write any more."""

    @abstractmethod
    def read(
        self, peer_id: str, sources: RangeTable, targets: RangeTable, timeout_s: float
    ) -> None:
        """Copies ranges of a peer's memory into own ones; returns when the bytes are there.

        A read that fails removes the peer, unless another thread has added it again meanwhile.

        Args:
            peer_id: the peer whose memory `sources` are.
            sources: what to copy.
            targets: where to copy it; range by range as long as `sources`.
            timeout_s: longest wait.

        Raises:
            TransferError: not all bytes arrived.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers, within bounded time. Idempotent."""


@dataclass(slots=True, eq=False)
class _Doubt:
    """A read that may still write.

    Attributes:
        ask: returns whether it has settled.
        settled: set once it has.
    """

    ask: Callable[[], bool]
    settled: threading.Event = field(default_factory=threading.Event)


class SettlementWatch:
    """Asks every half second whether reads in doubt have settled, and wakes the engine then.

    The thread that asks lives only while there are such reads.

    Args:
        wake: called when a read has settled.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._open: list[_Doubt] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def num_open(self) -> int:
        """Number of reads that have not settled."""
        return len(self._open)

    def add(self, ask: Callable[[], bool]) -> Callable[[], bool]:
        """Starts to call `ask`; returns a function that says whether it has returned True."""
        doubt = _Doubt(ask)
        with self._lock:
            self._open.append(doubt)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="baton-kv-settle", daemon=True
                )
                self._thread.start()
        return doubt.settled.is_set

    def close(self) -> None:
        """Ends the thread; reads that have not settled count as in doubt for good. Idempotent."""
        self._closed.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_PERIOD_S):
            for doubt in [doubt for doubt in self._open if doubt.ask()]:
                doubt.settled.set()
                self._open.remove(doubt)
                self._wake()
            with self._lock:
                if not self._open:
                    self._thread = None
                    return
