"""How blocks get from a peer into slots: of a segment, or of a pool.

    GrpcPlane   the peer sends them in the answer
    PullPlane   the peer says where they lie, this process reads them there
    PushPlane   this process says where to, the peer writes them there

Each slot gets the codec's header and the block's bytes; whoever takes them from
there verifies them. So what comes late or damaged spoils a slot at most. That
nobody writes to a slot that has been given to another load is `InDoubtError`'s
matter. Where this process moves the bytes itself, slots may be a pool's; a peer
that writes them may be late, and gets segments alone to write to.

`PeerBackend`: peers as a `BlockMover` sees them; see `kvstore.mover.backend.Backend`.
"""

import ctypes
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import ClassVar

import grpc

from baton.v1 import kv_peer_pb2 as pb
from kvstore.codec import HEADER_BYTES
from kvstore.jobs import LoadJob, SaveJob
from kvstore.mover.backend import InDoubtError
from kvstore.peer.address import PeerAddress
from kvstore.peer.framing import FrameFiller
from kvstore.peer.lender import Lender
from kvstore.peer.locations import BlockLocations, ranges_to_proto
from kvstore.peer.open_reads import BlockRequest, OpenReads
from kvstore.peer.peers import GenerationGoneError, Peer, PeerRefusedError, Peers, is_refusal
from kvstore.peer.renewals import Renewals
from kvstore.peer.settlements import Settlements
from kvstore.peer.transport import PeerTransport, RangeTable, TransferError, make_ranges
from kvstore.store import GetStatus, KvObject, StoreUnavailableError

__all__ = ["DataPlane", "GrpcPlane", "PeerBackend", "PullPlane", "PushPlane"]

# Of a push's time, so that the answer comes before the call's deadline.
_WRITE_SHARE = 0.8
_ASK_S = 2.0


class DataPlane(ABC):
    """Fetches blocks. Called in I/O threads, several at once."""

    takes_frames: ClassVar[bool]
    """See `Backend.takes_frames`."""

    def fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        """Fills the slots of the leading blocks that the peer has; returns how many.

        Raises:
            PeerRefusedError: it does not lend them.
            StoreUnavailableError: they did not come in time.
            InDoubtError: so, and something may still write to the slots.
        """
        return peer.ask(lambda: self._fetch(peer, request, slots))

    @abstractmethod
    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        """As `fetch`; what grpc raises is for `Peer.ask`."""


class GrpcPlane(DataPlane):
    """The bytes come in the answer to a call."""

    takes_frames = True

    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        return _read_answer(peer, request, slots)


class PullPlane(DataPlane):
    """Reads the blocks where they lie.

    Args:
        transport: what reads.
        settlements: who waits for reads in doubt.
        reads: who asks peers where blocks lie.
    """

    takes_frames = True

    def __init__(
        self, transport: PeerTransport, settlements: Settlements, reads: OpenReads
    ) -> None:
        self._transport = transport
        self._settlements = settlements
        self._reads = reads

    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        if not peer.is_added:
            _add(self._transport, peer, request)
            peer.is_added = True
            request = request.begun_anew()
        opened = self._reads.find(peer, request)
        locations = opened.leading(request.keys)
        timeout_s = min(request.remaining_s, opened.remaining_s)
        num_read = self._read(peer, locations, slots, timeout_s)
        if num_read < len(locations):
            return num_read + _read_answer(peer, request.rest(num_read), slots[num_read:])
        return num_read

    def _read(
        self,
        peer: Peer,
        locations: BlockLocations,
        slots: Sequence[KvObject],
        timeout_s: float,
    ) -> int:
        """Reads the leading blocks that can be reached so; returns how many."""
        num_blocks = locations.ranges.num_reachable
        if not num_blocks:
            return 0
        places = locations.select(range(num_blocks))
        targets = places.ranges.parts_of(_payload_ranges(slots[:num_blocks]))
        try:
            self._transport.read(peer.address.peer_id, places.ranges.table, targets, timeout_s)
        except TransferError as error:
            raise self._give_up(peer, error) from error
        return _write_headers(places.headers, slots)

    def _give_up(self, peer: Peer, error: TransferError) -> StoreUnavailableError:
        """Cuts the peer off; the next read adds it anew."""
        peer.is_added = False
        has_settled = self._transport.remove_peer(peer.address.peer_id)
        message = f"{peer.address.endpoint}: {error}"
        if error.is_settled:
            return StoreUnavailableError(message)
        return InDoubtError(message, self._settlements.add(has_settled, for_good=True))


