"""Ways in which stored bytes come to harm, and objects of stores where they lie at rest."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from redis import Redis

from kvstore.codec import HEADER_BYTES, seal
from kvstore.store import KvObject
from kvstore.stores import memory
from kvstore.stores.redis.objects import object_name
from tests.support.shm_arena import ArenaContents

__all__ = [
    "ArenaShelf",
    "FileShelf",
    "MemoryShelf",
    "RedisShelf",
    "Shelf",
    "spoil",
    "spoil_in_place",
]

_PAGE_BYTES = 512  # of storage: what a disk loses at a time is at least that


def spoil_in_place(value: bytes, lots: random.Random, others: Sequence[bytes]) -> bytes:
    """As many bytes, and not the same ones.

    Args:
        value: what was whole.
        lots: says what becomes of it.
        others: what lay elsewhere, or here before.
    """
    spoiled = bytearray(value)
    while bytes(spoiled) == value:
        start = lots.randrange(len(value))
        match lots.choice(("bit", "bytes", "zeros", "other", "torn", "shifted")):
            case "bit":
                spoiled[start] ^= 1 << lots.randrange(8)
            case "bytes":
                for _ in range(lots.randint(1, 20)):
                    spoiled[lots.randrange(len(value))] = lots.randrange(256)
            case "zeros":
                start -= start % _PAGE_BYTES
                end = min(len(value), start + _PAGE_BYTES * lots.randint(1, 8))
                spoiled[start:end] = bytes(end - start)
            case "other":
                spoiled[:] = lots.choice(others)
            case "torn":
                spoiled[start:] = lots.choice(others)[start:]
            case "shifted":
                spoiled[:] = value[start:] + value[:start]
    return bytes(spoiled)


def spoil(value: bytes, lots: random.Random, others: Sequence[bytes]) -> bytes:
    """Anything but the object: as `spoil_in_place`, or longer, shorter, or with another's seal."""
    start = lots.randrange(len(value))
    match lots.choice(("in place", "in place", "in place", "cut", "longer", "foreign", "blank")):
        case "cut":
            return value[:start]
        case "longer":
            return value + lots.choice((b"\0", bytes(_PAGE_BYTES), lots.choice(others)))
        case "foreign":
            return _sealed_for_another_key(value, lots)
        case "blank":
            return lots.choice((b"", bytes(len(value)), lots.randbytes(len(value))))
        case _:
            return spoil_in_place(value, lots, others)


def _sealed_for_another_key(value: bytes, lots: random.Random) -> bytes:
    resealed = KvObject.split(memoryview(bytearray(value)), HEADER_BYTES)
    seal([resealed], [lots.randbytes(32)])
    assert resealed.payload == value[HEADER_BYTES:]
    return resealed.to_bytes()


class Shelf(Protocol):
    """Objects of a store, past the store."""

    def read(self, key: bytes) -> bytes | None:
        """What lies there."""

    def write(self, key: bytes, value: bytes) -> None:
        """Lays something in the place of an object that is there."""


class ArenaShelf:
    """Objects of `shm://`, each in the room of its extent."""

    def __init__(self, folder: Path) -> None:
        self._contents = ArenaContents(folder)

    def read(self, key: bytes) -> bytes | None:
        extent = self._contents.objects().get(key)
        return self._contents.bytes_at(extent) if extent is not None else None

    def write(self, key: bytes, value: bytes) -> None:
        extent = self._contents.objects()[key]
        lying = KvObject.split(memoryview(value)[: extent.room], HEADER_BYTES)
        self._contents.memory.write([(extent.offset, lying)])
        self._contents.header.object_bytes += lying.nbytes - extent.num_bytes
        extent.num_bytes = lying.nbytes


class FileShelf:
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


class RedisShelf:
    """Objects of `redis://` that are single values."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    def read(self, key: bytes) -> bytes | None:
        value: bytes | None = self._client.get(object_name(key))
        return value

    def write(self, key: bytes, value: bytes) -> None:
        self._client.set(object_name(key), value, xx=True, keepttl=True)


class MemoryShelf:
    """Objects of `memory://NAME`, which is open."""

    def __init__(self, name: str) -> None:
        self._entries = memory._registry[name].entries

    def read(self, key: bytes) -> bytes | None:
        entry = self._entries.get(key)
        return entry.value if entry is not None else None

    def write(self, key: bytes, value: bytes) -> None:
        self._entries[key].value = value
