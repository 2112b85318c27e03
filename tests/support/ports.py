"""Ports that no other process takes by chance, for servers that are down for a part of a test.

The system gives a port of its ephemeral range to every connection and to every server that asks for
port 0, so a port of this range may belong to another process soon after it was freed. The ports
here are outside of this range, and each process of pytest-xdist has its own share of them.
"""

import errno
import os
import random
import socket
from pathlib import Path

__all__ = ["reserved_port", "reserved_ports"]

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LINUX_RANGE = "32768 60999"
_FIRST = 10_000
"""Services that people install have ports below, for the most part."""
_MIN_PORTS = 4000
"""So many ports outside of the ephemeral range are enough."""
_MAX_TRIES = 1000

# Of its own: Hypothesis seeds the shared generator, so that all processes would draw the same.
_RANDOM = random.SystemRandom()
_drawn: dict[int, None] = {}  # in the order of the draws


def reserved_port() -> int:
    """Returns a port at which nobody listens, on any address, and that no other caller gets."""
    return reserved_ports(1)[0]


def reserved_ports(number: int) -> list[int]:
    """Returns consecutive ports like that of `reserved_port`.

    Raises:
        RuntimeError: too many of the ports are in use.
    """
    share = _share()
    while 2 * len(_drawn) > len(share):
        del _drawn[next(iter(_drawn))]
    for _ in range(_MAX_TRIES):
        first = _RANDOM.randrange(share.start, share.stop - number + 1)
        ports = range(first, first + number)
        if _drawn.keys().isdisjoint(ports) and all(map(_is_free, ports)):
            _drawn.update(dict.fromkeys(ports))
            return list(ports)
    raise RuntimeError(f"{_MAX_TRIES} tries found no free ports between {share[0]} and {share[-1]}")


def _share() -> range:
    """Returns the ports of this process among those of all processes of pytest-xdist. One that
    replaces a process which has ended has a higher number than there are processes.
    """
    ports = _outside_of_ephemeral()
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    return ports[len(ports) * index // count : len(ports) * (index + 1) // count]


def _outside_of_ephemeral() -> range:
    """Returns ports below or above the ephemeral range, or all high ones if these are too few."""
    has_file = _EPHEMERAL_RANGE.exists()
    text = _EPHEMERAL_RANGE.read_text() if has_file else _LINUX_RANGE
    low, high = map(int, text.split())
    longest = max(range(_FIRST, low), range(high + 1, 1 << 16), key=len)
    return longest if len(longest) >= _MIN_PORTS else range(_FIRST, 1 << 16)


def _is_free(port: int) -> bool:
    """Returns whether a server could listen at all addresses of this machine."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return False
    return True
