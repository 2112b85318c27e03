"""Where replicas may be: static targets, and DNS names resolved again and again.

host:port           one address
dns:///name:port    every address the name resolves to, as containers scale
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigurationError

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
    """Reads `host:port` or `dns:///name:port`; IPv6 hosts stand in brackets.

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

    Args:
        targets: as given on the command line.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(parse_target(text) for text in targets)
        self._resolved: dict[Target, frozenset[str]] = {}

    @property
    def is_static(self) -> bool:
        """Whether the addresses never change."""
        return not any(target.is_dns for target in self._targets)

    async def addresses(self) -> frozenset[str]:
        """All addresses now, as `host:port`; a name that fails keeps its last ones."""
        for target in self._targets:
            await self._resolve(target)
        return frozenset().union(*self._resolved.values())

    async def _resolve(self, target: Target) -> None:
        if not target.is_dns:
            self._resolved[target] = frozenset([f"{target.host}:{target.port}"])
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            _LOGGER.debug("cannot resolve %s: %s", target.host, error)
            return
        self._resolved[target] = frozenset(
            _address(family, socket_address[0], target.port)
            for family, _, _, _, socket_address in found
        )


def _address(family: socket.AddressFamily, host: str | int, port: int) -> str:
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
