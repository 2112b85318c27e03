"""`OpenReads`: asks peers where the blocks of loads lie, once for many pieces of a load.

`BlockRequest`: the blocks that a reader wants from a peer, and how long it waits.

`ReadCloser`: reports to peers which reads have ended.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile

import grpc

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.address import PeerAddress
from kvstore.peer.locations import BlockLocations
from kvstore.peer.peers import Peer, Peers
from kvstore.store import StoreUnavailableError

__all__ = ["BlockRequest", "OpenRead", "OpenReads", "ReadCloser"]


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Blocks that a lease lends: a piece of a load.

    Attributes:
        lease_id: the lease.
        load_id: the load.
        load_keys: keys of all blocks of the load.
        keys: keys of the wanted blocks, in the load's order.
        layout: the reader's form of a block in words.
        timeout_s: longest wait for all wanted blocks.
        began_at: when the wait began, by `time.monotonic`.
    """

    lease_id: str
    load_id: int
    load_keys: Sequence[bytes]
    keys: Sequence[bytes]
    layout: str
    timeout_s: float
    began_at: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Seconds left of the wait."""
        return max(0.0, self.began_at + self.timeout_s - time.monotonic())

    def begun_anew(self) -> "BlockRequest":
        """Returns the request with all of its time, for use after the first contact with a peer."""
        return replace(self, began_at=time.monotonic())

    def rest(self, first: int) -> "BlockRequest":
        """Returns the request without its leading blocks."""
        return replace(self, keys=self.keys[first:])

    def with_neighbours(self, num_blocks: int) -> "BlockRequest":
        """Returns a request for more blocks of the load.

        The load is cut into runs of `num_blocks`; the request is for all runs that contain wanted
        blocks. So pieces ask for the same blocks, in whatever order they come.
        """
        first, last = (self.load_keys.index(key) for key in (self.keys[0], self.keys[-1]))
        begin, end = first // num_blocks, last // num_blocks + 1
        return replace(self, keys=self.load_keys[begin * num_blocks : end * num_blocks])

    def to_proto(self, address: PeerAddress) -> pb.KvBlockList:
        """Returns the wire form."""
        return pb.KvBlockList(
            generation=address.generation,
            lease_id=self.lease_id,
            keys=self.keys,
            layout=self.layout,
        )


_ASK_S = 2.0

_logger = logging.getLogger("baton.kvstore")


class ReadCloser:
    """Reports ends of reads, in one call for all of a peer's that have ended meanwhile.

    It has a thread of its own: loads must not wait for these calls. If one fails, the reads end at
    their deadlines.

    Args:
        peers: the processes that lend.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._ended: deque[tuple[PeerAddress, int]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-close")

    def add(self, address: PeerAddress, read_id: int) -> None:
        """Reports the end of a read later. Any thread may call it."""
        self._ended.append((address, read_id))
        with suppress(RuntimeError):  # after `close`
            self._thread.submit(self._report)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _report(self) -> None:
        by_peer: dict[PeerAddress, list[int]] = {}
        for _ in range(len(self._ended)):
            address, read_id = self._ended.popleft()
            by_peer.setdefault(address, []).append(read_id)
        for address, read_ids in by_peer.items():
            message = pb.CloseBlocksRequest(generation=address.generation, read_ids=read_ids)
            try:
                with self._peers.use(address) as peer:
                    peer.stub.CloseBlocks(message, timeout=_ASK_S)
            except (grpc.RpcError, StoreUnavailableError, ValueError) as error:
                _logger.debug("ends of reads do not reach %s: %s", address.endpoint, error)


# An answer with so many ranges takes some 5 ms on both sides together, and 200 kB.
_MAX_RANGES = 16_384
# A call for so many blocks takes some 2 ms. For the next ones a thread asks while others read.
_MAX_BLOCKS = 512
# Share of a piece's time that an open read must last: with less, a sound load could fail.
_MIN_SHARE = 3 / 4


@dataclass(frozen=True, slots=True)
class OpenRead:
    """An answer to `OpenBlocks`.

    Attributes:
        address: address of the peer.
        read_id: id for `CloseBlocks`.
        asked: the keys that were asked for, each with its index.
        locations: locations of the leading blocks that the peer lends.
        granted_s: how long they stay, from the call on.
        deadline: when they stay no longer, by `time.monotonic`.
    """

    address: PeerAddress
    read_id: int
    asked: Mapping[bytes, int]
    locations: BlockLocations
    granted_s: float
    deadline: float

    @property
    def remaining_s(self) -> float:
        """Seconds for which the blocks stay."""
        return max(0.0, self.deadline - time.monotonic())

    def leading(self, keys: Sequence[bytes]) -> BlockLocations:
        """Returns the locations of the leading blocks of a list that the peer lends."""
        num_found = len(self.locations)
        places = takewhile(lambda place: place < num_found, (self.asked[key] for key in keys))
        return self.locations.select(list(places))


@dataclass(slots=True)
class _OpenLoad:
    """The open reads of one load at one peer; the lock is held while another one is opened."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reads: list[OpenRead] = field(default_factory=list)


class OpenReads:
    """The open reads of each load. Any thread may call any method.

    Args:
        closer: reports ends of reads to peers.

    Attributes:
        ranges_per_block: the most ranges that a block of any peer can consist of; set before the
            first call of `find`.
    """

    def __init__(self, closer: ReadCloser) -> None:
        self.ranges_per_block = 1
        self._closer = closer
        self._lock = threading.Lock()
        self._loads: dict[int, dict[PeerAddress, _OpenLoad]] = {}

    def find(self, peer: Peer, request: BlockRequest) -> OpenRead:
        """Returns an open read of the wanted blocks that lasts for most of the request's time.

        A new one is opened for other blocks of the load too, which later calls then find.

        Raises:
            grpc.RpcError: the peer refuses, or does not answer.
            StoreUnavailableError: another thread's call for the same load took the time.
            ValueError: the parts of its answer do not fit together.
        """
        with self._lock:
            load = self._loads.setdefault(request.load_id, {}).setdefault(peer.address, _OpenLoad())
        if not load.lock.acquire(timeout=request.remaining_s):
            raise StoreUnavailableError(f"{peer.address.endpoint} did not say where blocks lie")
        try:
            # A read past its deadline was cut off by its peer and need not be closed.
            load.reads = [read for read in load.reads if read.remaining_s]
            for read in load.reads:
                if read.asked.keys() >= set(request.keys) and _lasts(read, request):
                    return read
            num_ranges = peer.ranges_per_block or self.ranges_per_block
            num_neighbours = max(1, min(_MAX_RANGES // num_ranges, _MAX_BLOCKS))
            load.reads.append(_open(peer, request, num_neighbours))
            return load.reads[-1]
        finally:
            load.lock.release()

    def end(self, load_id: int) -> None:
        """Closes the reads of a load that is over; no `find` for it is under way.

        Unknown ids are ignored.
        """
        with self._lock:
            loads = self._loads.pop(load_id, {})
        for load in loads.values():
            for read in load.reads:
                self._closer.add(read.address, read.read_id)


def _lasts(read: OpenRead, request: BlockRequest) -> bool:
    return read.remaining_s >= _MIN_SHARE * min(request.remaining_s, read.granted_s)


def _open(peer: Peer, request: BlockRequest, num_neighbours: int) -> OpenRead:
    asked = request.with_neighbours(num_neighbours)
    began_at, timeout_s = time.monotonic(), request.remaining_s
    message = pb.OpenBlocksRequest(
        blocks=asked.to_proto(peer.address), timeout_ms=int(timeout_s * 1000)
    )
    opened = peer.stub.OpenBlocks(message, timeout=timeout_s)
    locations = BlockLocations.from_proto(opened.locations)
    num_ranges = int(locations.ranges.counts.max(initial=0))
    peer.ranges_per_block = max(num_ranges, peer.ranges_per_block)
    granted_s = opened.timeout_ms / 1000
    return OpenRead(
        address=peer.address,
        read_id=opened.read_id,
        asked={key: index for index, key in enumerate(asked.keys)},
        locations=locations,
        granted_s=granted_s,
        deadline=began_at + granted_s,
    )
