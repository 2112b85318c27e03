"""`HttpServer`: uvicorn inside of the running event loop.

A connection costs bounded time and memory: its headers, its body and its idle time have
limits, and there is a largest number of connections.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton.errors import ConfigurationError
from router.http.config import HttpConfig
from rpc.server import write_port_file

__all__ = ["HttpServer"]

_LOGGER = logging.getLogger("baton.http")
_BACKLOG = 2048
_LEAST_GRACE_S = 0.05
_END_TIMEOUT_S = 2.0


class HttpServer:
    """Serves an application.

    Args:
        app: the application.
        config: the address and the limits.

    Attributes:
        port: the bound port, once listening.
    """

    def __init__(self, app: FastAPI, config: HttpConfig) -> None:
        self.port = 0
        self._app = app
        self._config = config
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_limited_protocol(config),
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
        """`host:port`, once listening."""
        host = self._config.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def start(self) -> None:
        """Binds the address and begins to answer.

        Raises:
            ConfigurationError: the address cannot be bound, or the port file cannot be written.
        """
        assert self._config.port is not None, "a router without HTTP has no server"
        self._socket = _bound_socket(self._config.host, self._config.port)
        self.port = self._socket.getsockname()[1]
        if self._config.port_file is not None:
            write_port_file(Path(self._config.port_file), self.port)
        await self._server.begin([self._socket])
        self._task = asyncio.create_task(self._server.run_until_stopped())
        _LOGGER.info("listening address=%s", self.address)

    def begin_drain(self) -> None:
        """Closes the listening socket; answers under way continue, and `/ready` answers 503."""
        self._app.state.context.is_draining = True
        for listener in getattr(self._server, "servers", ()):
            listener.close()

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, waits `grace_s` for answers under way, then cancels them. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self.begin_drain()
        # With 0, uvicorn would not even wait for connections that it closes itself.
        grace_s = max(grace_s, _LEAST_GRACE_S)
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await task
        if self._socket is not None:
            self._socket.close()
        _LOGGER.info("stopped address=%s", self.address)


class _Server(uvicorn.Server):
    """A server whose process handles signals itself."""

    async def begin(self, sockets: list[socket.socket]) -> None:
        self.config.load()
        self.lifespan = self.config.lifespan_class(self.config)
        await self.startup(sockets=sockets)

    async def run_until_stopped(self) -> None:
        await self.main_loop()
        await self.shutdown()
        await self._end_tasks()

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


class _LimitedProtocol(HttpToolsProtocol):
    """Closes connections beyond `max_connections`, those whose headers do not arrive within
    `header_timeout_s`, and those that do not read for `send_timeout_s`.
    """

    limits: ClassVar[HttpConfig]
    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            transport.abort()
        else:
            self._start_header_timer()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    @override
    def on_message_begin(self) -> None:
        if self._header_timer is None:
            self._start_header_timer()
        super().on_message_begin()

    @override
    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()

    @override
    def pause_writing(self) -> None:
        # A mere close would wait until the client has read what is under way.
        self._send_timer = self.loop.call_later(self.limits.send_timeout_s, self.transport.abort)
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(
            self.limits.header_timeout_s, self.timeout_keep_alive_handler
        )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _limited_protocol(config: HttpConfig) -> type[HttpToolsProtocol]:
    """The protocol with the limits of a config; uvicorn makes its objects itself."""
    return type("_Protocol", (_LimitedProtocol,), {"limits": config})


def _bound_socket(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address.

    Raises:
        ConfigurationError: the address is in use, or not one of this machine.
    """
    try:
        (family, *_, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}"
        ) from None
