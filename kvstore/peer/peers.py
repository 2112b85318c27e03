"""`Peers`: whom this process reads from: channels, breakers, who is there no more."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import grpc

from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc
from kvstore.breaker import Breaker, BreakerCounts
from kvstore.peer.address import PeerAddress
from kvstore.peer.framing import to_view
from kvstore.peer.service import CHANNEL_OPTIONS, GENERATION_REFUSED, SERVICE_NAME
from kvstore.peer.transport import PeerTransport
from kvstore.store import StoreUnavailableError

__all__ = ["GenerationGoneError", "Peer", "PeerRefusedError", "Peers", "is_refusal"]

_MAX_PEERS = 64
_IDLE_S = 60.0
_REFUSALS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)

_logger = logging.getLogger("baton.kvstore")

_Result = TypeVar("_Result")


class PeerRefusedError(Exception):
    """The peer answers, but does not lend: the lease is over, or its KV has another form."""


class GenerationGoneError(PeerRefusedError):
    """The process that lent is gone; another one answers at its address."""


class Peer:
    """One generation of a process that lends. Any thread may use it.

    Args:
        address: where it is.

    Attributes:
        stub: its service. Calls go through `ask`, each with a timeout.
        read_blocks: its ReadBlocks, whose messages stay the bytes that they are.
        breaker: what spares it, and us, while it does not answer.
        is_added: whether the transport knows it; see `kvstore.peer.planes`.
        ranges_per_block: the most that a block of its consisted of so far; 0 before the first.
    """

    def __init__(self, address: PeerAddress) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address.endpoint, options=CHANNEL_OPTIONS)
        self.stub = kv_peer_pb2_grpc.KvPeerServiceStub(self._channel)
        self.read_blocks = self._channel.unary_stream(
            f"/{SERVICE_NAME}/ReadBlocks",
            request_serializer=pb.ReadBlocksRequest.SerializeToString,
            response_deserializer=to_view,
        )
        self.breaker = Breaker(f"the KV peer at {address.endpoint}")
        self.is_added = False
        self.ranges_per_block = 0
        # Used by `Peers` under its lock.
        self.num_users = 0
        self.idle_since = 0.0

    def ask(self, call: Callable[[], _Result]) -> _Result:
        """Calls, unless the peer has not answered of late.

        Raises:
            PeerRefusedError: it answers that it does not lend this.
            StoreUnavailableError: it does not answer.
        """
        answer = self.breaker.call(lambda: _answer(call, self.address))
        if isinstance(answer, PeerRefusedError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends calls under way. Idempotent."""
        self._channel.close()


def is_refusal(error: grpc.RpcError) -> bool:
    """Whether a peer answered that it does not lend, before it did anything."""
    return cast("grpc.Call", error).code() in _REFUSALS


def _answer(call: Callable[[], _Result], address: PeerAddress) -> "_Result | PeerRefusedError":
    """What a peer answers; a refusal is an answer too."""
    try:
        return call()
    except grpc.RpcError as error:
        failed = cast("grpc.Call", error)  # what grpc raises is both; its types do not say so
        message = f"{address.endpoint}: {failed.details()}"
        if not is_refusal(error):
            raise StoreUnavailableError(f"{message} ({failed.code().name})") from None
        if (failed.details() or "").startswith(GENERATION_REFUSED):
            return GenerationGoneError(message)
        return PeerRefusedError(message)
    except PeerRefusedError as refusal:
        return refusal
    except ValueError as error:  # grpc's word for a channel that was closed
        raise StoreUnavailableError(f"{address.endpoint}: {error}") from None


class Peers:
    """The peers in use and those used of late, a bounded number. Thread-safe.

    Args:
        transport: what else knows the peers; None if they are reached by channels alone.
    """

    def __init__(self, transport: PeerTransport | None = None) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._peers: dict[PeerAddress, Peer] = {}
        self._num_opened_before = 0  # breakers of peers that are forgotten
        self._is_closed = False

    @property
    def breaker_counts(self) -> BreakerCounts:
        """Breakers open of the peers known now; how often one opened of any peer there was."""
        with self._lock:
            counts = [peer.breaker.counts for peer in self._peers.values()]
            num_opened = self._num_opened_before + sum(each.num_opened for each in counts)
        return BreakerCounts(sum(each.num_open for each in counts), num_opened)

    @contextmanager
    def use(self, address: PeerAddress) -> Iterator[Peer]:
        """A peer, which stays while it is used. One that turns out to be gone is forgotten.

        Raises:
            StoreUnavailableError: `close` was called.
        """
        peer = self._enter(address)
        try:
            yield peer
        except GenerationGoneError:
            self.forget(address)
            raise
        finally:
            with self._lock:
                peer.num_users -= 1
                peer.idle_since = time.monotonic()

    def forget(self, address: PeerAddress) -> None:
        """Ends all that goes on with a peer. It may be used anew."""
        with self._lock:
            peer = self._take(address) if address in self._peers else None
        if peer is not None:
            self._end(peer)

    def close(self) -> None:
        """Ends all that goes on with all peers. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = [self._take(address) for address in list(self._peers)]
        for peer in peers:
            self._end(peer)

    def _enter(self, address: PeerAddress) -> Peer:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailableError("the connector is closed")
            idle = self._take_idle(except_for=address)
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = Peer(address)
            peer.num_users += 1
        for unused in idle:
            self._end(unused)
        return peer

    def _take_idle(self, *, except_for: PeerAddress) -> list[Peer]:
        """Takes out peers that nobody has used for a while, or too many to keep."""
        now = time.monotonic()
        unused = sorted(
            (p for p in self._peers.values() if not p.num_users and p.address != except_for),
            key=lambda peer: peer.idle_since,
        )
        num_excess = max(0, len(self._peers) - _MAX_PEERS)
        idle = [p for i, p in enumerate(unused) if i < num_excess or now - p.idle_since > _IDLE_S]
        return [self._take(peer.address) for peer in idle]

    def _take(self, address: PeerAddress) -> Peer:
        """Takes out a peer, whose breaker is counted on."""
        peer = self._peers.pop(address)
        self._num_opened_before += peer.breaker.num_opened
        return peer

    def _end(self, peer: Peer) -> None:
        peer.close()
        if self._transport is not None:
            self._transport.remove_peer(peer.address.peer_id)
