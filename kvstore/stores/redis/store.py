"""`redis://`, `rediss://` and their `+sentinel` and `+cluster`: objects in Redis (6.2 or later).

`kvstore.stores.redis.url` describes the URLs, `objects` how objects lie in a
server, `pipeline` how commands are sent. The server bounds its own memory: run
it with `maxmemory` and `maxmemory-policy allkeys-lru`.

A call takes `timeout_s` in all, and no command is tried again. A connection
that the server closed is replaced when it is next taken from the pool, so the
store works again as soon as the server does.
"""

import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Self

from redis import RedisError, ResponseError
from typing_extensions import override

from kvstore.store import (
    GetStatus,
    KvObject,
    KvStore,
    StoreCapabilities,
    StoreStats,
    StoreUnavailableError,
)
from kvstore.stores.base import StoreCounters
from kvstore.stores.redis.connection import Argument, CallDeadline
from kvstore.stores.redis.objects import (
    IDENTITY_NAME,
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

_IDENTITY_BYTES = 16
_TOUCH_PREFIX = """
for i, key in ipairs(KEYS) do
  if redis.call('PEXPIRE', key, ARGV[1]) == 0 then return i - 1 end
end
return #KEYS
"""


class RedisStore(KvStore):
    """Connections to the servers of a URL, each made when it is first needed."""

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
    @override
    def from_url(cls, url: str) -> Self:
        """Opens a URL that `kvstore.stores.redis.url` describes.

        Options are `ttl_s`, `timeout_s`, `max_connections`; for TLS `ca_file`,
        `cert_file`, `key_file`; for sentinels `sentinel_user`, `sentinel_password`.

        Raises:
            ConfigurationError: the host is missing, or a port, the path or an option is wrong.
        """
        return cls(RedisUrl.parse(url))

    @override
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Touches first, so that objects which exist are not sent."""
        named = [(object_name(key), new) for key, new in zip(keys, objects, strict=True)]
        with self._call():
            exist = self._run(self._touch_command(name) for name, _ in named)
            missing = [pair for pair, exists in zip(named, exist, strict=True) if not exists]
            self._put_missing(missing)
        self._counters.count_puts(objects)

    def _put_missing(self, named: Sequence[tuple[bytes, KvObject]]) -> None:
        sets = [(pair, set_command(*pair, self._ttl_ms)) for pair in named]
        self._run(command for _, command in sets if command)
        staged = [StagedObject(*pair) for pair, command in sets if not command]
        expire_ms = round(2000 * self.timeout_s)  # this call adds to it for half as long at most
        self._run(command for one in staged for command in one.put_commands(expire_ms))
        if 0 in self._run(one.commit_command(self._ttl_ms) for one in staged):
            raise StoreUnavailableError("redis: an object was evicted while it was put")

    @override
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Receives values where the objects' memory lies."""
        reads = [
            (there, read_commands(object_name(key), there, self._ttl_ms))
            for key, there in zip(keys, objects, strict=True)
        ]
        with self._call():
            commands = (command for _, of_object in reads for command in of_object)
            replies = iter(run_commands(self._servers, commands))
            statuses = [
                get_status(there, [next(replies) for _ in of_object]) for there, of_object in reads
            ]
        self._counters.count_gets(statuses, objects)
        return statuses

    @override
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Runs one script, or in a cluster, where a script cannot reach all keys, two pipelines:
        the first finds the missing key, so that none behind it is touched.
        """
        names = [object_name(key) for key in keys]
        if not names:
            return 0
        with self._call():
            if self._servers.is_one:
                head: tuple[Argument, ...] = ("EVAL", _TOUCH_PREFIX, len(names))
                script = (*head, *names, self._ttl_ms)
                (num_touched,) = self._run([Command(names[0], script)])
                assert isinstance(num_touched, int)
                return num_touched
            exist = self._run(Command(name, ("EXISTS", name)) for name in names)
            present = names[: _num_leading(exist)]
            return _num_leading(self._run(self._touch_command(name) for name in present))

    @override
    def delete(self, keys: Sequence[bytes]) -> int:
        names = [object_name(key) for key in keys]
        with self._call():
            existed = self._run(Command(name, ("UNLINK", name)) for name in names)
        return existed.count(1)

    @override
    def identity(self) -> str:
        """Reads it first, as a replica or a server that is full takes no other command."""
        with self._call():
            (found,) = self._run([Command(IDENTITY_NAME, ("GET", IDENTITY_NAME))])
            if found is None:
                new = secrets.token_hex(_IDENTITY_BYTES)
                command = ("SET", IDENTITY_NAME, new, "NX")
                replies = run_commands(self._servers, [Command(IDENTITY_NAME, command)])
                if isinstance(replies[0], ResponseError):
                    return ""
                (found,) = self._run([Command(IDENTITY_NAME, ("GET", IDENTITY_NAME))])
        return found.decode("ascii", "replace") if isinstance(found, bytes) else ""

    @override
    def stats(self) -> StoreStats:
        """Leaves size and age out: servers hold other data too, and telling it apart is slow."""
        return self._counters.snapshot(num_objects=None, num_bytes=None)

    @override
    def close(self) -> None:
        self._servers.close()

    def _touch_command(self, name: bytes) -> Command:
        return Command(name, ("PEXPIRE", name, self._ttl_ms))

    def _run(self, commands: Iterable[Command]) -> list[Reply]:
        """Runs commands; returns their replies, or raises the first error among these."""
        replies = run_commands(self._servers, commands)
        for reply in replies:
            if isinstance(reply, RedisError):
                raise reply
        return replies

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Limits a call to `timeout_s`, and the calls under way to `max_connections`."""
        try:
            with self._deadline.within(self.timeout_s), self._deadline.locked(self._places):
                yield
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"redis: {error}") from error


def _num_leading(replies: Iterable[Reply]) -> int:
    """Returns how many replies are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, replies))
