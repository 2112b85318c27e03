"""`redis://`, `rediss://` and their `+sentinel` and `+cluster`: objects in Redis (6.2 or later).

`redis_url` says what the URLs look like, `redis_objects` how objects lie in a
server, `redis_pipeline` how commands get there. The server bounds its own
memory: run it with `maxmemory` and `maxmemory-policy allkeys-lru`.

A call takes `timeout_s` in all, and no command is tried again. A connection
that the server closed is replaced when it is next taken from the pool, so the
store works again as soon as the server does.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Self

from redis import RedisError

from kvstore.store import GetStatus, KvStore, StoreCapabilities, StoreStats, StoreUnavailableError
from kvstore.stores.base import StoreCounters
from kvstore.stores.redis.connection import CallDeadline
from kvstore.stores.redis.objects import (
    StagedObject,
    get_status,
    object_name,
    read_commands,
    set_command,
)
from kvstore.stores.redis.pipeline import Command, run_commands
from kvstore.stores.redis.reply import Reply
from kvstore.stores.redis.servers import open_servers
from kvstore.stores.redis.url import RedisUrl

__all__ = ["RedisStore"]

_TOUCH_PREFIX = """
for i, key in ipairs(KEYS) do
  if redis.call('PEXPIRE', key, ARGV[1]) == 0 then return i - 1 end
end
return #KEYS
"""


class RedisStore(KvStore):
    """Connections to the servers of a URL; made when they are first used."""

    capabilities = StoreCapabilities(
        shared_between_processes=True,
        shared_between_hosts=True,
        survives_restart=False,
        takes_max_bytes=False,
        keeps_leases=False,
    )

    def __init__(self, url: RedisUrl) -> None:
        self.ttl_s = url.ttl_s
        self._ttl_ms = round(url.ttl_s * 1000)
        self.timeout_s = url.timeout_s
        self._deadline = CallDeadline()
        self._places = threading.BoundedSemaphore(url.max_connections)
        self._servers = open_servers(url, self._deadline)
        self._counters = StoreCounters()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Opens a URL that `kvstore.stores.redis.url` describes.

        Options are `ttl_s`, `timeout_s`, `max_connections`; for TLS `ca_file`,
        `cert_file`, `key_file`; for sentinels `sentinel_user`, `sentinel_password`.

        Raises:
            ConfigurationError: no host; a bad port, path or option.
        """
        return cls(RedisUrl.parse(url))

    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """See `KvStore.put_many`. Asks first, so that objects which exist are not sent."""
        objects = [
            (object_name(key), value.cast("B")) for key, value in zip(keys, values, strict=True)
        ]
        with self._call():
            exist = self._run(self._touch_command(name) for name, _ in objects)
            missing = [pair for pair, exists in zip(objects, exist, strict=True) if not exists]
            self._put_missing(missing)
        self._counters.count_puts(values)

    def _put_missing(self, objects: Sequence[tuple[bytes, memoryview]]) -> None:
        sets = [(pair, set_command(*pair, self._ttl_ms)) for pair in objects]
        self._run(command for _, command in sets if command)
        staged = [StagedObject(*pair) for pair, command in sets if not command]
        expire_ms = round(2000 * self.timeout_s)  # nobody adds to it for longer
        self._run(command for one in staged for command in one.put_commands(expire_ms))
        if 0 in self._run(one.commit_command(self._ttl_ms) for one in staged):
            raise StoreUnavailableError("redis: an object was evicted while it was put")

    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """See `KvStore.get_many_into`. Values are received where the buffers lie."""
        reads = [
            (buffer, read_commands(object_name(key), buffer.cast("B"), self._ttl_ms))
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        with self._call():
            commands = (command for _, of_object in reads for command in of_object)
            replies = iter(run_commands(self._servers, commands))
            statuses = [
                get_status(buffer, [next(replies) for _ in of_object])
                for buffer, of_object in reads
            ]
        self._counters.count_gets(statuses, buffers)
        return statuses

    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.contains_prefix`.

        In a cluster, where a script cannot reach all keys, two pipelines: the
        first finds the missing one, so that none behind it is touched.
        """
        names = [object_name(key) for key in keys]
        if not names:
            return 0
        with self._call():
            if self._servers.is_one:
                script = ("EVAL", _TOUCH_PREFIX, len(names), *names, self._ttl_ms)
                (num_touched,) = self._run([Command(names[0], script)])
                assert isinstance(num_touched, int)
                return num_touched
            exist = self._run(Command(name, ("EXISTS", name)) for name in names)
            present = names[: _num_leading(exist)]
            return _num_leading(self._run(self._touch_command(name) for name in present))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `KvStore.delete`."""
        names = [object_name(key) for key in keys]
        with self._call():
            existed = self._run(Command(name, ("UNLINK", name)) for name in names)
        return existed.count(1)

    def stats(self) -> StoreStats:
        """See `KvStore.stats`. What servers hold is not ours alone, nor cheap to tell apart."""
        return self._counters.snapshot(num_objects=None, num_bytes=None)

    def close(self) -> None:
        """See `KvStore.close`."""
        self._servers.close()

    def _touch_command(self, name: bytes) -> Command:
        return Command(name, ("PEXPIRE", name, self._ttl_ms))

    def _run(self, commands: Iterable[Command]) -> list[Reply]:
        """The replies to commands, none of which may meet an error."""
        replies = run_commands(self._servers, commands)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One call: a place among those under way, and `timeout_s` for all of it."""
        try:
            with self._deadline.within(self.timeout_s), self._deadline.locked(self._places):
                yield
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"redis: {error}") from error


def _num_leading(replies: Iterable[Reply]) -> int:
    """How many replies are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, replies))
