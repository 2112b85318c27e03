"""`HttpServer`: uvicorn inside of the running event loop.

A connection costs bounded time and memory: its headers, its body and its idle time have
limits, and there is a largest number of connections.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from pathlib import Path
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError
from router.config.http import HttpConfig
from router.http.acceptor import Acceptor
from router.http.connection import LimitedProtocol, limited_protocol
from rpc.listeners import open_listeners, write_port_file
from rpc.unix_socket import UnixSocket

__all__ = ["HttpServer"]

_LOGGER = logging.getLogger("baton.http")
_BACKLOG = 2048
_MAX_ENDED = 64
"""The most silent connections that are ended at once to make room."""
_MIN_GRACE_S = 0.05
_END_TIMEOUT_S = 2.0
_TICKS_PER_SWEEP = 10  # of 0.1 s


class HttpServer:
    """Serves an application.

    Args:
        app: the application.
        config: the address and the limits.
        context: for TLS; None for plain text.
        shares_port: whether other processes may listen at the port too.

    Attributes:
        port: the bound port, once listening.
    """

    def __init__(
        self,
        app: FastAPI,
        config: HttpConfig,
        context: ssl.SSLContext | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self.port = 0
        self._app = app
        self._config = config
        self._context = context
        self._shares_port = shares_port
        self._sockets: list[socket.socket] = []
        self._unix_socket: UnixSocket | None = None
        self._task: asyncio.Task[None] | None = None
        self._protocol = limited_protocol(config)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=self._protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=True,
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, round(config.keep_alive_timeout_s)),
            )
        )

    @property
    def address(self) -> str:
        """`host:port`, once listening, or the path of the unix socket."""
        return self._config.uds or join_host_port(self._config.host, self.port)

    async def start(self) -> None:
        """Binds the address and begins to answer.

        Raises:
            ConfigurationError: the address cannot be bound, or the port file cannot be written.
        """
        if self._config.uds is not None:
            self._unix_socket = await asyncio.to_thread(UnixSocket.open, self._config.uds, _BACKLOG)
            self._sockets = [self._unix_socket.listener]
        else:
            assert self._config.port is not None, "a router without HTTP has no server"
            self._sockets = _bound_sockets(self._config.host, self._config.port, self._shares_port)
            self.port = self._sockets[0].getsockname()[1]
        if self._config.port_file is not None:
            write_port_file(Path(self._config.port_file), self.port)
        self._server.begin(self._sockets, self._context, self._config)
        self._task = asyncio.create_task(self._server.run_until_stopped())
        _LOGGER.info("listening address=%s", self.address)

    @property
    def num_requests(self) -> int:
        """How many requests are answered."""
        return len(self._server.server_state.tasks)

    def announce_stop(self) -> None:
        """Lets `/ready` answer 503; everything else goes on."""
        self._app.state.context.is_draining = True

    def begin_drain(self) -> None:
        """Closes the listening socket; answers under way continue, and `/ready` answers 503. Each
        open connection ends with the answer to its next request.
        """
        self.announce_stop()
        self._protocol.is_draining = True
        # Once, while it listens: later another server may have its path, and the same inode.
        unix_socket, self._unix_socket = self._unix_socket, None
        if unix_socket is not None:
            unix_socket.remove()
        for listener in getattr(self._server, "servers", ()):
            listener.close()

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits `grace_s` for answers under way, then cancels them. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self.begin_drain()
        # With 0, uvicorn would not even wait for connections that it closes itself.
        grace_s = max(grace_s, _MIN_GRACE_S)
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await task
        for listener in self._sockets:
            listener.close()
        _LOGGER.info("stopped address=%s", self.address)


class _Server(uvicorn.Server):
    """A server whose process handles signals itself."""

    def begin(
        self,
        listeners: Sequence[socket.socket],
        context: ssl.SSLContext | None,
        limits: HttpConfig,
    ) -> None:
        """Begins to answer, in place of uvicorn's `startup`, which has none of these limits."""
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        self.servers = [
            Acceptor(  # type: ignore[misc]
                listener,
                self._make_protocol,
                lambda: len(self.server_state.connections),
                self._end_silent_connections,
                max_connections=limits.max_connections,
                context=context,
                handshake_timeout_s=limits.header_timeout_s,
            )
            for listener in listeners
        ]
        self.started = True

    def _end_silent_connections(self) -> int:
        """Ends the oldest connections that have sent no request yet; returns how many. They are
        many only if a client does not mean to send one.
        """
        connections = cast("set[LimitedProtocol]", self.server_state.connections)
        silent = (connection for connection in connections if connection.is_silent)
        ended = nsmallest(_MAX_ENDED, silent, key=lambda connection: connection.opened_at)
        for connection in ended:
            connection.transport.abort()
        return len(ended)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def run_until_stopped(self) -> None:
        await self.main_loop()
        await self.shutdown()
        await self._end_tasks()

    @override
    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            for connection in list(self.server_state.connections):
                assert isinstance(connection, LimitedProtocol)
                connection.sweep()
        return await super().on_tick(counter)

    async def _end_tasks(self) -> None:
        """Waits for answers that `shutdown` has cancelled; closes what clients keep open."""
        tasks = list(self.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound_sockets(host: str, port: int, shares_port: bool) -> list[socket.socket]:
    """Sockets that listen at an address.

    Raises:
        ConfigurationError: the address is in use, or not one of this machine.
    """
    try:
        return open_listeners(host, port, _BACKLOG, shares_port=shares_port)
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"cannot listen on {join_host_port(host, port)}: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
