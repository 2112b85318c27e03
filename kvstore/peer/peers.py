"""`Peers`: the processes that this one reads from: channels, breakers, generations."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar, cast

import grpc

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import kv_peer_pb2 as pb
from baton.v1 import kv_peer_pb2_grpc
from kvstore.guard.breaker import Breaker, BreakerCounts
from kvstore.guard.status import BackendStatus
from kvstore.peer.address import PeerAddress
from kvstore.peer.framing import to_view
from kvstore.peer.service import CHANNEL_OPTIONS, GENERATION_REFUSED, SERVICE_NAME
from kvstore.peer.transport import PeerTransport
from kvstore.store import StoreUnavailableError

__all__ = ["GenerationGoneError", "Peer", "PeerDeniedError", "PeerRefusedError", "Peers"]

_MAX_PEERS = 64
_IDLE_S = 60.0
# Less than a load is waited for at least, so that the log does not first call it slow.
_CONNECT_S = 0.2
_REFUSALS = (
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
)

_logger = logging.getLogger("baton.kvstore")
_link_numbers = count(1)

_Result = TypeVar("_Result")


class PeerRefusedError(Exception):
    """The peer answers but does not lend: the lease is over, or its KV has another form.

    Attributes:
        log_level: the level to log it at.
    """

    log_level = logging.WARNING


class GenerationGoneError(PeerRefusedError):
    """The process that lent has ended; another one answers at its address."""


class PeerDeniedError(PeerRefusedError):
    """The peer does not accept this process's credential, which all calls share."""


class Peer:
    """One generation of a process that lends. Any thread may use it.

    Args:
        address: of the process.
        security: what this process shows, and asks of the other.

    Attributes:
        link_id: the transport's name for the process, of this object alone: the same process may be
            opened anew while its earlier object is being closed.
        stub: its service. Calls go through `ask` or `ask_anyway`, each with a timeout.
        read_blocks: its ReadBlocks, whose messages stay bytes.
        breaker: keeps this process from calling while the peer does not answer.
        meeting: held by the thread that finds out how the peer is read.
        is_added: whether the transport can read its memory.
        ranges_per_block: the most ranges that a block of it consisted of; 0 before the first block.
        certificates_version: that of the certificates with which it was opened.
        num_users: contexts of `Peers.use` that are open; changed under the lock of `Peers`.
        idle_since: when the last one ended, by `time.monotonic`.
    """

    def __init__(self, address: PeerAddress, security: ClusterSecurity) -> None:
        self.address = address
        self.link_id = f"{address.peer_id}-{next(_link_numbers)}"
        self.certificates_version = security.certificates_version
        self._channel = _open_channel(address.endpoint, security)
        self.stub = kv_peer_pb2_grpc.KvPeerServiceStub(self._channel)
        self.read_blocks = self._channel.unary_stream(
            f"/{SERVICE_NAME}/ReadBlocks",
            request_serializer=pb.ReadBlocksRequest.SerializeToString,
            response_deserializer=to_view,
        )
        self.breaker = Breaker(f"the KV peer at {address.endpoint}")
        self._was_denied = False  # since the last answer that was no refusal
        self._was_tried = False
        self._is_closed = False
        self.meeting = threading.Lock()
        self.is_added = False
        self.ranges_per_block = 0
        self.num_users = 0
        self.idle_since = 0.0

    @property
    def status(self) -> BackendStatus:
        """Whether blocks can be loaded from it."""
        problem = self.breaker.error
        name = f"KV peer at {self.address.endpoint}"
        return BackendStatus(name, can_load=not problem, problem=problem)

    def ask(self, call: Callable[[], _Result]) -> _Result:
        """Returns the result of a call.

        Raises:
            PeerRefusedError: the peer answers that it does not lend this.
            StoreUnavailableError: it does not answer, or did not of late.
        """
        return self._checked(self.breaker.call(lambda: self._answer_first(call)))

    def ask_anyway(self, call: Callable[[], _Result]) -> _Result:
        """Does the same as `ask`, but apart from the breaker.

        For renewals: a peer whose reads fail may still renew, and a lease lasts no longer than the
        breaker may stay open.
        """
        return self._checked(_answer(call, self.address))

    def _answer_first(self, call: Callable[[], _Result]) -> "_Result | PeerRefusedError":
        """Returns the peer's answer; before the first call it tries to reach the peer."""
        if not self._was_tried:
            self._was_tried = True
            self._try_connection()
        # grpc may crash if a call begins on a channel that is closed.
        if self._is_closed:
            raise StoreUnavailableError(f"{self.address.endpoint}: the connector is closed")
        return _answer(call, self.address)

    def _try_connection(self) -> None:
        """Says so if no connection comes: the call that follows may take long to find it out."""
        host, _, port = self.address.endpoint.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except TimeoutError:
            _logger.warning(
                "the KV peer at %s cannot be reached so far; other machines must reach the "
                "address that it advertises",
                self.address.endpoint,
            )
        except (OSError, ValueError):
            """The call that follows says what is wrong."""

    def _checked(self, answer: "_Result | PeerRefusedError") -> _Result:
        """Returns an answer; raises it if it is a refusal."""
        if isinstance(answer, PeerDeniedError):
            if self._was_denied:
                answer.log_level = logging.DEBUG
            self._was_denied = True
        if isinstance(answer, PeerRefusedError):
            raise answer
        self._was_denied = False
        return answer

    def close(self) -> None:
        """Ends calls under way. Idempotent."""
        self._is_closed = True
        self._channel.close()


