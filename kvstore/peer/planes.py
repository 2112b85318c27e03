"""How blocks get from a peer into slots of a staging segment or of the pool.

    GrpcPlane   the peer sends the blocks in the answer to a call
    PullPlane   the peer says where the blocks lie, and this process reads them there; from a peer
                whose memory it cannot read, it takes them as `GrpcPlane` does

Each slot gets the codec's header and the block's bytes; the caller verifies
them. So bytes that come late or damaged spoil a slot at most. If something may
still write to slots after a failure, the plane raises `InDoubtError`.

`PeerBackend`: peers as the mover sees them; see `kvstore.mover.backend.Backend`.
"""

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

from typing_extensions import override

from baton.v1 import kv_peer_pb2 as pb
from kvstore.codec import HEADER_BYTES
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadJob, SaveJob
from kvstore.mover.backend import InDoubtError
from kvstore.peer.address import PeerAddress, holders_of, select_held
from kvstore.peer.framing import FrameFiller
from kvstore.peer.lender import Lender
from kvstore.peer.locations import BlockLocations
from kvstore.peer.open_reads import BlockRequest, OpenReads
from kvstore.peer.peers import GenerationGoneError, Peer, PeerRefusedError, Peers
from kvstore.peer.renewals import Renewals
from kvstore.peer.transport import (
    PeerTransport,
    RangeTable,
    SettlementWatch,
    TransferError,
    UnreadablePeerError,
    make_ranges,
)
from kvstore.store import GetStatus, KvObject, StoreUnavailableError

__all__ = ["DataPlane", "GrpcPlane", "PeerBackend", "PullPlane"]

# To connect takes up to some tenths of a second, however short the timeout of a fetch is.
_MIN_CONNECT_S = 2.0
# Ids of peers that cannot be read, 32 bytes each; with more, the oldest are tried again.
_MAX_UNREADABLE = 4096

_logger = logging.getLogger("baton.kvstore")


class DataPlane(ABC):
    """Fetches blocks. I/O threads call it, several at once."""

    def fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        """Fills the slots of the leading blocks that the peer lends; returns how many.

        Raises:
            PeerRefusedError: the peer does not lend them.
            StoreUnavailableError: they did not come in time.
            InDoubtError: they did not come, and something may still write to the slots.
        """
        return peer.ask(lambda: self._fetch(peer, request, slots))

    @abstractmethod
    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        """Does what `fetch` says; may raise grpc's errors too, which `Peer.ask` translates."""


class GrpcPlane(DataPlane):
    """Takes blocks from the answers to ReadBlocks."""

    @override
    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        return _read_answer(peer, request, slots)


class PullPlane(DataPlane):
    """Reads blocks where they lie in the peer's memory, if the transport can.

    The first fetch from a peer finds that out. A peer that cannot be read is not tried again.

    Args:
        transport: reads the peer's memory.
        settlements: watches failed reads that may still write.
        reads: asks peers where blocks lie.
    """

    def __init__(
        self, transport: PeerTransport, settlements: SettlementWatch, reads: OpenReads
    ) -> None:
        self._transport = transport
        self._settlements = settlements
        self._reads = reads
        self._unreadable: dict[str, None] = {}  # ids of peers, the oldest first
        self._warned: set[str] = set()  # reasons why peers cannot be read

    @override
    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        if not self._is_met(peer):
            self._meet(peer, request)
            request = request.begun_anew()
        if not peer.is_added:
            return _read_answer(peer, request, slots)
        opened = self._reads.find(peer, request)
        locations = opened.leading(request.keys)
        timeout_s = min(request.remaining_s, opened.remaining_s)
        num_read = self._read(peer, locations, slots, timeout_s)
        if num_read < len(locations):
            return num_read + _read_answer(peer, request.rest(num_read), slots[num_read:])
        return num_read

    def _is_met(self, peer: Peer) -> bool:
        """Whether it is known how the peer is read."""
        return peer.is_added or peer.address.peer_id in self._unreadable

    def _meet(self, peer: Peer, request: BlockRequest) -> None:
        """Finds out whether the transport can read the peer's memory, in one thread at a time."""
        timeout_s = max(request.timeout_s, _MIN_CONNECT_S)
        if not peer.meeting.acquire(timeout=timeout_s):
            raise StoreUnavailableError(f"{peer.address.endpoint}: not answered in time")
        try:
            if not self._is_met(peer):
                self._add(peer, request, timeout_s)
        finally:
            peer.meeting.release()

    def _add(self, peer: Peer, request: BlockRequest, timeout_s: float) -> None:
        described = peer.stub.Describe(pb.DescribeRequest(), timeout=request.timeout_s)
        if described.generation != peer.address.generation:
            raise GenerationGoneError(f"{peer.address.endpoint}: another process answers")
        try:
            self._transport.add_peer(peer.link_id, described.metadata, timeout_s)
        except UnreadablePeerError as error:
            self._note_unreadable(peer, error)
        except TransferError as error:
            raise StoreUnavailableError(f"{peer.address.endpoint}: {error}") from error
        else:
            peer.is_added = True

    def _note_unreadable(self, peer: Peer, error: UnreadablePeerError) -> None:
        """Notes a peer that cannot be read; logs a warning for the first one for this reason."""
        self._unreadable[peer.address.peer_id] = None
        if len(self._unreadable) > _MAX_UNREADABLE:
            self._unreadable.pop(next(iter(self._unreadable)), None)
        level = logging.DEBUG if error.reason in self._warned else logging.WARNING
        self._warned.add(error.reason)
        message = "KV blocks of %s come by gRPC, which is slower: %s cannot read its memory: %s"
        _logger.log(level, message, peer.address.endpoint, self._transport.name, error)

    def _read(
        self,
        peer: Peer,
        locations: BlockLocations,
        slots: Sequence[KvObject],
        timeout_s: float,
    ) -> int:
        """Reads the leading blocks that lie in registered memory as they are; returns how many."""
        num_blocks = locations.ranges.num_reachable
        if not num_blocks:
            return 0
        places = locations.select(range(num_blocks))
        targets = places.ranges.parts_of(_payload_ranges(slots[:num_blocks]))
        try:
            self._transport.read(peer.link_id, places.ranges.table, targets, timeout_s)
        except TransferError as error:
            raise self._give_up(peer, error) from error
        return _write_headers(places.headers, slots)

    def _give_up(self, peer: Peer, error: TransferError) -> StoreUnavailableError:
        """Notes that a read has failed; the next fetch adds the peer anew."""
        peer.is_added = False
        message = f"{peer.address.endpoint}: {error}"
        if error.is_settled:
            return StoreUnavailableError(message)
        return InDoubtError(message, self._settlements.add(self._transport.settlement()))


