"""`Acceptor`: accepts the connections of a listening socket, as many as the process can hold.

asyncio's own server accepts whatever comes, and while the process has no free descriptor, it logs
an error with a traceback for each place of the backlog, every second.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from itertools import islice

__all__ = ["Acceptor"]

_LOGGER = logging.getLogger("baton.http")
_MAX_ACCEPTED = 64
"""The most connections that are accepted before the event loop does something else."""
_MAX_LAST_ROUNDS = 64
"""Rounds of accepting before the socket is closed: more than a full queue has."""
_MAX_ENDED = 16
_PAUSE_S = 0.25
_LOG_INTERVAL_S = 60.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections while it is open. Uvicorn takes it for an `asyncio.Server`.

    Args:
        listener: the socket, which listens.
        make_protocol: makes the protocol of a connection.
        num_connections: the number of connections that have a protocol.
        make_room: ends connections that have not asked for anything; returns how many.
        max_connections: beyond them, connections take the room that `make_room` makes, or are
            closed at once.
        context: for TLS; None for plain text.
        handshake_timeout_s: how long a handshake of TLS may take.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        num_connections: Callable[[], int],
        make_room: Callable[[], int],
        *,
        max_connections: int,
        context: ssl.SSLContext | None = None,
        handshake_timeout_s: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._make_room = make_room
        self._max_connections = max_connections
        self._context = context
        self._handshake_timeout_s = handshake_timeout_s if context else None
        self._starting: dict[asyncio.Task[None], None] = {}  # in the order of their arrival
        self._pause: asyncio.TimerHandle | None = None
        self._full_until = 0.0
        self._logged_at = -_LOG_INTERVAL_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accepts the connections that wait, as the kernel resets those that are in the queue of a
        socket, then closes it. Idempotent.
        """
        if self._listener.fileno() < 0:
            return
        for _ in range(_MAX_LAST_ROUNDS):
            if self._pause is not None or not self._accept_some():
                break
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._loop.remove_reader(self._listener)
        self._listener.close()

    async def wait_closed(self) -> None:
        """Ends the connections that have no protocol yet."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)

    def _accept(self) -> None:
        self._accept_some()

    def _accept_some(self) -> bool:
        """Accepts connections; returns whether more may wait."""
        room = 0
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause_accepting(error)
                return False
            if self._num_connections() + len(self._starting) >= self._max_connections:
                room = room or self._new_room()
                if not room:
                    connection.close()
                    continue
                room -= 1
            self._start(connection)
        return True

    def _new_room(self) -> int:
        """How many connections may take the places of others; the search costs milliseconds."""
        if self._loop.time() < self._full_until:
            return 0
        room = self._make_room() or self._end_starting()
        if not room:
            self._full_until = self._loop.time() + _PAUSE_S
        return room

    def _end_starting(self) -> int:
        """Ends the oldest connections that have no protocol yet; returns how many."""
        oldest = list(islice(self._starting, _MAX_ENDED))
        for task in oldest:
            del self._starting[task]
            task.cancel()
        return len(oldest)

    def _pause_accepting(self, error: OSError) -> None:
        """Tries again later: the socket stays readable, and would call at once."""
        now = self._loop.time()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            _LOGGER.error("cannot accept connections, trying again: %s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _start(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._connect(connection))
        self._starting[task] = None
        task.add_done_callback(partial(self._end_start, connection))

    def _end_start(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._starting.pop(task, None)
        if task.cancelled():
            connection.close()

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
            )
        except OSError as error:  # TLS errors are OSErrors
            _LOGGER.debug("a connection ended before its first request: %s", error)
            connection.close()