def _answer(call: Callable[[], _Result], address: PeerAddress) -> "_Result | PeerRefusedError":
    """Returns a peer's answer. A refusal is an answer too: the breaker must not count it."""
    try:
        return call()
    except grpc.RpcError as error:
        failed = cast("grpc.Call", error)  # what grpc raises is both; its types do not say so
        if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise StoreUnavailableError(f"{address.endpoint}: not answered in time") from None
        message = f"{address.endpoint}: {failed.details()}"
        if failed.code() not in _REFUSALS:
            raise StoreUnavailableError(f"{message} ({failed.code().name})") from None
        if failed.code() is grpc.StatusCode.UNAUTHENTICATED:
            return PeerDeniedError(message)
        if (failed.details() or "").startswith(GENERATION_REFUSED):
            return GenerationGoneError(message)
        return PeerRefusedError(message)
    except PeerRefusedError as refusal:
        return refusal
    except ValueError as error:  # grpc raises it for a channel that was closed
        raise StoreUnavailableError(f"{address.endpoint}: {error}") from None


def _open_channel(endpoint: str, security: ClusterSecurity) -> grpc.Channel:
    options = (*CHANNEL_OPTIONS, *security.channel_options())
    credentials = security.channel_credentials()
    if credentials is None:
        channel = grpc.insecure_channel(endpoint, options)
    else:
        channel = grpc.secure_channel(endpoint, credentials, options)
    return grpc.intercept_channel(channel, _ShowsCredential(security))


class _ShowsCredential(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the cluster's credential to each call."""

    def __init__(self, security: ClusterSecurity) -> None:
        self._security = security

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Makes a call with the credential."""
        return continuation(self._with_credential(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        """Makes a call with the credential."""
        return continuation(self._with_credential(details), request)

    def _with_credential(self, details: Any) -> Any:
        return details._replace(metadata=self._security.call_metadata())


class Peers:
    """A bounded number of peers, in use or used within the last minute. Thread-safe.

    Args:
        transport: knows the peers as well; None if grpc alone does.
        security: what this process shows to peers, and asks of them.
    """

    def __init__(
        self, transport: PeerTransport | None = None, security: ClusterSecurity | None = None
    ) -> None:
        self._transport = transport
        self._security = security or ClusterSecurity()
        self._lock = threading.Lock()
        self._peers: dict[PeerAddress, Peer] = {}
        self._num_opened_before = 0  # breakers of peers that are forgotten
        self._is_closed = False

    @property
    def breaker_counts(self) -> BreakerCounts:
        """Breakers open now; how often a breaker opened, those of forgotten peers included."""
        with self._lock:
            counts = [peer.breaker.counts for peer in self._peers.values()]
            num_opened = self._num_opened_before + sum(count.num_opened for count in counts)
        return BreakerCounts(sum(count.num_open for count in counts), num_opened)

    @property
    def problems(self) -> list[BackendStatus]:
        """The state of the peers that do not answer."""
        with self._lock:
            peers = list(self._peers.values())
        return [peer.status for peer in peers if peer.breaker.is_open]

    @contextmanager
    def use(self, address: PeerAddress) -> Iterator[Peer]:
        """Yields a peer, and keeps it meanwhile. Forgets it if its process has ended.

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
                is_forgotten = not peer.num_users and self._peers.get(address) is not peer
            if is_forgotten:  # a user may have added it to the transport since
                self._end(peer)

    def forget(self, address: PeerAddress) -> None:
        """Ends all calls and reads of a peer. It may be used anew."""
        with self._lock:
            peer = self._take(address) if address in self._peers else None
        if peer is not None:
            self._end(peer)

    def close(self) -> None:
        """Ends all calls and reads of all peers. Idempotent."""
        with self._lock:
            self._is_closed = True
            peers = [self._take(address) for address in list(self._peers)]
        for peer in peers:
            self._end(peer)

    def _enter(self, address: PeerAddress) -> Peer:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailableError("the connector is closed")
            idle = self._take_idle(except_for=address) + self._take_outdated(address)
            peer = self._peers.get(address)
            if peer is None:
                peer = self._peers[address] = Peer(address, self._security)
            peer.num_users += 1
        for unused in idle:
            self._end(unused)
        return peer

    def _take_outdated(self, address: PeerAddress) -> list[Peer]:
        """Removes and returns a peer that is not in use and has older certificates than the files:
        its channel would connect with these.
        """
        peer, version = self._peers.get(address), self._security.certificates_version
        if peer is None or peer.num_users or peer.certificates_version == version:
            return []
        return [self._take(address)]

    def _take_idle(self, *, except_for: PeerAddress) -> list[Peer]:
        """Removes and returns peers that were not used for a while, or are too many to keep."""
        now = time.monotonic()
        unused = sorted(
            (p for p in self._peers.values() if not p.num_users and p.address != except_for),
            key=lambda peer: peer.idle_since,
        )
        num_excess = max(0, len(self._peers) - _MAX_PEERS)
        idle = [p for i, p in enumerate(unused) if i < num_excess or now - p.idle_since > _IDLE_S]
        return [self._take(peer.address) for peer in idle]

    def _take(self, address: PeerAddress) -> Peer:
        """Removes and returns a peer; its breaker stays counted."""
        peer = self._peers.pop(address)
        self._num_opened_before += peer.breaker.num_opened
        return peer

    def _end(self, peer: Peer) -> None:
        peer.close()
        if self._transport is not None:
            self._transport.remove_peer(peer.link_id)
