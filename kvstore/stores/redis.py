"""`redis://host:port/db` and `rediss://`: objects in a Redis server (6.2 or later).

Keys are `baton:kv:` and the block key's bytes. The server bounds its own
memory: run it with `maxmemory` and `maxmemory-policy allkeys-lru`.

No command is retried and no call outlives a server that is silent for
`timeout_s`. A connection that the server closed is replaced when it is next
taken from the pool, so the store works again as soon as the server does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from redis import BlockingConnectionPool, Redis, RedisError
from redis.connection import PythonRespSerializer

from kvstore.store import GetStatus, KvStore, StoreCapabilities, StoreStats, StoreUnavailableError
from kvstore.stores.buffers import copy_into
from kvstore.stores.counters import StoreCounters
from kvstore.stores.url import DEFAULT_TIMEOUT_S, DEFAULT_TTL_S, StoreUrl

__all__ = ["RedisStore"]

_REFUSED_OPTIONS = {
    "max_bytes": "max_bytes is the server's to keep: start it with --maxmemory SIZE "
    "--maxmemory-policy allkeys-lru"
}
_KEY_PREFIX = b"baton:kv:"
_MAX_CONNECTIONS = 16
_MAX_BATCH_BYTES = 8 << 20
_MAX_BATCH_OBJECTS = 1024
_JOINED_WRITE_BYTES = 6000
_TOUCH_PREFIX = """
for i, key in ipairs(KEYS) do
  if redis.call('PEXPIRE', key, ARGV[1]) == 0 then return i - 1 end
end
return #KEYS
"""


class RedisStore(KvStore):
    """One pool of connections to a server; from `from_url`."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=True,
        survives_restart=False,
        takes_max_bytes=False,
    )

    def __init__(self, pool: BlockingConnectionPool, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._ttl_ms = round(ttl_s * 1000)
        self._pool = pool
        self._client = Redis(connection_pool=pool)
        self._touch_prefix = self._client.register_script(_TOUCH_PREFIX)
        self._counters = StoreCounters()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens `redis://[user:password@]host[:port][/db]?ttl_s=&timeout_s=`.

        `rediss://` speaks TLS and checks the server's certificate against the
        machine's authorities, or those of the SSL_CERT_FILE environment variable.

        Raises:
            ConfigurationError: no host; a bad port, database or option.
        """
        parts = StoreUrl.parse(url, ("ttl_s", "timeout_s"), _REFUSED_OPTIONS)
        ttl_s = parts.seconds("ttl_s", DEFAULT_TTL_S)
        return cls(_make_pool(parts, parts.seconds("timeout_s", DEFAULT_TIMEOUT_S)), ttl_s)

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`."""
        for batch in _batches(keys, values):
            self._put_batch(batch)
        self._counters.count_puts(values)

    def _put_batch(self, batch: list[tuple[bytes, memoryview]]) -> None:
        """Asks first, so that the bytes of objects which exist are not sent."""
        touched = self._execute([("PEXPIRE", name, self._ttl_ms) for name, _ in batch])
        self._execute(
            [
                ("SET", name, value, "NX", "PX", self._ttl_ms)
                for (name, value), exists in zip(batch, touched, strict=True)
                if not exists
            ]
        )

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`."""
        statuses: list[GetStatus] = []
        for batch in _batches(keys, buffers):
            values = self._execute([("GETEX", name, "PX", self._ttl_ms) for name, _ in batch])
            for (_, buffer), value in zip(batch, values, strict=True):
                statuses.append(copy_into(value, buffer))
        self._counters.count_gets(statuses, buffers)
        return statuses

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`."""
        if not keys:
            return 0
        with _redis_errors_as_unavailable():
            names = [_KEY_PREFIX + key for key in keys]
            return int(self._touch_prefix(keys=names, args=[self._ttl_ms]))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        if not keys:
            return 0
        with _redis_errors_as_unavailable():
            return int(self._client.unlink(*(_KEY_PREFIX + key for key in keys)))

    def stats(self) -> StoreStats:
        """See `KvStore.stats`. What the server holds is not ours to know cheaply."""
        return self._counters.snapshot(num_objects=None, num_bytes=None)

    def close(self) -> None:
        """See `KvStore.close`."""
        self._pool.disconnect()

    def _execute(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """Sends commands in one pipeline; all their replies.

        Raises:
            StoreUnavailableError: no answer, or an error as one of the replies.
        """
        with (
            _redis_errors_as_unavailable(),
            self._client.pipeline(transaction=False) as pipeline,
        ):
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, RedisError):
                    raise reply
        return replies


def _make_pool(parts: StoreUrl, timeout_s: float) -> BlockingConnectionPool:
    """The bounded pool; connects when it is first used."""
    database = parts.path.removeprefix("/")
    if not parts.authority.rpartition("@")[2] or not (database or "0").isdecimal():
        raise parts.error(f"write {parts.scheme}://host:port/database, the database a number")
    try:
        return BlockingConnectionPool.from_url(
            f"{parts.scheme}://{parts.authority}/{database or 0}",
            max_connections=_MAX_CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,  # 3 brings server pushes, for which the pool skips its check of stale ones
            command_packer=PythonRespSerializer(_JOINED_WRITE_BYTES, _encode),
        )
    except ValueError as error:
        raise parts.error(str(error)) from None


def _encode(argument: Any) -> bytes | memoryview:
    """Views stay views: the serializer sends them from where they lie."""
    if isinstance(argument, bytes | memoryview):
        return argument
    return str(argument).encode()


def _batches(
    keys: Sequence[bytes], views: Sequence[memoryview]
) -> Iterator[list[tuple[bytes, memoryview]]]:
    """Pairs of server-side name and view, in pipelines of bounded size."""
    batch: list[tuple[bytes, memoryview]] = []
    batch_bytes = 0
    for key, view in zip(keys, views, strict=True):
        is_full = batch_bytes + view.nbytes > _MAX_BATCH_BYTES or len(batch) == _MAX_BATCH_OBJECTS
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append((_KEY_PREFIX + key, view))
        batch_bytes += view.nbytes
    if batch:
        yield batch


@contextmanager
def _redis_errors_as_unavailable() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailableError(f"redis: {error}") from error
