"""Where a peer connector listens, and how others are told: its URL, and `KvPeerParams`.

    grpc://[HOST][:PORT]?lease_s=30&timeout_s=2&advertise=HOST
    nixl://[HOST][:PORT]?lease_s=30&timeout_s=2&advertise=HOST&mode=pull|push

One URL may serve several processes of a machine: without a port each takes a free one.
"""

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError

from baton.v1 import kv_peer_pb2
from kvstore.url import StoreUrl

__all__ = ["MODES", "PeerAddress", "PeerUrl", "join_host_port"]

MODES = ("pull", "push")

_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_LEASE_S = 30.0
_DEFAULT_TIMEOUT_S = 2.0
_LEASE_RANGE_S = (0.1, 86_400.0)
_TIMEOUT_RANGE_S = (0.01, 60.0)
_OPTIONS = ("lease_s", "timeout_s", "advertise")
# Addresses for documentation: nothing is sent there, only the route to them is asked for.
_FAR_AWAY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


@dataclass(frozen=True, slots=True)
class PeerUrl:
    """A peer connector's URL, checked.

    Attributes:
        scheme: "grpc" or "nixl".
        host: to listen on.
        port: to listen on; 0 for a free one.
        advertised_host: what others are told to connect to.
        lease_s: how long blocks are lent from the last renewal.
        timeout_s: longest wait for a peer.
        mode: who moves bytes: "pull" the reader, "push" the lender.
    """

    scheme: str
    host: str
    port: int
    advertised_host: str
    lease_s: float
    timeout_s: float
    mode: str

    @classmethod
    def parse(cls, url: str) -> "PeerUrl":
        """Takes a URL apart.

        Raises:
            ConfigurationError: names the option or part that is wrong.
        """
        known = _OPTIONS if url.lower().startswith("grpc:") else (*_OPTIONS, "mode")
        parts = StoreUrl.parse(url, known)
        if parts.path not in ("", "/"):
            raise parts.error(f"there is nothing at {parts.path!r}; it takes a host and a port")
        host, port = _host_and_port(parts)
        mode = parts.options.get("mode", MODES[0])
        if mode not in MODES:
            raise parts.error(f"mode is {mode!r}; it must be {' or '.join(MODES)}")
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port,
            advertised_host=parts.options.get("advertise") or _reachable_host(host, parts),
            lease_s=_seconds(parts, "lease_s", _DEFAULT_LEASE_S, _LEASE_RANGE_S),
            timeout_s=_seconds(parts, "timeout_s", _DEFAULT_TIMEOUT_S, _TIMEOUT_RANGE_S),
            mode=mode,
        )


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One process that lends blocks: where it is, and which of those that were there.

    Attributes:
        endpoint: `host:port` of its service.
        generation: 16 random bytes of its start.
    """

    endpoint: str
    generation: bytes

    @property
    def peer_id(self) -> str:
        """Its name among transports' peers."""
        return self.generation.hex()

    def to_params(self, transport: str) -> bytes:
        """What a handoff says of it."""
        return kv_peer_pb2.KvPeerParams(
            endpoint=self.endpoint, generation=self.generation, transport=transport
        ).SerializeToString()

    @classmethod
    def from_params(cls, params: bytes) -> "PeerAddress":
        """What a handoff says of it.

        Raises:
            ValueError: it says nothing of the kind.
        """
        try:
            message = kv_peer_pb2.KvPeerParams.FromString(params)
        except DecodeError as error:
            raise ValueError("the handoff's connector_params cannot be read") from error
        if not message.endpoint or not message.generation:
            raise ValueError("the handoff's connector_params name no peer")
        return cls(message.endpoint, message.generation)


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_and_port(parts: StoreUrl) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{parts.authority}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise parts.error(f"{error}") from None
    if split.username is not None:
        raise parts.error("it takes no user and no password")
    return host or _DEFAULT_HOST, port or 0


def _seconds(parts: StoreUrl, name: str, default_s: float, limits_s: tuple[float, float]) -> float:
    lowest_s, highest_s = limits_s
    value_s = parts.seconds(name, default_s)
    if not lowest_s <= value_s <= highest_s:
        raise parts.error(
            f"{name} is {value_s:g}; it must be {lowest_s:g} to {highest_s:g} seconds"
        )
    return value_s


def _reachable_host(host: str, parts: StoreUrl) -> str:
    """What others connect to if this process listens on `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host  # a name
    if not address.is_unspecified:
        return host
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_FAR_AWAY[family], 9))
        except OSError:
            raise parts.error(
                "this machine's own address is not known; say advertise=HOST"
            ) from None
        own: str = probe.getsockname()[0]
    return own
