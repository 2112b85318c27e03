"""Texts of addresses. A leaf module like `baton.common.errors`."""

import ipaddress
import socket

__all__ = ["join_host_port", "reachable_host", "split_host_port"]

_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Reserved for documentation: the kernel is asked for the route to them; nothing is sent."""


def join_host_port(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int] | None:
    """Returns the host, as it is written, and the port of `host:port`; None for other texts."""
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65535
    is_host = host.isprintable() and not {" ", "/", ""}.intersection((*host, host))
    return (host, int(port)) if is_host and is_port else None


def reachable_host(host: str) -> str:
    """Returns the host that others connect to if a process of this machine listens on `host`.

    Raises:
        OSError: it listens on all addresses, and the machine's own one cannot be found.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host  # a name
    if not address.is_unspecified:
        return host
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_FAR_AWAY[family], 9))
        local_host: str = probe.getsockname()[0]
    return local_host
