"""Keys, values and buffers that the conformance tests put and read."""

import os

from kvstore.store import GetStatus, KvStore

__all__ = ["blank", "filled", "random_keys", "read", "read_uniform"]


def random_keys(num_keys: int) -> list[bytes]:
    """Keys that no other test has used."""
    return [os.urandom(32) for _ in range(num_keys)]


def filled(byte: int, num_bytes: int) -> memoryview:
    """A value of one repeated byte, so that a mixture of two values shows."""
    return memoryview(bytes([byte]) * num_bytes)


def blank(num_bytes: int) -> memoryview:
    """A buffer to read into."""
    return memoryview(bytearray(num_bytes))


def read(store: KvStore, key: bytes, num_bytes: int) -> bytes | GetStatus:
    """An object's bytes, or why there are none."""
    buffer = blank(num_bytes)
    (status,) = store.get_many_into([key], [buffer])
    return bytes(buffer) if status is GetStatus.HIT else status


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
