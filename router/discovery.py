"""The addresses of replicas: static targets, and DNS names and files that are read periodically.

host:port           one address
dns:///name:port    every address that the name resolves to, as containers scale
file:///path        every address in the file, one a line
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from baton.errors import ConfigurationError
from rpc.server_config import join_host_port

__all__ = ["Discovery", "FileTarget", "Target", "parse_target"]

_LOGGER = logging.getLogger("baton.router")
_DNS_PREFIX = "dns:///"
_FILE_PREFIX = "file://"
_RESOLVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of `--prefill` or `--decode`."""

    host: str
    port: int
    is_dns: bool


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file with addresses, as an entry of `--prefill` or `--decode`."""

    path: Path


def parse_target(text: str) -> Target | FileTarget:
    """Parses `host:port` or `dns:///name:port`, with brackets around an IPv6 host, or
    `file:///path`.

    Raises:
        ConfigurationError: it is none of them.
    """
    if text.startswith(_FILE_PREFIX + "/"):
        return FileTarget(Path(text.removeprefix(_FILE_PREFIX)))
    is_dns = text.startswith(_DNS_PREFIX)
    host, _, port = text.removeprefix(_DNS_PREFIX).rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigurationError(
            f"target {text!r} must be host:port, dns:///name:port or file:///path"
        )
    return Target(host, int(port), is_dns)


class Discovery:
    """The addresses of one tier.

    Names are resolved, and files read, in a daemon thread, one at a time: neither can be
    interrupted, and one that hangs must block neither the event loop's threads nor the end of the
    process.

    Args:
        targets: the values of the command line's flag.

    Raises:
        ConfigurationError: a target is malformed.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(parse_target(text) for text in targets)
        self._resolved: dict[Target | FileTarget, frozenset[str]] = {
            target: frozenset([f"{target.host}:{target.port}"])
            for target in self._targets
            if _is_static(target)
        }
        self._is_idle = asyncio.Event()  # no look-up is running
        self._is_idle.set()

    @property
    def is_static(self) -> bool:
        """Whether the addresses never change."""
        return all(map(_is_static, self._targets))

    async def addresses(self) -> frozenset[str]:
        """Returns all addresses as `host:port`. A name or file that cannot be read in time keeps
        its last addresses.
        """
        if not self.is_static:
            await self._look_up()
        return frozenset().union(*self._resolved.values())

    def name_of(self, address: str) -> str | None:
        """The DNS name under which an address was found; None for one that was given."""
        found = (
            target.host
            for target, addresses in self._resolved.items()
            if isinstance(target, Target) and target.is_dns and address in addresses
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
                if _is_static(target):
                    continue
                addresses = _resolve(target) if isinstance(target, Target) else _read(target)
                if addresses is not None:
                    loop.call_soon_threadsafe(self._resolved.__setitem__, target, addresses)
            loop.call_soon_threadsafe(self._is_idle.set)
        except RuntimeError:
            pass  # the event loop was closed meanwhile


def _is_static(target: Target | FileTarget) -> TypeGuard[Target]:
    return isinstance(target, Target) and not target.is_dns


def _read(target: FileTarget) -> frozenset[str] | None:
    """Returns the addresses in a file; None if it cannot be read or has another line. Blocks."""
    try:
        lines = target.path.read_text().split()
        found = [parse_target(line) for line in lines]
    except (OSError, UnicodeError, ConfigurationError) as error:
        _LOGGER.debug("cannot read %s: %s", target.path, error)
        return None
    if not all(map(_is_static, found)):
        _LOGGER.debug("%s has more than addresses", target.path)
        return None
    return frozenset(lines)


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
