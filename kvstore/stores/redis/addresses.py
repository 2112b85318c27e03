"""`AddressBook`: the addresses of the servers' names, those that failed last at the end."""

import math
import socket
import time
from collections.abc import Callable

__all__ = ["AddressBook"]

_NEWS_AFTER_S = 60.0


class AddressBook:
    """Resolves names, and remembers which of their addresses did not answer.

    A name may have an address that drops what is sent to it, for example an IPv6 address behind a
    firewall. The address that answered is tried first the next time. Thread-safe: each name's
    entry is replaced as a whole.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed_at: dict[str, dict[str, float]] = {}  # by name, then by address

    def addresses_of(self, host: str, port: int) -> list[str]:
        """Returns the numerical addresses of a name, in the order in which to try them.

        Raises:
            OSError: the name cannot be resolved.
        """
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        before = self._failed_at.get(host, {})
        failed_at = {address: before[address] for address in addresses if address in before}
        self._failed_at[host] = failed_at
        return sorted(addresses, key=lambda address: failed_at.get(address, -math.inf))

    def failed(self, host: str, address: str) -> bool:
        """Notes that an address did not answer; returns whether that is news worth a log line."""
        now, before = self._clock(), self._failed_at.get(host, {})
        self._failed_at[host] = before | {address: now}
        return now - before.get(address, -math.inf) > _NEWS_AFTER_S
