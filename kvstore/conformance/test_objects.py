"""Objects: what was put is read back whole, wherever it lies in memory, and never changes."""

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import as_object, blank, counting, filled, random_keys, read
from kvstore.store import GetStatus, KvObject, KvStore

_LARGE_BYTES = 5 << 20


def _apart(value: bytes, num_header_bytes: int) -> KvObject:
    """A value whose header and payload have something else between them."""
    memory = memoryview(bytearray(len(value) + 10))
    apart = KvObject(memory[:num_header_bytes], memory[num_header_bytes + 10 :])
    apart.fill(value)
    return apart


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 4096, (1 << 20) + 1])
def test_an_object_is_read_back(store: KvStore, num_bytes: int) -> None:
    (key,) = random_keys(1)
    store.put([key], [as_object(counting(num_bytes))])
    assert read(store, key, num_bytes) == counting(num_bytes)


@pytest.mark.parametrize(
    ("num_first", "num_second"),
    [(64, 100), (64, 0), (0, 100), (1, 4095), (64, _LARGE_BYTES), (_LARGE_BYTES, 1)],
)
def test_header_and_payload_may_lie_apart_and_have_any_size(
    store: KvStore, num_first: int, num_second: int
) -> None:
    apart, as_one = random_keys(2)
    value = counting(num_first + num_second)
    store.put([apart], [_apart(value, num_first)])
    store.put([as_one], [as_object(value)])
    for key in (apart, as_one):
        assert read(store, key, len(value)) == value
        there = KvObject(memoryview(bytearray(num_first)), memoryview(bytearray(num_second)))
        assert store.get_into([key], [there]) == [GetStatus.HIT]
        assert there.to_bytes() == value


