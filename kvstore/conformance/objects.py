"""Keys and objects that the conformance tests put and read, also in other processes.

They import this module, which does not import torch: that takes seconds.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice

from kvstore.registry import open_store
from kvstore.store import GetStatus, KvObject, KvStore

__all__ = [
    "MAX_WRITTEN",
    "as_object",
    "blank",
    "counting",
    "filled",
    "numbered_keys",
    "random_keys",
    "read",
    "read_uniform",
    "write_and_read",
    "write_until_killed",
]

_HEADER_BYTES = 64
MAX_WRITTEN = 100
"""The most objects that `write_until_killed` leaves, however late it is killed."""


def random_keys(num_keys: int) -> list[bytes]:
    """Keys that no other test has used."""
    return [os.urandom(32) for _ in range(num_keys)]


def as_object(
    value: bytes | bytearray | memoryview, num_header_bytes: int = _HEADER_BYTES
) -> KvObject:
    """A value as an object; one that is writable stays so."""
    return KvObject.split(memoryview(value), num_header_bytes)


def filled(byte: int, num_bytes: int) -> KvObject:
    """An object of one repeated byte, so that a mixture of two objects shows."""
    return as_object(bytes([byte]) * num_bytes)


def counting(num_bytes: int) -> bytes:
    """A value whose bytes show where they belong."""
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


def blank(num_bytes: int, num_header_bytes: int = _HEADER_BYTES) -> KvObject:
    """Memory to read an object into."""
    return as_object(bytearray(num_bytes), num_header_bytes)


def read(
    store: KvStore, key: bytes, num_bytes: int, num_header_bytes: int = _HEADER_BYTES
) -> bytes | GetStatus:
    """An object's bytes, or why there are none."""
    there = blank(num_bytes, num_header_bytes)
    (status,) = store.get_into([key], [there])
    return there.to_bytes() if status is GetStatus.HIT else status


def read_uniform(store: KvStore, key: bytes, num_bytes: int) -> int | None:
    """The byte that a whole object is filled with; None if it is missing.

    Raises:
        ValueError: the object is a mixture, or has another size.
    """
    value = read(store, key, num_bytes)
    if value is GetStatus.MISSING:
        return None
    if not isinstance(value, bytes) or len(set(value)) != 1:
        raise ValueError(f"object {key.hex()} is torn: {value!r:.80}")
    return value[0]


def write_and_read(url: str, keys: list[bytes], byte: int, num_bytes: int) -> list[int | None]:
    """Puts one's own value under each key; returns whose value each key has then."""
    with closing(open_store(url)) as store:
        for key in keys:
            store.put([key], [filled(byte, num_bytes)])
        return [read_uniform(store, key, num_bytes) for key in keys]


def numbered_keys(seed: bytes) -> Iterator[bytes]:
    """An endless sequence of keys, the same in every process."""
    return (hashlib.sha256(seed + number.to_bytes(8, "little")).digest() for number in count())


def write_until_killed(url: str, seed: bytes, num_bytes: int) -> None:
    """Puts one object after the other; deletes and puts the last one from then on."""
    with closing(open_store(url)) as store:
        for number, key in enumerate(islice(numbered_keys(seed), MAX_WRITTEN)):
            store.put([key], [filled(number % 256, num_bytes)])
        while True:
            store.delete([key])
            store.put([key], [filled(number % 256, num_bytes)])
