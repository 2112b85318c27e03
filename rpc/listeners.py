"""Sockets that listen where gRPC's server would, and files that name their port."""

import errno
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from baton.common.addresses import join_host_port
from baton.common.errors import ConfigurationError

__all__ = ["open_listeners", "reserve_port", "write_port_file"]

_ALL_ADDRESSES = ("0.0.0.0", "::")
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_MAX_TRIES = 10


def open_listeners(
    host: str, port: int, backlog: int, *, shares_port: bool = False
) -> list[socket.socket]:
    """Returns sockets that listen at a host's addresses, all on one port.

    As in gRPC, `0.0.0.0` and `::` are all addresses of the machine, of IPv4 and of IPv6, and a name
    is each address that it resolves to and that this machine has. Each family has a socket of its
    own, so that the clients' addresses have the form of their family.

    Args:
        host: an address or a name.
        port: the port; 0 is any one that is free at all of the addresses.
        backlog: connections that wait to be accepted, for each socket.
        shares_port: whether sockets of other processes may listen there too, if they say the same
            and belong to the same user. The kernel gives each connection to one of them.

    Raises:
        OSError: the host has no address of this machine, or the port is in use at one of them.
        UnicodeError: the host is no name.
    """
    return _open_at(host, port, partial(_listen, backlog, shares_port))


def reserve_port(host: str, port: int) -> list[socket.socket]:
    """Returns sockets that keep a host's port for servers that share it, until they are closed.
    They take no connections. The first one has the port.

    Args:
        host: an address or a name, as for `open_listeners`.
        port: the port; 0 is any one that is free at all of the addresses.

    Raises:
        OSError: as for `open_listeners`. A server that shares the port is in its way, too, and so
            is one that has reserved it.
        UnicodeError: the host is no name.
    """
    with ExitStack() as opened:
        sockets = [opened.enter_context(one) for one in _open_at(host, port, _reserve)]
        if sys.platform == "linux":
            sockets += [opened.enter_context(_name_reserved(one.getsockname())) for one in sockets]
        opened.pop_all()
    return sockets


def _listen(backlog: int, shares_port: bool, listener: socket.socket, address: Any) -> None:
    if shares_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(address)
    listener.listen(backlog)


def _reserve(listener: socket.socket, address: Any) -> None:
    """Binds a socket alone, so that a port in use is an error, and only then shares the port."""
    listener.bind(address)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _name_reserved(address: tuple[Any, ...]) -> socket.socket:
    """Returns a socket that has the only name for a reserved address in this network namespace.

    Two sockets that do not listen yet can be bound to one address, as they must not mind the
    connections of an earlier server (SO_REUSEADDR). Servers that start at the same time would
    share the port.

    Raises:
        OSError: another process has reserved the address.
    """
    with ExitStack() as unnamed:
        named = unnamed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        named.bind(f"\0baton-reserved-port-{join_host_port(address[0], address[1])}".encode())
        unnamed.pop_all()
    return named


_Bind = Callable[[socket.socket, Any], None]
"""Binds a socket to an address."""


def _open_at(host: str, port: int, bind: _Bind) -> list[socket.socket]:
    hosts = _ALL_ADDRESSES if host in _ALL_ADDRESSES else (host,)
    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            return _open_each(hosts, port, bind)
        except OSError as error:
            # The free port of one address may be in use at the next one.
            if port or error.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def _open_each(hosts: Sequence[str], port: int, bind: _Bind) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as opened:
        for family, address in _addresses(hosts, port):
            bound_port = listeners[0].getsockname()[1] if listeners else port
            at_port = (address[0], bound_port, *address[2:])
            try:
                listener = _open_one(family, at_port, bind)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                listeners.append(opened.enter_context(listener))
        opened.pop_all()
    if not listeners:
        raise absent or OSError(errno.EADDRNOTAVAIL, "no address")
    return listeners


def _open_one(family: int, address: tuple[Any, ...], bind: _Bind) -> socket.socket:
    with ExitStack() as unopened:
        listener = unopened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bind(listener, address)
        unopened.pop_all()
    return listener


def _addresses(hosts: Sequence[str], port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Returns the families and the socket addresses of hosts, each once."""
    found = [
        (int(family), address)
        for host in hosts
        for family, *_, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    ]
    return list(dict.fromkeys(found))


def write_port_file(path: Path, port: int) -> None:
    """Writes a server's port, in one piece: no reader sees half a number.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{port}\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write --port-file {path}: {error.strerror}") from None