def test_an_object_may_be_split_elsewhere_when_it_is_read(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put([key], [_apart(counting(1000), 64)])
    for num_first in (0, 1, 63, 65, 1000):
        assert read(store, key, 1000, num_first) == counting(1000)


def test_a_batch_keeps_its_order(store: KvStore) -> None:
    keys = random_keys(100)
    store.put(keys, [filled(index, 100 + index) for index in range(100)])
    assert store.contains_prefix(keys) == 100
    there = [blank(100 + index) for index in reversed(range(100))]
    assert store.get_into(keys[::-1], there) == [GetStatus.HIT] * 100
    assert there == [filled(index, 100 + index) for index in reversed(range(100))]


def test_empty_batches_do_nothing(store: KvStore) -> None:
    store.put([], [])
    assert store.get_into([], []) == []
    assert store.delete([]) == 0


def test_each_key_of_a_batch_has_its_own_status(store: KvStore) -> None:
    present, absent, longer, shorter = random_keys(4)
    store.put([present, longer, shorter], [filled(7, size) for size in (100, 101, 99)])
    there = [blank(100) for _ in range(5)]
    statuses = store.get_into([longer, present, absent, shorter, present], there)
    assert statuses == [
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
        GetStatus.MISSING,
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
    ]
    assert [there[1], there[4]] == [filled(7, 100)] * 2


def test_a_read_stays_inside_its_memory(store: KvStore) -> None:
    keys = random_keys(2)
    store.put(keys, [filled(1, 96), filled(2, 64)])
    memory = memoryview(bytearray(b"\xee" * 256))
    first = KvObject(memory[128:160], memory[32:96])  # the payload in front
    second = KvObject(memory[192:192], memory[176:240])
    assert store.get_into(keys, [first, second]) == [GetStatus.HIT] * 2
    runs = ((0xEE, 32), (1, 64), (0xEE, 32), (1, 32), (0xEE, 16), (2, 64), (0xEE, 16))
    assert bytes(memory) == b"".join(bytes([byte]) * count for byte, count in runs)


def test_memory_may_be_reused_once_it_is_put(store: KvStore) -> None:
    (key,) = random_keys(1)
    value = _apart(b"a" * 4096, 64)
    store.put([key], [value])
    value.fill(b"b" * 4096)
    assert read(store, key, 4096) == b"a" * 4096


def test_memory_is_not_written_when_it_is_put(store: KvStore) -> None:
    (key,) = random_keys(1)
    read_only = as_object(counting(4096))
    store.put([key], [read_only])
    assert read(store, key, 4096) == counting(4096)


def test_putting_an_existing_key_keeps_the_old_object(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put([key], [filled(1, 1000)])
    store.put([key], [filled(2, 1000)])
    store.put([key, key], [filled(3, 10), filled(4, 1000)])
    assert read(store, key, 1000) == filled(1, 1000).to_bytes()


def test_the_first_of_equal_keys_in_a_batch_wins(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put([key, key], [filled(1, 1000), filled(2, 1000)])
    assert read(store, key, 1000) == filled(1, 1000).to_bytes()


def test_keys_are_any_bytes(store: KvStore) -> None:
    (random,) = random_keys(1)
    stem = random[:31]
    keys = [stem + bytes([last]) for last in range(256)]
    store.put(keys, [filled(last, 16) for last in range(256)])
    assert [read(store, key, 16) for key in keys] == [
        filled(last, 16).to_bytes() for last in range(256)
    ]


def test_delete_counts_what_existed(store: KvStore) -> None:
    keys = random_keys(5)
    store.put(keys[:3], [filled(1, 100)] * 3)
    assert store.delete(keys[1:]) == 2
    assert store.delete(keys[1:]) == 0
    assert [read(store, key, 100) for key in keys[:2]] == [b"\1" * 100, GetStatus.MISSING]


def test_a_deleted_key_can_be_put_anew(store: KvStore) -> None:
    (key,) = random_keys(1)
    store.put([key], [filled(1, 100)])
    store.delete([key])
    store.put([key], [filled(2, 200)])
    assert read(store, key, 200) == filled(2, 200).to_bytes()


def test_ten_thousand_keys_in_one_batch(store: KvStore) -> None:
    keys = random_keys(10_000)
    values = [as_object(key * 4) for key in keys]
    store.put(keys, values)
    assert store.contains_prefix(keys) == 10_000
    there = [blank(128) for _ in keys]
    assert store.get_into(keys, there) == [GetStatus.HIT] * 10_000
    assert there == values
    assert store.delete(keys) == 10_000
    assert store.contains_prefix(keys) == 0


def test_a_batch_of_many_bytes(store: KvStore) -> None:
    keys = random_keys(24)
    store.put(keys, [filled(index, 1 << 20) for index in range(24)])
    there = [blank(1 << 20) for _ in keys]
    assert store.get_into(keys, there) == [GetStatus.HIT] * 24
    assert there == [filled(index, 1 << 20) for index in range(24)]
    store.delete(keys)


def test_two_stores_of_one_url_share_objects(open_kv_store: StoreOpener) -> None:
    (key,) = random_keys(1)
    open_kv_store().put([key], [_apart(counting(100), 64)])
    assert read(open_kv_store(), key, 100) == counting(100)


def test_there_must_be_as_many_keys_as_objects(store: KvStore) -> None:
    keys = random_keys(2)
    with pytest.raises(ValueError):  # noqa: PT011  Python's own wording
        store.put(keys, [filled(1, 10)])
    with pytest.raises(ValueError):  # noqa: PT011  Python's own wording
        store.get_into(keys, [blank(10)])


@pytest.mark.parametrize("num_present", [0, 1, 4, 9])
def test_counts_the_leading_keys(store: KvStore, num_present: int) -> None:
    keys = random_keys(9)
    store.put(keys[:num_present], [filled(1, 10)] * num_present)
    assert store.contains_prefix(keys) == num_present


@pytest.mark.parametrize("hole", [0, 1, 7, 8])
def test_stops_at_the_first_hole(store: KvStore, hole: int) -> None:
    keys = random_keys(9)
    present = keys[:hole] + keys[hole + 1 :]
    store.put(present, [filled(1, 10)] * 8)
    assert store.contains_prefix(keys) == hole


def test_no_keys_have_no_prefix(store: KvStore) -> None:
    assert store.contains_prefix([]) == 0


def test_sees_a_deletion(store: KvStore) -> None:
    keys = random_keys(3)
    store.put(keys, [filled(1, 10)] * 3)
    store.delete([keys[1]])
    assert store.contains_prefix(keys) == 1
