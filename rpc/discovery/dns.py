"""`dns:///name:port`: every address that a name resolves to, as containers scale."""

import socket
from dataclasses import dataclass

from typing_extensions import override

from baton.common.addresses import join_host_port, split_host_port
from baton.common.errors import ConfigurationError
from rpc.discovery.source import LookedUpSource, Scope

__all__ = ["DnsTarget"]


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """A DNS name."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "DnsTarget":
        """Parses `name:port`.

        Raises:
            ConfigurationError: it is neither a name nor an IP address with a port.
        """
        address = split_host_port(text)
        if address is None:
            raise ConfigurationError(f"{text!r} is not name:port")
        return cls(*address)

    def __str__(self) -> str:
        return f"dns:///{join_host_port(self.name, self.port)}"

    def open(self, scope: Scope) -> LookedUpSource:
        """Makes the source of the name's addresses."""
        return _DnsSource(self)


class _DnsSource(LookedUpSource):
    def __init__(self, target: DnsTarget) -> None:
        super().__init__(str(target))
        self._target = target

    @override
    def name_of(self, address: str) -> str | None:
        return self._target.name if address in self.addresses else None

    @override
    def look_up(self) -> frozenset[str]:
        name, port = self._target.name, self._target.port
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return frozenset(join_host_port(str(info[4][0]), port) for info in infos)
