"""The addresses of replicas: static targets, and DNS names that are resolved periodically.

host:port           one address
dns:///name:port    every address that the name resolves to, as containers scale
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigurationError
from rpc.server_config import join_host_port

__all__ = ["Discovery", "Target", "parse_target"]

_LOGGER = logging.getLogger("baton.router")
_DNS_PREFIX = "dns:///"
_RESOLVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of `--prefill` or `--decode`."""

    host: str
    port: int
    is_dns: bool


def parse_target(text: str) -> Target:
    """Parses `host:port` or `dns:///name:port`, with brackets around an IPv6 host.

    Raises:
        ConfigurationError: it is neither.
    """
    is_dns = text.startswith(_DNS_PREFIX)
    host, _, port = text.removeprefix(_DNS_PREFIX).rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigurationError(f"target {text!r} must be host:port or dns:///name:port")
    return Target(host, int(port), is_dns)


class Discovery:
    """The addresses of one tier.

    Names are resolved in a daemon thread, one at a time: `getaddrinfo` cannot be
    interrupted, and one that hangs must block neither the event loop's threads nor
    the end of the process.

    Args:
        targets: the values of the command line's flag.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(parse_target(text) for text in targets)
        self._resolved = {
            target: frozenset([f"{target.host}:{target.port}"])
            for target in self._targets
            if not target.is_dns
        }
        self._is_idle = asyncio.Event()  # no look-up is running
        self._is_idle.set()

    @property
    def is_static(self) -> bool:
        """Whether the addresses never change."""
        return not any(target.is_dns for target in self._targets)

    async def addresses(self) -> frozenset[str]:
        """Returns all addresses as `host:port`. A name that cannot be resolved in time keeps its
        last addresses.
        """
        if not self.is_static:
            await self._look_up()
        return frozenset().union(*self._resolved.values())

    def name_of(self, address: str) -> str | None:
        """The DNS name under which an address was found; None for one that was given."""
        found = (
            target.host
            for target, addresses in self._resolved.items()
            if target.is_dns and address in addresses
        )
        return next(found, None)

    async def _look_up(self) -> None:
        """Starts a look-up of all names unless one runs; waits for it, up to a time limit."""
        if self._is_idle.is_set():
            self._is_idle.clear()
            loop = asyncio.get_running_loop()
            threading.Thread(
                target=self._resolve_all, args=(loop,), name="baton-dns", daemon=True
            ).start()
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                await self._is_idle.wait()
        except TimeoutError:
            _LOGGER.debug("names take longer than %.1f s to resolve", _RESOLVE_TIMEOUT_S)

    def _resolve_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the thread; passes each result to the event loop as it comes."""
        try:
            for target in self._targets:
                if target.is_dns and (addresses := _resolve(target)):
                    loop.call_soon_threadsafe(self._resolved.__setitem__, target, addresses)
            loop.call_soon_threadsafe(self._is_idle.set)
        except RuntimeError:
            pass  # the event loop was closed meanwhile


def _resolve(target: Target) -> frozenset[str] | None:
    """Returns the addresses of a name; None if it cannot be resolved. Blocks."""
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        _LOGGER.debug("cannot resolve %s: %s", target.host, error)
        return None
    return frozenset(
        join_host_port(str(socket_address[0]), target.port) for _, _, _, _, socket_address in found
    )
