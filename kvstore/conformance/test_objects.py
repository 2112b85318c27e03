"""Objects: what was put is read back whole, and never changes."""

import itertools

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.store import GetStatus, KvStore


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 4096, (1 << 20) + 1])
def test_an_object_is_read_back(store: KvStore, num_bytes: int) -> None:
    (key,) = random_keys(1)
    value = bytes(itertools.islice(itertools.cycle(range(251)), num_bytes))
    store.put_many([key], [memoryview(value)])
    assert read(store, key, num_bytes) == value


def test_a_batch_keeps_its_order(store: KvStore) -> None:
    keys = random_keys(50)
    store.put_many(keys, [filled(index, 100 + index) for index in range(50)])
    buffers = [blank(100 + index) for index in reversed(range(50))]
    statuses = store.get_many_into(keys[::-1], buffers)
    assert statuses == [GetStatus.HIT] * 50
    assert [bytes(buffer) for buffer in buffers] == [
        bytes(filled(index, 100 + index)) for index in reversed(range(50))
    ]


def test_empty_batches_do_nothing(store: KvStore) -> None:
    store.put_many([], [])
    assert store.get_many_into([], []) == []
    assert store.delete([]) == 0


def test_each_key_of_a_batch_has_its_own_status(store: KvStore) -> None:
    present, absent, longer, shorter = random_keys(4)
    store.put_many([present, longer, shorter], [filled(7, size) for size in (100, 101, 99)])
    statuses = store.get_many_into(
        [longer, present, absent, shorter, present], [blank(100) for _ in range(5)]
    )
    assert statuses == [
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
        GetStatus.MISSING,
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
    ]


def test_a_read_stays_inside_its_buffer(store: KvStore) -> None:
    keys = random_keys(2)
    store.put_many(keys, [filled(1, 64), filled(2, 64)])
    slots = memoryview(bytearray(b"\xee" * 256))
    statuses = store.get_many_into(keys, [slots[32:96], slots[128:192]])
    assert statuses == [GetStatus.HIT] * 2
    expected = b"\xee" * 32 + b"\1" * 64 + b"\xee" * 32 + b"\2" * 64 + b"\xee" * 64
    assert bytes(slots) == expected


def test_a_value_may_be_reused_once_put(store: KvStore) -> None:
    (key,) = random_keys(1)
    slot = bytearray(b"a" * 4096)
    store.put_many([key], [memoryview(slot)])
    slot[:] = b"b" * 4096
    assert read(store, key, 4096) == b"a" * 4096


def test_putting_an_existing_key_keeps_the_old_object(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put_many([key], [filled(1, 1000)])
    store.put_many([key], [filled(2, 1000)])
    store.put_many([key], [filled(3, 10)])
    assert read(store, key, 1000) == bytes(filled(1, 1000))


def test_the_first_of_equal_keys_in_a_batch_wins(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put_many([key, key], [filled(1, 1000), filled(2, 1000)])
    assert read(store, key, 1000) == bytes(filled(1, 1000))


def test_keys_are_any_bytes(store: KvStore) -> None:
    (random,) = random_keys(1)
    stem = random[:31]
    keys = [stem + bytes([last]) for last in range(256)]
    store.put_many(keys, [filled(last, 16) for last in range(256)])
    assert [read(store, key, 16) for key in keys] == [
        bytes(filled(last, 16)) for last in range(256)
    ]


def test_delete_counts_what_existed(store: KvStore) -> None:
    keys = random_keys(5)
    store.put_many(keys[:3], [filled(1, 100)] * 3)
    assert store.delete(keys[1:]) == 2
    assert store.delete(keys[1:]) == 0
    assert [read(store, key, 100) for key in keys[:2]] == [b"\1" * 100, GetStatus.MISSING]


def test_a_deleted_key_can_be_put_anew(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put_many([key], [filled(1, 100)])
    store.delete([key])
    store.put_many([key], [filled(2, 200)])
    assert read(store, key, 200) == bytes(filled(2, 200))


def test_ten_thousand_keys_in_one_batch(store: KvStore) -> None:
    keys = random_keys(10_000)
    values = [memoryview(key * 4) for key in keys]
    store.put_many(keys, values)
    assert store.contains_prefix(keys) == 10_000
    buffers = [blank(128) for _ in keys]
    assert store.get_many_into(keys, buffers) == [GetStatus.HIT] * 10_000
    assert buffers == values
    assert store.delete(keys) == 10_000
    assert store.contains_prefix(keys) == 0


def test_a_batch_of_many_bytes(store: KvStore) -> None:
    keys = random_keys(24)
    store.put_many(keys, [filled(index, 1 << 20) for index in range(24)])
    buffers = [blank(1 << 20) for _ in keys]
    assert store.get_many_into(keys, buffers) == [GetStatus.HIT] * 24
    assert buffers == [filled(index, 1 << 20) for index in range(24)]
    store.delete(keys)


def test_two_stores_of_one_url_share_objects(open_kv_store: StoreOpener) -> None:
    (key,) = random_keys(1)
    open_kv_store().put_many([key], [filled(5, 100)])
    assert read(open_kv_store(), key, 100) == bytes(filled(5, 100))


def test_the_length_of_keys_and_views_must_agree(store: KvStore) -> None:
    keys = random_keys(2)
    with pytest.raises(ValueError):  # noqa: PT011  Python's own wording
        store.put_many(keys, [filled(1, 10)])
    with pytest.raises(ValueError):  # noqa: PT011  Python's own wording
        store.get_many_into(keys, [blank(10)])
