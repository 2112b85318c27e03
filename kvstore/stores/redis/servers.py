"""Which server holds a key: the only server, the sentinels' master, or a server of a cluster.

redis-py's `RedisCluster` is not used, because it connects in its constructor,
repeats commands with waits of its own, and reads values as `bytes`. This module
uses its parts.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import ConnectionPool, Redis, RedisError
from redis.cluster import parse_cluster_slots
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError
from redis.sentinel import Sentinel, SentinelConnectionPool

from kvstore.stores.redis.connection import (
    BoundedConnection,
    BoundedSentinelConnection,
    BoundedSentinelTlsConnection,
    BoundedTlsConnection,
    CallDeadline,
)
from kvstore.stores.redis.url import Address, RedisUrl

__all__ = ["RedisServers", "borrowed", "open_servers"]


class RedisServers(ABC):
    """Connection pools by the keys that their servers hold.

    Attributes:
        is_one: whether one server holds all keys, so that one command may use any of them.
    """

    is_one: bool

    @abstractmethod
    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        """Returns the pool of each name's server.

        Raises:
            redis.RedisError, OSError: no server answered which one holds the names.
        """

    @abstractmethod
    def redirected(self, error: AskError) -> ConnectionPool:
        """Returns the pool of the server that an error redirects to."""

    @abstractmethod
    def forget(self) -> None:
        """Forgets which server holds what, after one failed or changed its role."""

    @abstractmethod
    def close(self) -> None:
        """Closes all connections."""


@contextmanager
def borrowed(pool: ConnectionPool) -> Iterator[Any]:
    """Lends a connection of a pool; after an error, closes it.

    After an error, replies may be unread, and must not be read as another command's.
    """
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def open_servers(url: RedisUrl, deadline: CallDeadline) -> RedisServers:
    """Returns the servers of a URL, without connecting to them."""
    if url.topology == "cluster":
        return _Cluster(url, deadline)
    if url.topology == "sentinel":
        return _OneServer(_master_pool(url, deadline))
    return _OneServer(_pool(url, deadline, url.addresses[0], **url.login, db=url.database))


class _OneServer(RedisServers):
    is_one = True

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        return [self._pool for _ in names]

    def redirected(self, error: AskError) -> ConnectionPool:
        raise RedisConnectionError("the server is one of a cluster: write redis+cluster://")

    def forget(self) -> None:
        """Does nothing: failed connections are closed, and new ones ask for the master."""

    def close(self) -> None:
        self._pool.disconnect()


class _Cluster(RedisServers):
    """The primaries of a cluster by hash slot, asked for when first needed."""

    is_one = False

    def __init__(self, url: RedisUrl, deadline: CallDeadline) -> None:
        self._url = url
        self._deadline = deadline
        self._lock = threading.Lock()
        self._pools: dict[Address, ConnectionPool] = {}
        self._candidates = list(url.addresses)  # servers to ask, in this order
        self._owners: Sequence[ConnectionPool | None] | None = None  # by slot

    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        owners = self._owners or self._find_owners()
        pools = [owners[key_slot(name)] for name in names]
        if None in pools:
            self.forget()
            raise RedisConnectionError("the cluster has no server for some of the keys")
        return [pool for pool in pools if pool is not None]

    def redirected(self, error: AskError) -> ConnectionPool:
        address = (error.host, error.port)
        with self._deadline.locked(self._lock):
            if isinstance(error, MovedError):
                self._owners = None
                self._candidates = _first(address, self._candidates)
            return self._pool(address)

    def forget(self) -> None:
        self._owners = None

    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.disconnect()

    def _find_owners(self) -> Sequence[ConnectionPool | None]:
        """Asks one server after the other, each for a share of the time left."""
        with self._deadline.locked(self._lock):
            if self._owners is not None:
                return self._owners
            failure: Exception | None = None
            for index, address in enumerate(self._candidates):
                share_s = self._deadline.left_s() / (len(self._candidates) - index + 1)
                try:
                    with self._deadline.within(share_s):
                        return self._learn(address, self._ask(address))
                except (RedisError, OSError) as error:
                    failure = error
            raise RedisConnectionError(f"no server of the cluster answers: {failure}")

    def _ask(self, address: Address) -> dict[tuple[int, int], Any]:
        """Returns the primary and the replicas of each range of slots (CLUSTER SLOTS)."""
        with borrowed(self._pool(address)) as connection:
            connection.send_command("CLUSTER", "SLOTS")
            reply = connection.read_response()
        slots: dict[tuple[int, int], Any] = parse_cluster_slots(reply, current_host=address[0])
        return slots

    def _learn(
        self, asked: Address, slots: dict[tuple[int, int], Any]
    ) -> Sequence[ConnectionPool | None]:
        owners: list[ConnectionPool | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        known = {asked}
        for (first, last), servers in slots.items():
            primary = servers["primary"]
            owners[first : last + 1] = [self._pool(primary)] * (last + 1 - first)
            known.update((primary, *servers["replicas"]))
        for address in self._pools.keys() - known:
            self._pools.pop(address).disconnect(inuse_connections=False)
        self._candidates = _first(asked, [*sorted(known), *self._url.addresses])
        self._owners = owners
        return owners

    def _pool(self, address: Address) -> ConnectionPool:
        if address not in self._pools:
            self._pools[address] = _pool(self._url, self._deadline, address, **self._url.login)
        return self._pools[address]


class _LockedSentinel(Sentinel):  # type: ignore[misc]
    """Sentinels for several threads. The one that answers is asked first the next time."""

    def __init__(self, clients: list[Redis], deadline: CallDeadline) -> None:
        super().__init__([])
        self.sentinels = clients
        self._lock = threading.Lock()
        self._deadline = deadline

    def discover_master(self, service_name: str) -> Address:
        with self._deadline.locked(self._lock):
            host, port = super().discover_master(service_name)
            return host, port


def _master_pool(url: RedisUrl, deadline: CallDeadline) -> ConnectionPool:
    share_s = url.timeout_s / (len(url.addresses) + 1)  # one share is the master's
    clients = [
        Redis(
            connection_pool=_pool(
                url, deadline, address, **url.sentinel_login, longest_wait_s=share_s
            )
        )
        for address in url.addresses
    ]
    kind = BoundedSentinelConnection if url.tls is None else BoundedSentinelTlsConnection
    return SentinelConnectionPool(
        url.service,
        _LockedSentinel(clients, deadline),
        connection_class=kind,
        db=url.database,
        **url.login,
        **_common_settings(url, deadline),
    )


def _pool(url: RedisUrl, deadline: CallDeadline, address: Address, **settings: Any) -> Any:
    host, port = address
    return ConnectionPool(
        connection_class=BoundedConnection if url.tls is None else BoundedTlsConnection,
        host=host,
        port=port,
        **settings,
        **_common_settings(url, deadline),
    )


def _common_settings(url: RedisUrl, deadline: CallDeadline) -> dict[str, Any]:
    """Returns settings for all pools. Not protocol 3: for its pushes, redis-py skips the check for
    stale connections.
    """
    common = {"protocol": 2, "max_connections": url.max_connections, "deadline": deadline}
    return common | dict(url.tls or {})


def _first(address: Address, others: Iterable[Address]) -> list[Address]:
    """Returns the addresses, each once, with `address` first."""
    return list(dict.fromkeys([address, *others]))
