"""Free ports for servers that are about to start, and how this machine reaches them."""

import errno
import socket
from collections.abc import Collection, Iterable
from contextlib import ExitStack

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError
from baton.common.ports import keep_from_others
from rpc.listeners import open_listeners

__all__ = ["bound_ports", "free_port", "local_address"]

_LOOPBACK_OF_ALL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def bound_ports(addresses: Iterable[tuple[str, int, str]]) -> list[int]:
    """Returns free ports, all different.

    The sockets are closed before the servers bind. For about a minute, the system gives the free
    ports that it chose to nobody else; see `keep_from_others`. A server whose port was taken
    nevertheless fails with that error, and the cluster does not start.

    Args:
        addresses: host, port and flag of each; port 0 is any free one.

    Raises:
        ConfigurationError: an address cannot be bound.
    """
    with ExitStack() as stack:
        ports = []
        for host, port, flag in addresses:
            listeners = _bind(host, port, flag)
            for listener in listeners:
                stack.enter_context(listener)
                if port == 0:
                    keep_from_others(listener)
            ports.append(int(listeners[0].getsockname()[1]))
        return ports


def free_port(host: str, taken: Collection[str] = ()) -> int:
    """Returns a free port of this host; see `bound_ports`.

    Args:
        host: the address to listen on.
        taken: `:port` of each port to leave out: a worker may not have bound its own yet.
    """
    ports = bound_ports([(host, 0, "--port")] * (len(taken) + 1))  # one of them is not taken
    return next(port for port in ports if f":{port}" not in taken)


def _bind(host: str, port: int, flag: str) -> list[socket.socket]:
    try:
        return open_listeners(host, port, backlog=1)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a valid host name"
        remedy = _remedy(getattr(error, "errno", None), flag)
        raise ConfigurationError(
            f"cannot listen on {join_host_port(host, port)}: {reason}; {remedy}"
        ) from None


def _remedy(number: int | None, flag: str) -> str:
    if number in (errno.EADDRINUSE, errno.EACCES):
        return f"choose another {flag} (0 picks a free one)"
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return "choose another --host"


def local_address(host: str, port: int) -> str:
    """Returns the address at which this machine reaches a server that listens on `host`."""
    return join_host_port(_LOOPBACK_OF_ALL.get(host, host), port)
