"""Serves a process's metrics to Prometheus over HTTP, at a port of its own; their readers."""

import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread, Timer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from typing_extensions import override

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError
from baton.common.security.certificates import Certificates
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles
from baton.common.security.tokens import carries_token, watched_tokens
from rpc.listeners import open_listeners
from rpc.server_config import MetricsConfig

__all__ = ["CHALLENGE", "MetricsAccess", "serving_metrics"]

CHALLENGE = 'Bearer realm="metrics"'
"""The header `WWW-Authenticate` of a refusal."""
_CLIENT_TIMEOUT_S = 10.0
"""A client that is silent for this long loses its connection, which frees its thread."""
_MAX_CONNECTION_S = 30.0
"""A client loses its connection after this time, also one that sends a byte now and then."""
_MAX_CONNECTIONS = 16
_LOGGER = logging.getLogger("baton.rpc")
_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsAccess:
    """Admits readers of a process's metrics: those with the token of `--metrics-token-file`, or
    without that flag with the cluster's token. Without any token all may read them.

    Args:
        config: names the token's file.
        cluster: has the cluster's token.
        has_clients: whether the process's clients need a key. Then, without any token, the
            metrics cannot be read.

    Raises:
        ConfigurationError: the file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self, config: MetricsConfig, cluster: ClusterSecurity, *, has_clients: bool = False
    ) -> None:
        self._cluster = cluster
        self._has_clients = has_clients
        self._read_tokens: Callable[[], tuple[str, ...]] | None = None
        if config.metrics_token_file is not None:
            self._read_tokens = watched_tokens("--metrics-token-file", config.metrics_token_file)

    def admits(self, header: str | None) -> bool:
        """Whether a reader with this authorization header may read the metrics."""
        if self._read_tokens is not None:
            return carries_token(header or "", self._read_tokens())
        if self._cluster.has_token:
            return self._cluster.admits_header(header or "")
        return not self._has_clients


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
    application = _application(registry, access)
    listeners = _bound(config)
    port = int(listeners[0].getsockname()[1])
    with ExitStack() as serving:
        for listener in listeners:
            serving.callback(listener.close)
        for listener in listeners:
            serving.enter_context(_MetricsServer(listener, application, context).running())
        address = join_host_port(config.host, port)
        scheme = "http" if context is None else "https"
        _LOGGER.info("serving metrics url=%s://%s/metrics", scheme, address)
        yield port


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


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A server with a bounded number of connections, each with one request and one thread.

    The handshake of TLS takes place in that thread, so that a silent client delays no other.

    Args:
        listener: listens already.
        application: answers.
        context: for TLS; None for plain text.
    """

    daemon_threads = True

    def __init__(
        self, listener: socket.socket, application: _Application, context: ssl.SSLContext | None
    ) -> None:
        self._slots = BoundedSemaphore(_MAX_CONNECTIONS)
        self._context = context
        host, port, *_ = listener.getsockname()
        super().__init__((host, port), _SilentHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = host, port
        self.setup_environ()
        self.set_app(application)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answers while the context is open."""
        thread = Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

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
            deadline = Timer(_MAX_CONNECTION_S, _shut_down, (connection,))
            deadline.daemon = True
            deadline.start()
            try:
                self._answer(request, client_address)
            finally:
                deadline.cancel()

    def _answer(self, request: Any, client_address: Any) -> None:
        with suppress(OSError):  # the client is silent, gone, or speaks no TLS
            if self._context is None:
                super().finish_request(request, client_address)
                return
            with self._context.wrap_socket(request, server_side=True) as encrypted:
                super().finish_request(encrypted, client_address)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


class _SilentHandler(WSGIRequestHandler):
    """A handler that writes no log."""

    @override
    def log_message(self, *args: Any) -> None:
        pass


def _bound(config: MetricsConfig) -> list[socket.socket]:
    """Returns sockets that listen.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    try:
        return open_listeners(config.host, config.port or 0, _MetricsServer.request_queue_size)
    except (OSError, UnicodeError):
        address = join_host_port(config.host, config.port or 0)
        raise ConfigurationError(
            f"cannot serve metrics on {address}: in use, or not an address of this machine"
        ) from None
