"""`Cluster`: the servers of a Redis Cluster, by hash slot. `open_servers`.

redis-py's `RedisCluster` is not used, because it connects in its constructor, repeats commands with
waits of its own, and reads values as `bytes`.

Each server has a breaker, so that one which is dead delays no call for the others.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import ConnectionPool, InvalidResponse, RedisError
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError
from typing_extensions import override

from baton.common.addresses import join_host_port
from kvstore.guard.breaker import Breaker
from kvstore.store import StoreUnavailableError
from kvstore.stores.redis.connection import CallDeadline
from kvstore.stores.redis.messages import describe
from kvstore.stores.redis.reply import Reply
from kvstore.stores.redis.servers import OneServer, Pools, RedisServers, borrowed, master_pool
from kvstore.stores.redis.url import Address, RedisUrl

__all__ = ["Cluster", "SlotRange", "open_servers", "parse_slots"]

_UNKNOWN = "?"
_MIN_AGE_S = 1.0
_MAX_FAILURES = 3  # that an error names


def open_servers(url: RedisUrl, deadline: CallDeadline) -> RedisServers:
    """Returns the servers of a URL, without connecting to them."""
    pools = Pools(url, deadline)
    if url.topology == "cluster":
        return Cluster(pools)
    if url.topology == "sentinel":
        return OneServer(master_pool(pools), deadline)
    return OneServer(pools.of(url.addresses[0], db=url.database), deadline)


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The servers of a range of slots.

    Attributes:
        first: first slot.
        last: last slot.
        primary: the server that holds them.
        replicas: its replicas.
    """

    first: int
    last: int
    primary: Address
    replicas: tuple[Address, ...]