class PushPlane(DataPlane):
    """Has the blocks written into the slots.

    Args:
        transport: what the slots are registered with.
        settlements: who waits for writes in doubt.
        peers: where to ask what became of them.
        generation: of this process.
    """

    takes_frames = False

    def __init__(
        self, transport: PeerTransport, settlements: Settlements, peers: Peers, generation: bytes
    ) -> None:
        self._transport, self._settlements = transport, settlements
        self._peers, self._generation = peers, generation

    def _fetch(self, peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
        is_first = not peer.is_added
        if is_first:  # for nothing but `_has_settled`
            _add(self._transport, peer, request)
            request = request.begun_anew()
        message = pb.PushBlocksRequest(
            blocks=request.to_proto(peer.address),
            push_id=os.urandom(16),
            reader_generation=self._generation,
            reader_metadata=self._transport.metadata(),
            targets=ranges_to_proto(_payload_ranges(slots)),
            timeout_ms=int(request.remaining_s * 1000 * _WRITE_SHARE),
        )
        # What the peer does to meet this process for the first time may take as long again.
        timeout_s = 2 * request.remaining_s if is_first else request.remaining_s
        pushed = self._push(peer, message, timeout_s)
        peer.is_added = True
        num_pushed = _write_headers(pushed.headers, slots)
        if num_pushed < len(slots):  # missing, or of a type that must be converted first
            return num_pushed + _read_answer(peer, request.rest(num_pushed), slots[num_pushed:])
        return num_pushed

    def _push(
        self, peer: Peer, message: pb.PushBlocksRequest, timeout_s: float
    ) -> pb.PushBlocksResponse:
        try:
            pushed: pb.PushBlocksResponse = peer.stub.PushBlocks(message, timeout=timeout_s)
        except grpc.RpcError as error:
            if is_refusal(error):
                raise
            raise self._in_doubt(peer, message.push_id, "a push was not answered") from error
        if not pushed.is_settled:
            raise self._in_doubt(peer, message.push_id, pushed.error)
        if pushed.error:
            raise StoreUnavailableError(f"{peer.address.endpoint}: {pushed.error}")
        return pushed

    def _in_doubt(self, peer: Peer, push_id: bytes, cause: str) -> InDoubtError:
        address = peer.address
        has_ended = self._transport.watch(address.peer_id)
        peer.is_added = False  # the next push first asks who is there
        has_settled = self._settlements.add(lambda: self._has_settled(address, push_id, has_ended))
        return InDoubtError(f"{address.endpoint}: {cause}", has_settled)

    def _has_settled(
        self, address: PeerAddress, push_id: bytes, has_ended: Callable[[], bool] | None
    ) -> bool:
        """Whether the peer says so, or is gone with all that it had begun."""
        if has_ended is not None and has_ended():
            return self._has_arrived(address)
        message = pb.SettlePushRequest(generation=address.generation, push_id=push_id)
        try:
            with self._peers.use(address) as peer:
                return peer.ask(lambda: peer.stub.SettlePush(message, timeout=_ASK_S)).is_settled
        except GenerationGoneError:
            # Who closes its port before it ends may still write.
            return has_ended is None and self._has_arrived(address)
        except StoreUnavailableError:
            return False

    def _has_arrived(self, address: PeerAddress) -> bool:
        """Whether nothing of a peer that is gone is on its way any more."""
        self._transport.remove_peer(address.peer_id)
        return self._transport.has_settled(address.peer_id)


def _add(transport: PeerTransport, peer: Peer, request: BlockRequest) -> None:
    """Makes the transport know the peer."""
    described = peer.stub.Describe(pb.DescribeRequest(), timeout=request.remaining_s)
    if described.generation != peer.address.generation:
        raise GenerationGoneError(f"{peer.address.endpoint}: another process answers")
    try:
        transport.add_peer(peer.address.peer_id, described.metadata)
    except TransferError as error:
        raise StoreUnavailableError(f"{peer.address.endpoint}: {error}") from error


def _read_answer(peer: Peer, request: BlockRequest, slots: Sequence[KvObject]) -> int:
    """Has the leading blocks sent; returns how many came whole."""
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
    """Puts headers into the leading slots; returns how many."""
    num_blocks, rest = divmod(len(headers), HEADER_BYTES)
    if rest or num_blocks > len(slots):
        raise StoreUnavailableError(f"{len(headers)} bytes of headers for {len(slots)} blocks")
    starts = range(0, len(headers), HEADER_BYTES)
    for start, slot in zip(starts, slots, strict=False):
        slot.header[:] = headers[start : start + HEADER_BYTES]
    return num_blocks


def _payload_ranges(slots: Sequence[KvObject]) -> RangeTable:
    """Where the slots' blocks go."""
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(slot.payload)) for slot in slots]
    return make_ranges(addresses, [slot.payload.nbytes for slot in slots])


_logger = logging.getLogger("baton.kvstore")


class PeerBackend:
    """Fetches what handoffs offer; what is put is lent.

    Args:
        peers: who lends.
        plane: how bytes come.
        renewals: which leases are known to be lost.
        lender: takes blocks that had to be gathered.
        timeout_s: longest time of a fetch.
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
        """Own form of a block in words; set when the pool is registered."""

    @property
    def takes_frames(self) -> bool:
        """See `Backend.takes_frames`."""
        return self._plane.takes_frames

    def num_held(self, keys: Sequence[bytes]) -> int:
        """See `Backend.num_held`. Each lease has its own."""
        return 0

    def put(self, job: SaveJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> None:
        """See `Backend.put`."""
        self._lender.put(job, keys, slots)

    def fetch(
        self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[KvObject]
    ) -> Sequence[GetStatus]:
        """See `Backend.fetch`. What a peer does not lend, or lends no longer, is missing."""
        num_blocks = self._fetch(job, keys, slots)
        hits, missing = [GetStatus.HIT] * num_blocks, len(keys) - num_blocks
        return hits + [GetStatus.MISSING] * missing

    def discard(self, key: bytes) -> None:
        """See `Backend.discard`. The bytes came to harm on the way: nothing is to be removed."""

    def _fetch(self, job: LoadJob, keys: Sequence[bytes], slots: Sequence[KvObject]) -> int:
        handoff = job.handoff
        if handoff is None or self._renewals.is_lost(handoff.handoff_id):
            return 0
        request = BlockRequest(
            lease_id=handoff.handoff_id,
            load_id=job.job_id,
            load_keys=job.keys,
            keys=keys,
            layout=self.layout,
            timeout_s=self._timeout_s,
        )
        try:
            with self._peers.use(PeerAddress.from_params(handoff.connector_params)) as peer:
                return self._plane.fetch(peer, request, slots)
        except (PeerRefusedError, ValueError) as error:
            _logger.warning("KV of handoff %s cannot be had: %s", handoff.handoff_id, error)
            return 0
