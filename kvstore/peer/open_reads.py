"""`OpenReads`: where the blocks of loads lie, as their peers say. Asked once for many pieces.

`BlockRequest`: what a reader wants of a peer, and how long it waits.

`ReadCloser`: tells peers which of their blocks are no longer read.
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
        load_keys: of the load's blocks.
        keys: of those that are wanted now, in the load's order.
        layout: the reader's form of a block in words.
        timeout_s: longest wait for all of them.
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
        """Time left."""
        return max(0.0, self.began_at + self.timeout_s - time.monotonic())

    def begun_anew(self) -> "BlockRequest":
        """The request with all of its time: to meet a peer for the first time is not its matter."""
        return replace(self, began_at=time.monotonic())

    def rest(self, first: int) -> "BlockRequest":
        """The request without its leading blocks."""
        return replace(self, keys=self.keys[first:])

    def with_neighbours(self, num_blocks: int) -> "BlockRequest":
        """The request for all blocks of those runs of `num_blocks` of the load that its own are in.

        So pieces that come in any order ask for the same.
        """
        first, last = (self.load_keys.index(key) for key in (self.keys[0], self.keys[-1]))
        begin, end = first // num_blocks, last // num_blocks + 1
        return replace(self, keys=self.load_keys[begin * num_blocks : end * num_blocks])

    def to_proto(self, address: PeerAddress) -> pb.KvBlockList:
        """As a peer is asked for them."""
        return pb.KvBlockList(
            generation=address.generation,
            lease_id=self.lease_id,
            keys=self.keys,
            layout=self.layout,
        )


_ASK_S = 2.0

_logger = logging.getLogger("baton.kvstore")


class ReadCloser:
    """Tells it in a thread of its own, in one call for all reads of a peer that have ended
    meanwhile: a load must not wait for that. Where it fails, reads end at their deadlines.

    Args:
        peers: whose blocks were read.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._over: deque[tuple[PeerAddress, int]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-kv-close")

    def add(self, address: PeerAddress, read_id: int) -> None:
        """A read is over. Any thread may call it."""
        self._over.append((address, read_id))
        with suppress(RuntimeError):  # after `close`
            self._thread.submit(self._tell)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _tell(self) -> None:
        by_peer: dict[PeerAddress, list[int]] = {}
        for _ in range(len(self._over)):
            address, read_id = self._over.popleft()
            by_peer.setdefault(address, []).append(read_id)
        for address, read_ids in by_peer.items():
            message = pb.CloseBlocksRequest(generation=address.generation, read_ids=read_ids)
            try:
                with self._peers.use(address) as peer:
                    peer.stub.CloseBlocks(message, timeout=_ASK_S)
            except (grpc.RpcError, StoreUnavailableError, ValueError) as error:
                _logger.debug("%s is not told of the end of reads: %s", address.endpoint, error)


# In an answer: some 5 ms on both sides together, and 200 kB.
_MAX_RANGES = 16_384
# In a question, some 2 ms: for more, others move what the one before was about meanwhile.
_MAX_BLOCKS = 512
# Of what a piece could have: one that got less could fail where nothing is wrong.
_LEAST_SHARE = 3 / 4


@dataclass(frozen=True, slots=True)
class OpenRead:
    """What a peer answered to `OpenBlocks`.

    Attributes:
        address: of the peer.
        read_id: names the answer for `CloseBlocks`.
        asked: the blocks that it is about, each with its place in the question.
        locations: of the leading ones, which are there.
        granted_s: how long they stay, from when they were asked for.
        deadline: until when, by `time.monotonic`.
    """

    address: PeerAddress
    read_id: int
    asked: Mapping[bytes, int]
    locations: BlockLocations
    granted_s: float
    deadline: float

    @property
    def remaining_s(self) -> float:
        """How long the blocks stay."""
        return max(0.0, self.deadline - time.monotonic())

    def leading(self, keys: Sequence[bytes]) -> BlockLocations:
        """Where the leading blocks of a list lie, as far as they are there."""
        num_found = len(self.locations)
        places = takewhile(lambda place: place < num_found, (self.asked[key] for key in keys))
        return self.locations.select(list(places))


@dataclass(slots=True)
class _Load:
    """The reads of one load; the lock is held while another is opened."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reads: list[OpenRead] = field(default_factory=list)


class OpenReads:
    """The reads that are open for each load. Any thread may call any method.

    Args:
        closer: who tells peers of the end of reads.

    Attributes:
        ranges_per_block: how many a block of any peer can consist of at most; set before the first
            question.
    """

    def __init__(self, closer: ReadCloser) -> None:
        self.ranges_per_block = 1
        self._closer = closer
        self._lock = threading.Lock()
        self._loads: dict[int, _Load] = {}

    def find(self, peer: Peer, request: BlockRequest) -> OpenRead:
        """A read of the blocks asked for, with most of the request's time left.

        Opened for other blocks of the load, too, and used for these again.

        Raises:
            grpc.RpcError: the peer refuses, or does not answer.
            StoreUnavailableError: another thread's question for the same load took the time.
            ValueError: its answer makes no sense.
        """
        with self._lock:
            load = self._loads.setdefault(request.load_id, _Load())
        if not load.lock.acquire(timeout=request.remaining_s):
            raise StoreUnavailableError(f"{peer.address.endpoint} did not say where blocks lie")
        try:
            # What its peer has cut off need not be closed.
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
        """A load is over, and no `find` for it under way: its reads are closed.

        Unknown ids are fine.
        """
        with self._lock:
            load = self._loads.pop(load_id, None)
        for read in load.reads if load is not None else ():
            self._closer.add(read.address, read.read_id)


def _lasts(read: OpenRead, request: BlockRequest) -> bool:
    return read.remaining_s >= _LEAST_SHARE * min(request.remaining_s, read.granted_s)


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