class Cluster(RedisServers):
    """The primaries of a cluster by hash slot, asked for when first needed.

    Args:
        pools: makes the pools of its servers.
    """

    is_one = False

    def __init__(self, pools: Pools) -> None:
        self.deadline = pools.deadline
        self._make_pool = pools.of
        self._url = pools.url
        self._lock = threading.Lock()
        self._pools: dict[Address, ConnectionPool] = {}
        self._breakers: dict[Address, Breaker] = {}
        self._probes_with_calls = True
        self._candidates = list(self._url.addresses)  # servers to ask, in this order
        self._owners: Sequence[ConnectionPool | None] | None = None  # by slot
        self._learned_at = 0.0

    @override
    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        owners = self._owners or self._find_owners()
        pools = [owners[key_slot(name)] for name in names]
        if None in pools:
            self.forget()
            raise RedisConnectionError("the cluster has no server for some of the keys")
        return [pool for pool in pools if pool is not None]

    @override
    def primaries(self) -> list[ConnectionPool]:
        owners = self._owners or self._find_owners()
        return [pool for pool in dict.fromkeys(owners) if pool is not None]

    @override
    def redirected(self, error: AskError, asked: ConnectionPool, name: bytes) -> ConnectionPool:
        """A redirection without a host means the server that sent it, at another port; one to "?"
        means a server whose name the cluster does not know; its port or its slots may identify it.
        """
        sender = _address_of(asked)
        address: Address = (error.host or sender[0], error.port)
        with self.deadline.locked(self._lock):
            if isinstance(error, MovedError):
                self._owners = None
                first = sender if error.host == _UNKNOWN else address
                self._candidates = _first(first, self._candidates)
            if error.host != _UNKNOWN:
                return self._pool(address)
        return self._find_unnamed(error, name)

    def _find_unnamed(self, error: AskError, name: bytes) -> ConnectionPool:
        (owner,) = self.pools_of([name])
        if isinstance(error, MovedError):
            return owner
        with self.deadline.locked(self._lock):
            same_port = [pool for address, pool in self._pools.items() if address[1] == error.port]
        if len(same_port) != 1:
            raise RedisConnectionError(
                f"the cluster redirects to an unknown host at port {error.port}: set "
                "cluster-announce-hostname, or cluster-preferred-endpoint-type ip"
            )
        return same_port[0]

    @override
    def guard(self, pool: ConnectionPool) -> AbstractContextManager[None]:
        address = _address_of(pool)
        breaker = self._breakers.get(address)
        if breaker is None:
            name = f"the KV store's server {join_host_port(*address)}"
            breaker = self._breakers.setdefault(address, Breaker(name))
            breaker.probes_with_calls = self._probes_with_calls
        return breaker.guard()

    @override
    def probe_due(self) -> float | None:
        self._probes_with_calls = False
        breakers = list(self._breakers.items())
        for address, breaker in breakers:
            breaker.probes_with_calls = False
            if breaker.due_in_s == 0:
                with suppress(RedisError, OSError, StoreUnavailableError):
                    self._probe(address, breaker)
        times = [breaker.due_in_s for _, breaker in breakers]
        return min((due_s for due_s in times if due_s is not None), default=None)

    def _probe(self, address: Address, breaker: Breaker) -> None:
        with self.deadline.within(self._url.timeout_s):
            with self.deadline.locked(self._lock):
                pool = self._pool(address)
            with breaker.guard(may_probe=True):
                _ask_slots(pool)

    @property
    @override
    def failing(self) -> Sequence[str]:
        breakers = list(self._breakers.items())
        return [
            f"its server {join_host_port(*address)} {breaker.problem}: {breaker.error}"
            for address, breaker in breakers
            if breaker.is_open
        ]

    @override
    def forget(self) -> None:
        """Forgets the owners unless they were asked for just now: while a server is down, each call
        comes here, and only now and then a replica has taken its slots.
        """
        if time.monotonic() - self._learned_at > _MIN_AGE_S:
            self._owners = None

    @override
    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.disconnect()

    def _find_owners(self) -> Sequence[ConnectionPool | None]:
        """Asks one server after the other, each for a share of the time left."""
        with self.deadline.locked(self._lock):
            if self._owners is not None:
                return self._owners
            failures: list[str] = []
            for index, address in enumerate(list(self._candidates)):
                share = 1 / (len(self._candidates) - index + 1)
                try:
                    with self.deadline.within_share(share):
                        return self._learn(address, self._ask(address))
                except (RedisError, OSError, StoreUnavailableError) as error:
                    failures.append(f"{join_host_port(*address)}: {describe(error)}")
            raise RedisConnectionError(
                f"no server of the cluster answers: {'; '.join(failures[-_MAX_FAILURES:])}"
            )

    def _ask(self, address: Address) -> list[SlotRange]:
        """Returns the primary and the replicas of each range of slots (CLUSTER SLOTS)."""
        pool = self._pool(address)
        with self.guard(pool):
            reply = _ask_slots(pool)
        if isinstance(reply, RedisError):
            raise reply
        return parse_slots(reply, address[0])

    def _learn(self, asked: Address, slots: Sequence[SlotRange]) -> Sequence[ConnectionPool | None]:
        owners: list[ConnectionPool | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        known = {asked}
        for part in slots:
            owners[part.first : part.last + 1] = [self._pool(part.primary)] * (
                part.last + 1 - part.first
            )
            known.update((part.primary, *part.replicas))
        for address in self._pools.keys() - known:
            self._pools.pop(address).disconnect(inuse_connections=False)
            self._breakers.pop(address, None)
        self._candidates = _first(asked, [*sorted(known), *self._url.addresses])
        self._learned_at = time.monotonic()
        self._owners = owners
        return owners

    def _pool(self, address: Address) -> ConnectionPool:
        if address not in self._pools:
            self._pools[address] = self._make_pool(address)
        return self._pools[address]


def _ask_slots(pool: ConnectionPool) -> Reply:
    """Returns a server's reply to CLUSTER SLOTS, which users of workers may ask."""
    with borrowed(pool) as connection:
        connection.send_command("CLUSTER", "SLOTS")
        reply: Reply = connection.read_response()
    return reply


def parse_slots(reply: Reply, asked_host: str) -> list[SlotRange]:
    """Parses the reply of CLUSTER SLOTS.

    A server without a host is reached at the host that was asked; one whose host is "?" at the IP
    address in its metadata.

    Raises:
        redis.InvalidResponse: the reply is malformed.
    """
    malformed = InvalidResponse("the reply to CLUSTER SLOTS is malformed")
    if not isinstance(reply, list):
        raise malformed
    try:
        return [_parse_range(part, asked_host) for part in reply]
    except (AttributeError, IndexError, TypeError, ValueError):
        raise malformed from None


def _parse_range(part: Sequence[Any], asked_host: str) -> SlotRange:
    first, last = int(part[0]), int(part[1])
    if not 0 <= first <= last < REDIS_CLUSTER_HASH_SLOTS:
        raise ValueError
    primary, *replicas = [_parse_server(server, asked_host) for server in part[2:]]
    return SlotRange(first, last, primary, tuple(replicas))


def _parse_server(server: Sequence[Any], asked_host: str) -> Address:
    host = (server[0] or b"").decode()
    if host == _UNKNOWN:
        texts = [text.decode() for text in (server[3] if len(server) > 3 else ())]
        host = dict(zip(texts[::2], texts[1::2], strict=False)).get("ip", "")
    return host or asked_host, int(server[1])


def _address_of(pool: ConnectionPool) -> Address:
    settings = pool.connection_kwargs
    return settings["host"], settings["port"]


def _first(address: Address, others: Iterable[Address]) -> list[Address]:
    """Returns the addresses, each once, with `address` first."""
    return list(dict.fromkeys([address, *others]))
