"""`host:port`: one address, which never changes."""

from dataclasses import dataclass

from typing_extensions import override

from baton.common.addresses import split_host_port
from baton.common.errors import ConfigurationError
from rpc.discovery.source import Scope, Source

__all__ = ["HostTarget"]


@dataclass(frozen=True, slots=True)
class HostTarget:
    """One address. An IPv6 host has its brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostTarget":
        """Parses `host:port`, with brackets around an IPv6 host.

        Raises:
            ConfigurationError: it is no address.
        """
        address = split_host_port(text)
        if address is None:
            raise ConfigurationError(f"{text!r} is not host:port")
        return cls(*address)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def open(self, scope: Scope) -> Source:
        """Makes the source of the address."""
        return _HostSource(str(self))


class _HostSource(Source):
    """The source of a static address."""

    def __init__(self, address: str) -> None:
        self._addresses = frozenset([address])

    @property
    @override
    def addresses(self) -> frozenset[str]:
        return self._addresses
