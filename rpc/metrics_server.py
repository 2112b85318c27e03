"""Serves a process's metrics to Prometheus over HTTP, at a port of its own."""

import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from typing_extensions import override

from baton.errors import ConfigurationError
from baton.security.certificates import Certificates
from baton.security.config import CertificateFiles
from rpc.metrics_access import CHALLENGE, MetricsAccess
from rpc.metrics_config import MetricsConfig
from rpc.server_config import join_host_port

__all__ = ["serving_metrics"]

_CLIENT_TIMEOUT_S = 10.0
"""A client that is silent for this long loses its connection, which frees its thread."""
_LONGEST_CONNECTION_S = 30.0
"""A client loses its connection after this time, also one that sends a byte now and then."""

_MAX_CONNECTIONS = 16

_LOGGER = logging.getLogger("baton.rpc")

_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextmanager
def serving_metrics(
    config: MetricsConfig,
    registry: CollectorRegistry,
    access: MetricsAccess,
    files: CertificateFiles | None = None,
) -> Iterator[int | None]:
    """Serves a registry's metrics at `/metrics`, in threads of the server's own, while the context
    is open.

    Args:
        config: the address.
        registry: the metrics.
        access: who may read them.
        files: the process's certificates; without a certificate the port is plain text.

    Yields:
        The bound port, or None if the config asks for no metrics.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    if config.port is None:
        yield None
        return
    context = None
    if files is not None and files.certfile is not None:
        context = Certificates(files).server_context(verify_mode=ssl.CERT_NONE)
    server = _bound(config, context)
    server.set_app(_application(registry, access))
    thread = Thread(target=server.serve_forever, args=(0.1,), name="metrics", daemon=True)
    thread.start()
    try:
        address = join_host_port(config.host, server.server_port)
        scheme = "http" if context is None else "https"
        _LOGGER.info("serving metrics url=%s://%s/metrics", scheme, address)
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _application(registry: CollectorRegistry, access: MetricsAccess) -> _Application:
    """Returns a WSGI application that has `/metrics` alone."""
    answer_metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        text = ("Content-Type", "text/plain; charset=utf-8")
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [text])
            return [b"not found\n"]
        if not access.admits(environ.get("HTTP_AUTHORIZATION")):
            start_response("401 Unauthorized", [text, ("WWW-Authenticate", CHALLENGE)])
            return [b"the metrics need a token\n"]
        response: Iterable[bytes] = answer_metrics(environ, start_response)
        return response

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a bounded number of connections, each with one request and one thread.

    The handshake of TLS takes place in that thread, so that a silent client delays no other.
    """

    daemon_threads = True
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any) -> None:
        self._slots = BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(*args)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_CLIENT_TIMEOUT_S)
        # A socket of its own for the same connection: TLS takes the other one over.
        with request.dup() as connection:
            # It wakes the thread that waits for the client.
            deadline = Timer(_LONGEST_CONNECTION_S, _shut_down, (connection,))
            deadline.daemon = True
            deadline.start()
            try:
                self._answer(request, client_address)
            finally:
                deadline.cancel()

    def _answer(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # the client is silent, gone, or speaks no TLS
            if self.context is None:
                super().finish_request(request, client_address)
                return
            with self.context.wrap_socket(request, server_side=True) as encrypted:
                super().finish_request(encrypted, client_address)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    """A handler that writes no log."""

    @override
    def log_message(self, *args: Any) -> None:
        pass


def _bound(config: MetricsConfig, context: ssl.SSLContext | None) -> _Server:
    """Returns a server that listens.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    server_class = _Server6 if ":" in config.host else _Server
    try:
        server = server_class((config.host, config.port), _SilentHandler)
    except OSError:
        address = join_host_port(config.host, config.port or 0)
        raise ConfigurationError(
            f"cannot serve metrics on {address}: in use, or not an address of this machine"
        ) from None
    server.context = context
    return server
