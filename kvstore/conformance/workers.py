"""Functions on stores that the conformance suite runs in other processes.

They import this module, which does not import torch: that takes seconds.
"""

import hashlib
from collections.abc import Iterator
from contextlib import closing
from itertools import count

from kvstore.conformance.objects import filled, read_uniform
from kvstore.registry import open_store

__all__ = ["numbered_keys", "write_and_read", "write_until_killed"]


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
    """Puts one object after the other."""
    with closing(open_store(url)) as store:
        for number, key in enumerate(numbered_keys(seed)):
            store.put([key], [filled(number % 256, num_bytes)])
