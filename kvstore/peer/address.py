"""A peer connector's URL, the address in handoffs (`KvPeerParams`), and which slices it lends.

    grpc://[HOST][:PORT]?lease_s=30&timeout_s=2&advertise=HOST
    nixl://[HOST][:PORT]?lease_s=30&timeout_s=2&advertise=HOST

Several processes of a machine may use one URL without a port: each takes a free one. The ranks of
an engine have one URL: with a port, rank 0 listens there and rank `r` at that port plus `r`.

An engine of several ranks saves each block in slices (`kvstore.transfer_form`), and each rank lends
those of its own part of the model. The `connector_params` of its handoffs name all these ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, cycle
from typing import TypeVar
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError

from baton.common.addresses import reachable_host
from baton.v1 import kv_peer_pb2
from baton.v1.kv_peer_pb2 import KvPeerParams
from kvstore.connector import SavedSlices
from kvstore.url import StoreUrl

__all__ = ["PeerAddress", "PeerUrl", "holders_of", "join_params", "select_held"]

_DEFAULT_HOST = "127.0.0.1"
_DEFAULT_LEASE_S = 30.0
_DEFAULT_TIMEOUT_S = 2.0
_LEASE_RANGE_S = (0.1, 86_400.0)
_TIMEOUT_RANGE_S = (0.01, 60.0)
_OPTIONS = ("lease_s", "timeout_s", "advertise")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class PeerUrl:
    """A checked URL of a peer connector.

    Attributes:
        scheme: "grpc" or "nixl".
        host: address to listen on.
        port: port to listen on; 0 for a free one.
        advertised_host: host that readers connect to.
        lease_s: how long blocks are lent from the last renewal.
        timeout_s: longest wait for a peer.
    """

    scheme: str
    host: str
    port: int
    advertised_host: str
    lease_s: float
    timeout_s: float

    @classmethod
    def parse(cls, url: str) -> "PeerUrl":
        """Parses and checks a URL.

        Raises:
            ConfigurationError: an option or part is unknown or wrong; names it.
        """
        parts = StoreUrl.parse(url, _OPTIONS)
        if parts.path not in ("", "/"):
            raise parts.error(f"the path {parts.path!r} means nothing; use a host and a port")
        host, port = _host_and_port(parts)
        return cls(
            scheme=parts.scheme,
            host=host,
            port=port,
            advertised_host=parts.options.get("advertise") or _reachable_host(host, parts),
            lease_s=_seconds(parts, "lease_s", _DEFAULT_LEASE_S, _LEASE_RANGE_S),
            timeout_s=_seconds(parts, "timeout_s", _DEFAULT_TIMEOUT_S, _TIMEOUT_RANGE_S),
        )

    def of_rank(self, rank: int) -> "PeerUrl":
        """Returns where a rank of the engine listens."""
        return replace(self, port=self.port + rank if self.port else 0)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """The address of one process that lends blocks.

    Attributes:
        endpoint: `host:port` of its service.
        generation: 16 random bytes drawn at its start: another process may listen there later.
    """

    endpoint: str
    generation: bytes

    @property
    def peer_id(self) -> str:
        """The id of the process, with which the names of links to it begin."""
        return self.generation.hex()

    def to_params(self, transport: str) -> bytes:
        """Returns the `connector_params` of a handoff whose blocks this process lends alone."""
        return kv_peer_pb2.KvPeerParams(
            endpoint=self.endpoint, generation=self.generation, transport=transport
        ).SerializeToString()


def _host_and_port(parts: StoreUrl) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{parts.authority}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise parts.error(f"{error}") from None
    if split.username is not None:
        raise parts.error("a user and a password are not supported")
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
    """Returns the host that readers connect to if this process listens on `host`."""
    try:
        return reachable_host(host)
    except OSError:
        raise parts.error(
            "this machine's own address cannot be found; set advertise=HOST"
        ) from None


def join_params(ranks: Sequence[SavedSlices]) -> bytes:
    """Returns the `connector_params` of a handoff whose blocks several ranks lend.

    Args:
        ranks: what each of them lends; at least one.
    """
    first, *others = (_with_slices(rank) for rank in ranks)
    first.others.extend(others)
    return first.SerializeToString()


def holders_of(params: bytes, slices: Sequence[int]) -> tuple[PeerAddress, ...]:
    """Returns the process that lends each of some slices, by the `connector_params` of a handoff.

    Raises:
        ValueError: they cannot be read, or name no process for a slice.
    """
    try:
        first = KvPeerParams.FromString(params)
    except DecodeError as error:
        raise ValueError("the handoff's connector_params cannot be read") from error
    lenders = [(_address_from_proto(message), message.slices) for message in (first, *first.others)]
    return tuple(_find_holder(number, lenders) for number in slices)


def select_held(
    items: Sequence[_Item], first: int, holders: Sequence[PeerAddress], holder: PeerAddress
) -> list[_Item]:
    """Returns those of a load's items that belong to objects that one process lends.

    Args:
        items: one for each of some consecutive objects of the load.
        first: number of the first of these objects among those of the load.
        holders: the processes that lend the objects of a block, which are as many as these.
        holder: one of these processes.
    """
    are_held = [holders[(first + index) % len(holders)] == holder for index in range(len(holders))]
    return list(compress(items, cycle(are_held)))


def _with_slices(rank: SavedSlices) -> KvPeerParams:
    message = KvPeerParams.FromString(rank.params)
    message.slices.extend(rank.slices)
    return message


def _address_from_proto(message: KvPeerParams) -> PeerAddress:
    if not message.endpoint or not message.generation:
        raise ValueError("the handoff's connector_params name no peer")
    return PeerAddress(message.endpoint, message.generation)


def _find_holder(number: int, lenders: Sequence[tuple[PeerAddress, Sequence[int]]]) -> PeerAddress:
    for address, slices in lenders:
        if not slices or number in slices:
            return address
    raise ValueError(f"the handoff's connector_params name no peer for slice {number} of a block")
