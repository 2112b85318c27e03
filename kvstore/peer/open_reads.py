"""`OpenReads`: where the blocks of loads lie, as their peers say. Asked once for many pieces."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.address import PeerAddress
from kvstore.peer.block_request import BlockRequest
from kvstore.peer.locations import BlockLocations
from kvstore.peer.peers import Peer
from kvstore.peer.read_closer import ReadCloser
from kvstore.store import StoreUnavailableError

__all__ = ["OpenRead", "OpenReads"]

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
