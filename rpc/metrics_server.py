"""Serves a process's metrics to Prometheus over HTTP, at a port of its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, start_http_server

from baton.errors import ConfigurationError
from baton.flags import flag
from rpc.server_config import join_host_port

__all__ = ["MetricsConfig", "serving_metrics"]

_CLIENT_TIMEOUT_S = 10.0
"""A client that is silent for this long loses its connection, which frees the server's thread."""

_LOGGER = logging.getLogger("baton.rpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """The flags of the address at which metrics are served.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    host: str = flag("127.0.0.1", "address for metrics", name="metrics-host", metavar="HOST")
    port: int | None = flag(
        None,
        "serve Prometheus metrics on this port; 0 picks a free one (default: no metrics)",
        name="metrics-port",
        metavar="PORT",
    )

    def __post_init__(self) -> None:
        if self.port is not None and not 0 <= self.port < 2**16:
            raise ConfigurationError(f"--metrics-port is {self.port}; it must be in [0, 65536)")


@contextmanager
def serving_metrics(config: MetricsConfig, registry: CollectorRegistry) -> Iterator[int | None]:
    """Serves a registry's metrics, in threads of the server's own, while the context is open.

    Yields:
        The bound port, or None if the config asks for no metrics.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    if config.port is None:
        yield None
        return
    try:
        server, thread = start_http_server(config.port, config.host, registry)
    except OSError:
        address = join_host_port(config.host, config.port)
        raise ConfigurationError(
            f"cannot serve metrics on {address}: in use, or not an address of this machine"
        ) from None
    server.RequestHandlerClass = _impatient(server.RequestHandlerClass)
    try:
        address = join_host_port(config.host, server.server_port)
        _LOGGER.info("serving metrics url=http://%s/metrics", address)
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _impatient(handler_class: Any) -> type[WSGIRequestHandler]:
    """Returns the handler class with a limit on how long it waits for its client."""

    class ImpatientHandler(handler_class):  # type: ignore[misc]
        timeout = _CLIENT_TIMEOUT_S

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return ImpatientHandler
