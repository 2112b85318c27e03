"""Which server holds a key: the only server, the sentinels' master, or a server of a cluster.

`RedisServers` is what the pipelines ask; `kvstore.stores.redis.cluster` has clusters.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from redis import ConnectionError as RedisConnectionError
from redis import ConnectionPool, Redis, RedisError
from redis.exceptions import AskError
from redis.sentinel import Sentinel, SentinelConnectionPool
from typing_extensions import override

from baton.common.addresses import join_host_port
from kvstore.stores.redis.connection import (
    BoundedConnection,
    BoundedSentinelConnection,
    BoundedSentinelTlsConnection,
    BoundedTlsConnection,
    CallDeadline,
)
from kvstore.stores.redis.messages import describe
from kvstore.stores.redis.url import Address, AddressBook, RedisUrl, login_settings

__all__ = ["OneServer", "Pools", "RedisServers", "borrowed", "master_pool", "name_of"]


class RedisServers(ABC):
    """Connection pools by the keys that their servers hold.

    Attributes:
        is_one: whether one server holds all keys, so that one command may use any of them.
        deadline: of the thread that calls.
    """

    is_one: bool
    deadline: CallDeadline

    @abstractmethod
    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        """Returns the pool of each name's server.

        Raises:
            redis.RedisError, OSError: no server answered which one holds the names.
        """

    @abstractmethod
    def primaries(self) -> list[ConnectionPool]:
        """Returns the pools of all servers that hold keys.

        Raises:
            redis.RedisError, OSError: as `pools_of`.
        """

    @abstractmethod
    def redirected(self, error: AskError, asked: ConnectionPool, name: bytes) -> ConnectionPool:
        """Returns the pool of the server that an error redirects to.

        Args:
            error: the reply.
            asked: the pool of the server that replied.
            name: the key of the command.

        Raises:
            redis.RedisError: it redirects to no known server.
        """

    def guard(self, pool: ConnectionPool) -> AbstractContextManager[None]:
        """Returns a context for an exchange with one of several servers.

        Raises:
            NotAskedError: the server did not answer a moment ago.
        """
        return nullcontext()

    def probe_due(self) -> float | None:
        """Does what `KvStore.probe_servers` does."""
        return None

    @property
    def failing(self) -> Sequence[str]:
        """The value of `KvStore.failing_servers`."""
        return ()

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


def name_of(pool: ConnectionPool) -> str:
    """Returns the name of a pool's server, for logs and errors."""
    settings = pool.connection_kwargs
    if "host" not in settings:
        return f"the master of {pool.service_name!r}"
    return join_host_port(settings["host"], settings["port"])


class OneServer(RedisServers):
    """A single server, or the sentinels' master."""

    is_one = True

    def __init__(self, pool: ConnectionPool, deadline: CallDeadline) -> None:
        self._pool = pool
        self.deadline = deadline

    @override
    def pools_of(self, names: Iterable[bytes]) -> list[ConnectionPool]:
        return [self._pool for _ in names]

    @override
    def primaries(self) -> list[ConnectionPool]:
        return [self._pool]

    @override
    def redirected(self, error: AskError, asked: ConnectionPool, name: bytes) -> ConnectionPool:
        raise RedisConnectionError("the server is one of a cluster: write redis+cluster://")

    @override
    def forget(self) -> None:
        """Does nothing: failed connections are closed, and new ones ask for the master."""

    @override
    def close(self) -> None:
        self._pool.disconnect()
        if isinstance(self._pool, SentinelConnectionPool):
            for sentinel in self._pool.sentinel_manager.sentinels:
                sentinel.connection_pool.disconnect()


class Pools:
    """Makes the connection pools of one store.

    Args:
        url: the store's.
        deadline: of the thread that calls.
    """

    def __init__(self, url: RedisUrl, deadline: CallDeadline) -> None:
        self.url = url
        self.deadline = deadline
        self.login = login_settings(url.login, "password_file", url.password_file)
        # Not protocol 3: for its pushes, redis-py skips the check for stale connections.
        self.settings: dict[str, Any] = {
            "protocol": 2,
            "max_connections": url.max_connections,
            "deadline": deadline,
            "addresses": AddressBook(),
            **(url.tls or {}),
        }

    def of(self, address: Address, **settings: Any) -> ConnectionPool:
        """Returns a pool of connections to an address, which log in as servers want it."""
        return self._pool(address, **self.login, **settings)

    def of_sentinel(self, address: Address, longest_wait_s: float) -> ConnectionPool:
        """Returns a pool of connections to a sentinel."""
        url = self.url
        login = login_settings(
            url.sentinel_login, "sentinel_password_file", url.sentinel_password_file
        )
        return self._pool(address, longest_wait_s=longest_wait_s, **login)

    def _pool(self, address: Address, **settings: Any) -> ConnectionPool:
        host, port = address
        return ConnectionPool(
            connection_class=BoundedConnection if self.url.tls is None else BoundedTlsConnection,
            host=host,
            port=port,
            **settings,
            **self.settings,
        )


class _LockedSentinel(Sentinel):  # type: ignore[misc]  # redis-py is untyped
    """Sentinels for several threads. The one that answers is asked first the next time."""

    def __init__(self, clients: list[Redis], deadline: CallDeadline) -> None:
        super().__init__([])
        self.sentinels = clients
        self._lock = threading.Lock()
        self._deadline = deadline

    def discover_master(self, service_name: str) -> Address:
        """Asks one sentinel after the other.

        Raises:
            redis.ConnectionError: none of them names a master that is up.
        """
        with self._deadline.locked(self._lock):
            failures = []
            for sentinel in list(self.sentinels):
                try:
                    state = sentinel.sentinel_masters().get(service_name)
                except (RedisError, OSError) as error:
                    name = name_of(sentinel.connection_pool)
                    failures.append(f"sentinel {name}: {describe(error)}")
                    continue
                if state and self.check_master_state(state, service_name):
                    self.sentinels.sort(key=lambda client: client is not sentinel)
                    return state["ip"], state["port"]
            reasons = f": {'; '.join(failures)}" if failures else ""
            raise RedisConnectionError(f"No master found for {service_name!r}{reasons}")


def master_pool(pools: Pools) -> ConnectionPool:
    """Returns a pool of connections to the master that the sentinels name."""
    url = pools.url
    share_s = url.timeout_s / (len(url.addresses) + 1)  # one share is the master's
    clients = [
        Redis(connection_pool=pools.of_sentinel(address, share_s)) for address in url.addresses
    ]
    kind = BoundedSentinelConnection if url.tls is None else BoundedSentinelTlsConnection
    return SentinelConnectionPool(
        url.service,
        _LockedSentinel(clients, pools.deadline),
        connection_class=kind,
        db=url.database,
        **pools.login,
        **pools.settings,
    )
