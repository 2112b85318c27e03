"""How objects are stored in Redis: the commands that put and read them.

An object of up to 4 MiB is one value. A larger one is a hash: equal parts of at
most 4 MiB, and a head with the object's size and random bytes. As it is one
key, Redis touches, expires, evicts and deletes it as a whole. Its parts are put
under a temporary key, which is renamed to the object's name unless the name
exists: so the object appears whole, and the first writer wins. Before that they
are counted. What is evicted between, is evicted whole, and cannot be renamed.

A hash is read part by part, after one read of its head and before another. If
the random bytes differ, the object was deleted and put again meanwhile.
"""

import os
from collections.abc import Iterator, Sequence

from redis import RedisError

from kvstore.store import GetStatus, KvObject
from kvstore.stores.redis.pipeline import Command
from kvstore.stores.redis.reply import Reply

__all__ = [
    "IDENTITY_NAME",
    "MAX_VALUE_BYTES",
    "StagedObject",
    "get_status",
    "object_name",
    "read_commands",
    "set_command",
]

IDENTITY_NAME = b"baton:kv:identity"
"""The server's key of the store's identity; see `KvStore.identity`."""

MAX_VALUE_BYTES = 4 << 20
_NUM_RANDOM_BYTES = 16
_SIZE_BYTES = 8
_HEAD = b"head"


def object_name(key: bytes) -> bytes:
    """Returns the server's key of an object. The braces keep its keys on one server."""
    return b"baton:kv:{" + key.hex().encode() + b"}"


def set_command(name: bytes, value: KvObject, ttl_ms: int) -> Command | None:
    """Returns the command that puts a small object unless it exists; None if it needs parts."""
    if value.nbytes > MAX_VALUE_BYTES:
        return None
    return Command(name, ("SET", name, value, "NX", "PX", ttl_ms))


class StagedObject:
    """A large object that is being put.

    Args:
        name: from `object_name`.
        value: its bytes.
    """

    def __init__(self, name: bytes, value: KvObject) -> None:
        self._name = name
        self._parts = _parts(value)
        random_bytes = os.urandom(_NUM_RANDOM_BYTES)
        self._staged_name = name + b":" + random_bytes.hex().encode()
        self._head = value.nbytes.to_bytes(_SIZE_BYTES, "little") + random_bytes

    def put_commands(self, expire_ms: int) -> Iterator[Command]:
        """Yields the commands that put the parts under the temporary key, and one that counts them.

        Each part sets the key's expiry, because after an eviction the next part makes a new hash
        without one.
        """
        fields: dict[bytes | int, bytes | KvObject] = {_HEAD: self._head}
        fields.update(enumerate(self._parts))
        for field, value in fields.items():
            yield Command(self._name, ("HSET", self._staged_name, field, value))
            yield Command(self._name, ("PEXPIRE", self._staged_name, expire_ms))
        yield Command(self._name, ("HLEN", self._staged_name))

    def is_whole(self, count: Reply) -> bool:
        """Whether no part was evicted, by the reply to the last of `put_commands`."""
        return count == 1 + len(self._parts)

    def commit_commands(self, ttl_ms: int) -> list[Command]:
        """Returns the commands that commit the parts, or touch the object that exists."""
        return [
            Command(self._name, ("RENAMENX", self._staged_name, self._name)),
            Command(self._name, ("PEXPIRE", self._name, ttl_ms)),
            Command(self._name, ("UNLINK", self._staged_name)),
        ]


def read_commands(name: bytes, target: KvObject, ttl_ms: int | None) -> list[Command]:
    """Returns the commands that read an object into memory of its size.

    The first one touches it. That is a command of its own, so that a server which takes no writes
    refuses it alone.

    Args:
        name: from `object_name`.
        target: the memory.
        ttl_ms: how long the object lives from now; None to read it without a touch.
    """
    touch = [] if ttl_ms is None else [Command(name, ("PEXPIRE", name, ttl_ms))]
    if target.nbytes <= MAX_VALUE_BYTES:
        return [*touch, Command(name, ("GET", name), into=target)]
    head = Command(name, ("HGET", name, _HEAD))
    parts = [
        Command(name, ("HGET", name, index), into=part) for index, part in enumerate(_parts(target))
    ]
    return [*touch, head, *parts, head]


def get_status(target: KvObject, replies: Sequence[Reply]) -> GetStatus:
    """Returns the status of a read from the replies to its commands, whatever the touch's is.

    Raises:
        redis.RedisError: an error that is not about the object.
    """
    parts = _parts(target) if target.nbytes > MAX_VALUE_BYTES else None
    values = replies[-1:] if parts is None else replies[-len(parts) - 2 :]
    for reply in values:
        if isinstance(reply, RedisError):
            # The object is small, and a large one was expected, or the reverse.
            if str(reply).startswith("WRONGTYPE"):
                return GetStatus.WRONG_SIZE
            raise reply
    if parts is None:
        return _status(None if values[0] is None else values[0] == target.nbytes)
    head, *sizes, last_head = values
    if not isinstance(head, bytes) or head != last_head or None in sizes:
        return GetStatus.MISSING
    is_whole = sizes == [part.nbytes for part in parts]
    return _status(is_whole and int.from_bytes(head[:_SIZE_BYTES], "little") == target.nbytes)


def _status(has_size: bool | None) -> GetStatus:
    if has_size is None:
        return GetStatus.MISSING
    return GetStatus.HIT if has_size else GetStatus.WRONG_SIZE


def _parts(whole: KvObject) -> list[KvObject]:
    """Cuts an object into as few parts as possible, of equal size except the last."""
    num_parts = -(-whole.nbytes // MAX_VALUE_BYTES)
    part_bytes = -(-whole.nbytes // num_parts)
    starts = range(0, whole.nbytes, part_bytes)
    return [_part(whole, start, start + part_bytes) for start in starts]


def _part(whole: KvObject, start: int, end: int) -> KvObject:
    header, payload = whole
    split = header.nbytes
    return KvObject(header[start:end], payload[max(0, start - split) : max(0, end - split)])
