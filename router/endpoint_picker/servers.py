"""`Servers`: the routers beside decode workers, and which of them answer.

Discovery does not say the latter: a worker announces itself, and stays connected, while the router
beside it has failed. So each is asked `GET /ready` every second. One that is lost is not forbidden
but comes last: where no server can be asked, as by a rule of the network, all are as good.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Callable, Iterable

from baton.common.addresses import join_host_port, split_host_port

__all__ = ["Servers"]

_LOGGER = logging.getLogger("baton.router")
_INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
_MAX_CHECKS = 64
"""How many servers are asked at the same time."""
_READY = b"HTTP/1.1 200"


class Servers:
    """The routers beside decode workers.

    Args:
        read_addresses: returns the addresses of the workers that take requests, each `host:port`.
        port: the port of all servers.
        has_tls: whether they answer HTTPS.
    """

    def __init__(
        self, read_addresses: Callable[[], Iterable[str]], port: int, *, has_tls: bool
    ) -> None:
        self._read_addresses = read_addresses
        self._port = port
        self._context = _any_certificate() if has_tls else None
        self._turns = asyncio.Semaphore(_MAX_CHECKS)
        self._lost: set[str] = set()
        self._has_warned = False

    def endpoint(self, address: str) -> str | None:
        """The `ip:port` of the server beside a replica; None if the replica's address is a name, to
        which Envoy cannot connect.

        Args:
            address: the replica's `host:port`.
        """
        split = split_host_port(address)
        assert split is not None, "the address of a replica is host:port"
        host = split[0].strip("[]")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not self._has_warned:
                self._has_warned = True
                _LOGGER.warning(
                    "the endpoint picker does not choose %s: it names servers by their IP "
                    "addresses; use dns:///%s in --decode",
                    address,
                    address,
                )
            return None
        return join_host_port(host, self._port)

    def answers(self, endpoint: str) -> bool:
        """Whether a server was ready when it was asked last, or is new.

        Args:
            endpoint: its `ip:port`.
        """
        return endpoint not in self._lost

    async def run(self) -> None:
        """Asks the servers until it is cancelled."""
        while True:
            endpoints = set(filter(None, map(self.endpoint, self._read_addresses())))
            self._lost &= endpoints
            await asyncio.gather(*map(self._check, endpoints))
            await asyncio.sleep(_INTERVAL_S)

    async def _check(self, endpoint: str) -> None:
        async with self._turns:
            is_ready = await self._is_ready(endpoint)
        if is_ready == (endpoint not in self._lost):
            return
        if is_ready:
            self._lost.discard(endpoint)
            _LOGGER.info("server %s is ready again", endpoint)
        else:
            self._lost.add(endpoint)
            _LOGGER.warning("server %s is not ready; others get its requests", endpoint)

    async def _is_ready(self, endpoint: str) -> bool:
        split = split_host_port(endpoint)
        assert split is not None, "an endpoint is ip:port"
        host, port = split[0].strip("[]"), split[1]
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port, ssl=self._context)
                try:
                    writer.write(
                        b"GET /ready HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"
                        % endpoint.encode()
                    )
                    return await reader.readexactly(len(_READY)) == _READY
                except (OSError, EOFError):
                    # With TLS 1.3 this is how a server refuses a client without a certificate.
                    return self._context is not None
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            return False


def _any_certificate() -> ssl.SSLContext:
    """A context that checks no certificate: nothing secret is sent, and Envoy checks it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
