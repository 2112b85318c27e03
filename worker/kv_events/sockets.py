"""`KvEventSockets`: the ZMQ sockets of KV events. Nothing here waits for a subscriber."""

import errno
from collections.abc import Sequence

import zmq
import zmq.asyncio

from baton.common.errors import ConfigurationError
from worker.kv_events.config import KvEventsConfig, listens_at

__all__ = ["KvEventSockets"]

_MAX_QUEUED_MESSAGES = 1024
"""Messages that wait for one subscriber; the next ones are dropped."""
_MAX_QUEUED_ANSWERS = 64
_MAX_QUEUED_REQUESTS = 8
_MAX_FRAME_BYTES = 2048
"""Bytes of a request's or a subscription's frame; libzmq ends the connection of larger ones."""


class KvEventSockets:
    """A socket for messages, and one for requests of subscribers that missed some. Event loop only.

    Args:
        config: the flags; `kv_events_zmq` is set.

    Attributes:
        answers_requests: whether there is a socket for requests.

    Raises:
        ConfigurationError: an address cannot be opened; names the flag.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        assert config.kv_events_zmq is not None
        self.answers_requests = config.kv_events_replay is not None
        self._context = zmq.asyncio.Context()
        try:
            self._pub = self._open("--kv-events-zmq", config.kv_events_zmq, zmq.PUB)
            if config.kv_events_replay is not None:
                replay = config.kv_events_replay
                self._router = self._open("--kv-events-replay", replay, zmq.ROUTER)
        except ConfigurationError:
            self.close()
            raise

    async def publish(self, frames: Sequence[bytes]) -> None:
        """Sends a message to all subscribers that have room for it."""
        await self._pub.send_multipart(frames, flags=zmq.NOBLOCK)

    async def next_request(self) -> Sequence[bytes]:
        """Waits for a request; returns its frames, the client's id first."""
        request: list[bytes] = await self._router.recv_multipart()
        return request

    async def answer(self, frames: Sequence[bytes]) -> bool:
        """Sends a message to a client, whose id is the first frame; returns whether it had room.

        Raises:
            ConnectionError: the client has left.
        """
        try:
            await self._router.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise ConnectionError("the client has left") from None
            raise
        return True

    def close(self) -> None:
        """Closes the sockets; drops what they have not sent. Idempotent."""
        self._context.destroy(linger=0)

    def _open(self, flag: str, address: str, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.ipv6 = "[" in address
        socket.tcp_keepalive, socket.linger = 1, 0
        socket.maxmsgsize = _MAX_FRAME_BYTES
        if kind == zmq.ROUTER:
            socket.router_mandatory = True  # else messages beyond the limit vanish
            socket.sndhwm, socket.rcvhwm = _MAX_QUEUED_ANSWERS, _MAX_QUEUED_REQUESTS
        else:
            socket.sndhwm = _MAX_QUEUED_MESSAGES
        try:
            if kind == zmq.ROUTER or listens_at(address):
                socket.bind(address)
            else:
                socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigurationError(f"{flag} {address} cannot be opened: {error}") from None
        return socket
