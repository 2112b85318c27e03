"""Ways to corrupt stored objects, and direct access to the objects of stores."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from redis import Redis

from kvstore.codec import HEADER_BYTES, seal
from kvstore.store import KvObject
from kvstore.stores import memory
from kvstore.stores.redis.objects import object_name
from kvstore.stores.shm.extent_table import Extent, State
from tests.support.shm_arena import ArenaContents

__all__ = [
    "RawArenaObjects",
    "RawFileObjects",
    "RawMemoryObjects",
    "RawObjects",
    "RawRedisObjects",
    "spoil",
    "spoil_in_place",
]

_PAGE_BYTES = 512  # a disk loses whole pages of at least this size


def spoil_in_place(value: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Returns other bytes of the same length.

    Args:
        value: an intact object.
        rng: random choices.
        others: other objects, some of whose bytes may replace those of this one.
    """
    spoiled = bytearray(value)
    while bytes(spoiled) == value:
        start = rng.randrange(len(value))
        match rng.choice(("bit", "bytes", "zeros", "other", "torn", "shifted")):
            case "bit":
                spoiled[start] ^= 1 << rng.randrange(8)
            case "bytes":
                for _ in range(rng.randint(1, 20)):
                    spoiled[rng.randrange(len(value))] = rng.randrange(256)
            case "zeros":
                start -= start % _PAGE_BYTES
                end = min(len(value), start + _PAGE_BYTES * rng.randint(1, 8))
                spoiled[start:end] = bytes(end - start)
            case "other":
                spoiled[:] = rng.choice(others)
            case "torn":
                spoiled[start:] = rng.choice(others)[start:]
            case "shifted":
                spoiled[:] = value[start:] + value[:start]
    return bytes(spoiled)


def spoil(value: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Returns a spoiled object: as `spoil_in_place`, or longer, shorter, or of another key."""
    start = rng.randrange(len(value))
    match rng.choice(("in place", "in place", "in place", "cut", "longer", "foreign", "blank")):
        case "cut":
            return value[:start]
        case "longer":
            return value + rng.choice((b"\0", bytes(_PAGE_BYTES), rng.choice(others)))
        case "foreign":
            return _sealed_for_another_key(value, rng)
        case "blank":
            return rng.choice((b"", bytes(len(value)), rng.randbytes(len(value))))
        case _:
            return spoil_in_place(value, rng, others)


def _sealed_for_another_key(value: bytes, rng: random.Random) -> bytes:
    resealed = KvObject.split(memoryview(bytearray(value)), HEADER_BYTES)
    seal([resealed], [rng.randbytes(32)])
    assert resealed.payload == value[HEADER_BYTES:]
    return resealed.to_bytes()


class RawObjects(Protocol):
    """Direct access to the stored bytes of objects, without the store."""

    def read(self, key: bytes) -> bytes | None:
        """Returns the stored bytes of an object; None if there is none."""

    def write(self, key: bytes, value: bytes) -> None:
        """Replaces the stored bytes of an existing object."""


class RawArenaObjects:
    """Objects of `shm://`, each within its extent."""

    def __init__(self, folder: Path) -> None:
        self._contents = ArenaContents(folder)
        self._extents: dict[bytes, Extent] = {}

    def read(self, key: bytes) -> bytes | None:
        extent = self._find(key)
        return self._contents.bytes_at(extent) if extent is not None else None

    def write(self, key: bytes, value: bytes) -> None:
        extent = self._find(key)
        assert extent is not None
        spoiled = KvObject.split(memoryview(value)[: extent.room], HEADER_BYTES)
        self._contents.memory.write([(extent.offset, spoiled)])
        self._contents.header.object_bytes += spoiled.nbytes - extent.num_bytes
        extent.num_bytes = spoiled.nbytes

    def _find(self, key: bytes) -> Extent | None:
        """The extent of an object; None once it has been removed, as none comes back."""
        if key not in self._extents:
            self._extents = self._contents.objects()  # looks at the whole table
        extent = self._extents.get(key)
        is_there = extent is not None and extent.state == State.OBJECT and extent.key == key
        return extent if is_there else None


class RawFileObjects:
    """Objects of `file://`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "objects"

    def read(self, key: bytes) -> bytes | None:
        path = self._path(key)
        return path.read_bytes() if path.exists() else None

    def write(self, key: bytes, value: bytes) -> None:
        self._path(key).write_bytes(value)

    def _path(self, key: bytes) -> Path:
        return self._folder / key.hex()[:2] / key.hex()


class RawRedisObjects:
    """Objects of `redis://` that are stored as single values."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def read(self, key: bytes) -> bytes | None:
        value: bytes | None = self._client.get(object_name(key))
        return value

    def write(self, key: bytes, value: bytes) -> None:
        self._client.set(object_name(key), value, xx=True, keepttl=True)


class RawMemoryObjects:
    """Objects of `memory://NAME`, which must be open."""

    def __init__(self, name: str) -> None:
        self._entries = memory._registry[name].entries

    def read(self, key: bytes) -> bytes | None:
        entry = self._entries.get(key)
        return entry.value if entry is not None else None

    def write(self, key: bytes, value: bytes) -> None:
        self._entries[key].value = value