def _read_answer(peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
    """Has the peer send the leading blocks; returns how many came whole."""
    filler = FrameFiller(list(chain.from_iterable(slots)))
    message = pb.ReadBlocksRequest(blocks=request.to_proto(peer.address))
    call = peer.read_blocks(message, timeout=request.remaining_s)
    try:
        for data in call:
            filler.feed(data)
    finally:
        call.cancel()  # does nothing to a call that is over
    return filler.num_full // 2


def _write_headers(headers: bytes, slots: Sequence[KvObject]) -> int:
    """Copies headers into the leading slots; returns how many."""
    num_blocks, rest = divmod(len(headers), HEADER_BYTES)
    if rest or num_blocks > len(slots):
        raise StoreUnavailableError(f"{len(headers)} bytes of headers for {len(slots)} blocks")
    starts = range(0, len(headers), HEADER_BYTES)
    for start, slot in zip(starts, slots, strict=False):
        slot.header[:] = headers[start : start + HEADER_BYTES]
    return num_blocks


def _payload_ranges(slots: Sequence[KvObject]) -> RangeTable:
    """Returns the memory ranges of the slots' payloads."""
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(slot.payload)) for slot in slots]
    return make_ranges(addresses, [slot.payload.nbytes for slot in slots])


class PeerBackend:
    """Fetches the blocks that handoffs name, and lends the blocks that are put.

    It implements `kvstore.mover.backend.Backend`.

    Args:
        peers: the processes that lend.
        plane: fetches from them.
        renewals: knows which leases are lost.
        lender: lends blocks that were copied out of the pool first.
        timeout_s: longest time of a fetch.

    Attributes:
        layout: the form of this process's blocks in words; set when the pool is registered.
        slices: numbers of the slices of a block that this process's pool has; set then, too.
    """

    def __init__(
        self,
        peers: Peers,
        plane: DataPlane,
        renewals: Renewals,
        lender: Lender,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._plane = plane
        self._renewals = renewals
        self._lender = lender
        self._timeout_s = timeout_s
        self.layout = ""
        self.slices: Sequence[int] = (0,)

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Returns 0: each lease lends its own blocks."""
        return 0

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        """Lends blocks; see `Lender.put`."""
        self._lender.put(job, keys, slots)

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[KvObject]
    ) -> Sequence[GetStatus]:
        """Fills slots. Blocks that their peer does not lend, or lends no longer, are MISSING."""
        statuses = [GetStatus.MISSING] * len(keys)
        handoff = job.handoff
        if handoff is None:
            return statuses
        try:
            holders = holders_of(handoff.connector_params, self.slices)
        except ValueError as error:
            _log_failure(handoff, error)
            return statuses
        first = job.keys.index(keys[0])
        for address in dict.fromkeys(holders):
            indices = select_held(range(len(keys)), first, holders, address)
            request = BlockRequest(
                lease_id=handoff.handoff_id,
                load_id=job.job_id,
                load_keys=select_held(job.keys, 0, holders, address),
                keys=[keys[index] for index in indices],
                layout=self.layout,
                timeout_s=self._timeout_s,
            )
            num_read = self._fetch(handoff, address, request, [slots[index] for index in indices])
            for index in indices[:num_read]:
                statuses[index] = GetStatus.HIT
        return statuses

    def discard(self, key: bytes) -> None:
        """Does nothing: the bytes were damaged on their way, so the peer has none to remove."""

    def _fetch(
        self,
        handoff: KvHandoff,
        address: PeerAddress,
        request: BlockRequest,
        slots: Sequence[KvObject],
    ) -> int:
        """Fills the slots of the leading blocks that one peer lends; returns how many."""
        if not slots or self._renewals.is_lost(handoff.handoff_id, address):
            return 0
        try:
            with self._peers.use(address) as peer:
                return self._plane.fetch(peer, request, slots)
        except (PeerRefusedError, ValueError) as error:
            _log_failure(handoff, error)
            return 0


def _log_failure(handoff: KvHandoff, error: PeerRefusedError | ValueError) -> None:
    level = error.log_level if isinstance(error, PeerRefusedError) else logging.WARNING
    _logger.log(level, "KV of handoff %s cannot be loaded: %s", handoff.handoff_id, error)
