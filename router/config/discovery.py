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

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError

__all__ = ["Discovery", "FileTarget", "HostTarget", "parse_target"]

_LOGGER = logging.getLogger("baton.router")
_DNS_PREFIX = "dns:///"
_FILE_PREFIX = "file://"
_RESOLVE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class HostTarget:
    """One entry of `--prefill` or `--decode`."""

    host: str
    port: int
    is_dns: bool

    def __str__(self) -> str:
        return (_DNS_PREFIX if self.is_dns else "") + join_host_port(self.host, self.port)


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file with addresses, as an entry of `--prefill` or `--decode`."""

    path: Path

    def __str__(self) -> str:
        return f"{_FILE_PREFIX}{self.path}"


def parse_target(text: str) -> HostTarget | FileTarget:
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
    return HostTarget(host, int(port), is_dns)


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
        self._resolved: dict[HostTarget | FileTarget, frozenset[str]] = {
            target: frozenset([f"{target.host}:{target.port}"])
            for target in self._targets
            if _is_static(target)
        }
        self._problems: dict[HostTarget | FileTarget, str] = {}  # as they are in the log
        self._looking_up: HostTarget | FileTarget | None = None
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
            if isinstance(target, HostTarget) and target.is_dns and address in addresses
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
            if self._looking_up is not None:
                self._report(self._looking_up, f"no answer within {_RESOLVE_TIMEOUT_S:g} s")

    def _resolve_all(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on the thread; passes each result to the event loop as it comes."""
        try:
            for target in self._targets:
                if _is_static(target):
                    continue
                self._looking_up = target
                try:
                    addresses = (
                        _resolve(target) if isinstance(target, HostTarget) else _read(target)
                    )
                except (OSError, ValueError, ConfigurationError) as error:
                    loop.call_soon_threadsafe(self._report, target, _reason(error))
                else:
                    loop.call_soon_threadsafe(self._set_addresses, target, addresses)
            loop.call_soon_threadsafe(self._is_idle.set)
        except RuntimeError:
            pass  # the event loop was closed meanwhile

    def _set_addresses(self, target: HostTarget | FileTarget, addresses: frozenset[str]) -> None:
        self._resolved[target] = addresses
        if self._problems.pop(target, None) is not None:
            _LOGGER.info("%s is found again; addresses: %d", target, len(addresses))

    def _report(self, target: HostTarget | FileTarget, problem: str) -> None:
        """Logs why a target has no addresses, or keeps its last ones, unless it is known."""
        if self._problems.get(target) != problem:
            self._problems[target] = problem
            _LOGGER.warning("cannot find the addresses of %s: %s", target, problem)


def _is_static(target: HostTarget | FileTarget) -> TypeGuard[HostTarget]:
    return isinstance(target, HostTarget) and not target.is_dns


def _read(target: FileTarget) -> frozenset[str]:
    """Returns the addresses in a file. Blocks.

    Raises:
        OSError: it cannot be read.
        UnicodeError: it is no text.
        ConfigurationError: it has a line that is no address.
    """
    lines = target.path.read_text().split()
    for line in lines:
        if not _is_static(parse_target(line)):
            raise ConfigurationError(f"the line {line!r} is no address")
    return frozenset(lines)


def _resolve(target: HostTarget) -> frozenset[str]:
    """Returns the addresses of a name. Blocks.

    Raises:
        OSError: the name cannot be resolved.
        UnicodeError: it is no name.
    """
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    return frozenset(
        join_host_port(str(socket_address[0]), target.port) for _, _, _, _, socket_address in found
    )


def _reason(error: OSError | ValueError | ConfigurationError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
