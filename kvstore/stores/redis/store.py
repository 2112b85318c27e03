"""`redis://`, `rediss://` and their `+sentinel` and `+cluster`: objects in Redis (6.2 or later).

`kvstore.stores.redis.url` describes the URLs, `objects` how objects lie in a
server, `pipeline` how commands are sent. The server bounds its own memory: run
it with `maxmemory` and `maxmemory-policy allkeys-lru`.

A call takes `timeout_s` in all, and no command is tried again. A connection
that the server closed is replaced when it is next taken from the pool, so the
store works again as soon as the server does.

A server that takes no writes is read nevertheless, without the touches.
"""

import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain, islice, takewhile
from typing import Self

from redis import RedisError
from typing_extensions import override

from kvstore.store import (
    GetStatus,
    KvObject,
    KvStore,
    PartlyUnavailableError,
    StoreCapabilities,
    StoreDiagnosis,
    StoreStats,
    StoreUnavailableError,
)
from kvstore.stores.base import StoreCounters
from kvstore.stores.redis.cluster import open_servers
from kvstore.stores.redis.connection import Argument, CallDeadline
from kvstore.stores.redis.diagnosis import Allowance, RedisDiagnosis
from kvstore.stores.redis.messages import describe, is_refusal
from kvstore.stores.redis.objects import (
    IDENTITY_NAME,
    StagedObject,
    get_status,
    object_name,
    read_commands,
    set_command,
)
from kvstore.stores.redis.pipeline import Command, UnansweredError, run_commands
from kvstore.stores.redis.reply import Reply
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
        self._touches = Allowance("objects are read without being kept for longer")
        self._scripts = Allowance("look-ups take two round trips")

    @classmethod
    @override
    def from_url(cls, url: str) -> Self:
        """Opens a URL that `kvstore.stores.redis.url` describes.

        Options are `ttl_s`, `timeout_s`, `max_connections`, `password_file`; for TLS `ca_file`,
        `cert_file`, `key_file`; for sentinels `sentinel_user`, `sentinel_password`,
        `sentinel_password_file`.

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
            missing = [pair for pair, reply in zip(named, exist, strict=True) if reply == 0]
            _raise_unanswered([*exist, *self._put_missing(missing)])
        self._counters.count_puts(objects)

    def _put_missing(self, named: Sequence[tuple[bytes, KvObject]]) -> list[Reply]:
        """Puts objects; returns all replies, among which may be commands without an answer."""
        sets = [(pair, set_command(*pair, self._ttl_ms)) for pair in named]
        replies = self._run(command for _, command in sets if command)
        expire_ms = round(2000 * self.timeout_s)  # this call adds to it for half as long at most
        staged = [StagedObject(*pair) for pair, command in sets if not command]
        parts = self._run_groups([[*put.put_commands(expire_ms)] for put in staged])
        whole = [put for put, of_put in zip(staged, parts, strict=True) if put.is_whole(of_put[-1])]
        commits = self._run_groups([put.commit_commands(self._ttl_ms) for put in whole])
        replies += [reply for of_put in (*parts, *commits) for reply in of_put]
        if len(whole) < len(staged) and not _unanswered_in(replies):
            raise StoreUnavailableError("redis: an object was evicted while it was put")
        return replies

    @override
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Receives values where the objects' memory lies."""
        ttl_ms = self._ttl_ms if self._touches else None
        groups = [
            read_commands(object_name(key), target, ttl_ms)
            for key, target in zip(keys, objects, strict=True)
        ]
        with self._call():
            replies = _grouped(run_commands(self._servers, chain.from_iterable(groups)), groups)
            _raise_if_none_answered(replies)
            statuses = [
                GetStatus.MISSING if _unanswered_in(of_object) else get_status(target, of_object)
                for target, of_object in zip(objects, replies, strict=True)
            ]
        if ttl_ms is not None:
            self._note_touches([touch for touch, *_ in replies])
        self._counters.count_gets(statuses, objects)
        return statuses

    def _note_touches(self, replies: Sequence[Reply]) -> None:
        """Notes whether replies to touches refuse one."""
        refusals = [
            reply
            for reply in _answered(replies)
            if isinstance(reply, RedisError) and is_refusal(reply)
        ]
        if refusals:
            self._touches.refuse(describe(refusals[0]))
        elif any(isinstance(reply, int) for reply in replies):
            self._touches.allow()

    @override
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Runs one script. Where a script cannot reach all keys, or is refused, runs two pipelines:
        the first finds the missing key, so that none behind it is touched.
        """
        names = [object_name(key) for key in keys]
        if not names:
            return 0
        with self._call():
            refusal = None
            if self._servers.is_one and self._scripts and self._touches:
                reply = self._run_script(names)
                if isinstance(reply, int):
                    return reply
                refusal = reply
            exist = self._run(Command(name, ("EXISTS", name)) for name in names)
            _raise_if_none_answered([[reply] for reply in exist])
            num_touched = self._touch(names[: _num_leading(exist)])
            was_refused_for_touches = bool(self._touches.refusal) or not num_touched
            if refusal and not was_refused_for_touches:
                self._scripts.refuse(describe(refusal))
            return num_touched

    def _run_script(self, names: Sequence[bytes]) -> int | RedisError:
        """Touches a prefix by one command; returns its length, or the server's refusal."""
        head: tuple[Argument, ...] = ("EVAL", _TOUCH_PREFIX, len(names))
        (reply,) = run_commands(self._servers, [Command(names[0], (*head, *names, self._ttl_ms))])
        if isinstance(reply, RedisError):
            if is_refusal(reply):
                return reply
            raise reply
        assert isinstance(reply, int)
        self._scripts.allow()
        return reply

    def _touch(self, names: Sequence[bytes]) -> int:
        """Touches objects; returns how many leading ones are there, touched or not."""
        if not self._touches:
            return len(names)
        replies = run_commands(self._servers, (self._touch_command(name) for name in names))
        self._note_touches(replies)
        return len(names) if self._touches.refusal else _num_leading(_checked(replies))

    @override
    def delete(self, keys: Sequence[bytes]) -> int:
        names = [object_name(key) for key in keys]
        with self._call():
            existed = self._run(Command(name, ("UNLINK", name)) for name in names)
            _raise_unanswered(existed)
        return existed.count(1)

    @override
    def identity(self) -> str:
        """Reads it first, as a replica or a server that is full takes no other command."""
        with self._call():
            (value,) = self._run([Command(IDENTITY_NAME, ("GET", IDENTITY_NAME))])
            if value is None:
                new = secrets.token_hex(_IDENTITY_BYTES)
                command = ("SET", IDENTITY_NAME, new, "NX")
                (reply,) = run_commands(self._servers, [Command(IDENTITY_NAME, command)])
                if isinstance(reply, RedisError):
                    return ""
                (value,) = self._run([Command(IDENTITY_NAME, ("GET", IDENTITY_NAME))])
            _raise_unanswered([value])
        return value.decode("ascii", "replace") if isinstance(value, bytes) else ""

    @override
    def probe_servers(self) -> float | None:
        return self._servers.probe_due()

    @property
    @override
    def failing_servers(self) -> Sequence[str]:
        return self._servers.failing

    @override
    def stats(self) -> StoreStats:
        """Leaves size and age out: servers hold other data too, and telling it apart is slow."""
        return self._counters.snapshot(num_objects=None, num_bytes=None)

    @property
    @override
    def diagnosis(self) -> StoreDiagnosis:
        return RedisDiagnosis(self._servers, self._call, (self._touches, self._scripts))

    @override
    def close(self) -> None:
        self._servers.close()

    def _touch_command(self, name: bytes) -> Command:
        return Command(name, ("PEXPIRE", name, self._ttl_ms))

    def _run(self, commands: Iterable[Command]) -> list[Reply]:
        """Runs commands; returns their replies, or raises the first error among these."""
        return _checked(run_commands(self._servers, commands))

    def _run_groups(self, groups: Sequence[Sequence[Command]]) -> list[Sequence[Reply]]:
        """Runs groups of commands as `_run` does; returns the replies of each."""
        return _grouped(self._run(chain.from_iterable(groups)), groups)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Limits a call to `timeout_s`, and the calls under way to `max_connections`."""
        try:
            with self._deadline.within(self.timeout_s), self._deadline.locked(self._places):
                yield
        except (RedisError, OSError) as error:
            raise StoreUnavailableError(f"redis {describe(error)}") from error


def _grouped(replies: Iterable[Reply], groups: Iterable[Sized]) -> list[Sequence[Reply]]:
    """Returns the replies to groups of commands, group by group."""
    left = iter(replies)
    return [list(islice(left, len(group))) for group in groups]


def _checked(replies: list[Reply]) -> list[Reply]:
    """Returns replies.

    Raises:
        redis.RedisError: the first error among them that a server replied with.
    """
    for reply in _answered(replies):
        if isinstance(reply, RedisError):
            raise reply
    return replies


def _answered(replies: Iterable[Reply]) -> list[Reply]:
    return [reply for reply in replies if not isinstance(reply, UnansweredError)]


def _unanswered_in(replies: Iterable[Reply]) -> UnansweredError | None:
    return next((reply for reply in replies if isinstance(reply, UnansweredError)), None)


def _raise_unanswered(replies: Iterable[Reply]) -> None:
    """Raises PartlyUnavailableError if one of several servers did not answer."""
    if unanswered := _unanswered_in(replies):
        raise PartlyUnavailableError(f"redis {unanswered}")


def _raise_if_none_answered(groups: Sequence[Sequence[Reply]]) -> None:
    """Raises PartlyUnavailableError if no group of replies is answered in full."""
    if all(map(_unanswered_in, groups)):
        _raise_unanswered(chain.from_iterable(groups))


def _num_leading(replies: Iterable[Reply]) -> int:
    """Returns how many replies are positive before the first that is not."""
    return sum(1 for _ in takewhile(lambda reply: isinstance(reply, int) and reply > 0, replies))
