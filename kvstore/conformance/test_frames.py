"""`put_frames` and `get_frames_into`: objects in two parts, which are objects like all others."""

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.store import Frame, GetStatus, KvStore

_LARGE_BYTES = 5 << 20


@pytest.fixture
def framing_store(store: KvStore) -> KvStore:
    if not store.capabilities.takes_frames:
        pytest.skip("the store does not take objects in parts")
    return store


def _counting(num_bytes: int) -> bytes:
    """Bytes that tell where they belong."""
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


def _cut(value: bytes | memoryview, num_first: int) -> Frame:
    """A value in two parts, between which there is something else."""
    memory = memoryview(bytearray(len(value) + 10))
    first, second = memory[:num_first], memory[num_first + 10 :]
    first[:], second[:] = value[:num_first], value[num_first:]
    return first, second


def _read(store: KvStore, key: bytes, num_first: int, num_second: int) -> bytes | GetStatus:
    frame = blank(num_first), blank(num_second)
    (status,) = store.get_frames_into([key], [frame])
    return b"".join(frame) if status is GetStatus.HIT else status


@pytest.mark.parametrize(
    ("num_first", "num_second"),
    [(64, 100), (64, 0), (0, 100), (1, 4095), (64, _LARGE_BYTES), (_LARGE_BYTES, 1)],
)
def test_parts_are_put_as_one_and_read_as_one(
    framing_store: KvStore, num_first: int, num_second: int
) -> None:
    in_parts, as_one = random_keys(2)
    value = _counting(num_first + num_second)
    framing_store.put_frames([in_parts], [_cut(value, num_first)])
    framing_store.put_many([as_one], [memoryview(value)])
    for key in (in_parts, as_one):
        assert read(framing_store, key, len(value)) == value
        assert _read(framing_store, key, num_first, num_second) == value


def test_an_object_may_be_cut_elsewhere_when_it_is_read(framing_store: KvStore) -> None:
    (key,) = random_keys(1)
    framing_store.put_frames([key], [_cut(_counting(1000), 64)])
    for num_first in (0, 1, 63, 65, 1000):
        assert _read(framing_store, key, num_first, 1000 - num_first) == _counting(1000)


def test_each_key_of_a_batch_has_its_own_status(framing_store: KvStore) -> None:
    present, absent, longer, shorter = random_keys(4)
    keys = [present, longer, shorter]
    framing_store.put_frames(keys, [_cut(filled(7, size), 64) for size in (100, 101, 99)])
    frames = [(blank(64), blank(36)) for _ in range(5)]
    statuses = framing_store.get_frames_into([longer, present, absent, shorter, present], frames)
    assert statuses == [
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
        GetStatus.MISSING,
        GetStatus.WRONG_SIZE,
        GetStatus.HIT,
    ]
    for index in (1, 4):
        assert b"".join(frames[index]) == bytes(filled(7, 100))


def test_a_batch_keeps_its_order(framing_store: KvStore) -> None:
    keys = random_keys(100)
    framing_store.put_frames(keys, [_cut(filled(index, 100 + index), 64) for index in range(100)])
    assert framing_store.contains_prefix(keys) == 100
    frames = [(blank(64), blank(36 + index)) for index in reversed(range(100))]
    assert framing_store.get_frames_into(keys[::-1], frames) == [GetStatus.HIT] * 100
    for index, frame in zip(reversed(range(100)), frames, strict=True):
        assert b"".join(frame) == bytes(filled(index, 100 + index))


def test_empty_batches_do_nothing(framing_store: KvStore) -> None:
    framing_store.put_frames([], [])
    assert framing_store.get_frames_into([], []) == []


def test_a_read_stays_inside_its_parts(framing_store: KvStore) -> None:
    (key,) = random_keys(1)
    framing_store.put_frames([key], [_cut(filled(1, 96), 32)])
    memory = memoryview(bytearray(b"\xee" * 256))
    framing_store.get_frames_into([key], [(memory[128:160], memory[32:96])])
    assert bytes(memory) == (b"\xee" * 32 + b"\1" * 64 + b"\xee" * 32 + b"\1" * 32 + b"\xee" * 96)


def test_parts_may_be_reused_once_they_are_put(framing_store: KvStore) -> None:
    (key,) = random_keys(1)
    first, second = frame = _cut(filled(1, 4096), 64)
    framing_store.put_frames([key], [frame])
    first[:], second[:] = filled(2, 64), filled(2, 4032)
    assert read(framing_store, key, 4096) == bytes(filled(1, 4096))


def test_parts_are_not_written_when_they_are_put(framing_store: KvStore) -> None:
    (key,) = random_keys(1)
    value = memoryview(_counting(4096))  # read-only
    framing_store.put_frames([key], [(value[:64], value[64:])])
    assert read(framing_store, key, 4096) == _counting(4096)


def test_putting_an_existing_key_keeps_the_old_object(framing_store: KvStore) -> None:
    (key,) = random_keys(1)
    framing_store.put_many([key], [filled(1, 1000)])
    framing_store.put_frames([key, key], [_cut(filled(2, 1000), 64), _cut(filled(3, 10), 5)])
    assert read(framing_store, key, 1000) == bytes(filled(1, 1000))


def test_two_stores_of_one_url_share_objects(open_kv_store: StoreOpener) -> None:
    store = open_kv_store()
    if not store.capabilities.takes_frames:
        pytest.skip("the store does not take objects in parts")
    (key,) = random_keys(1)
    store.put_frames([key], [_cut(filled(5, 100), 64)])
    assert _read(open_kv_store(), key, 64, 36) == bytes(filled(5, 100))


def test_the_length_of_keys_and_frames_must_agree(framing_store: KvStore) -> None:
    keys = random_keys(2)
    with pytest.raises(ValueError):  # noqa: PT011  Python's own wording
        framing_store.put_frames(keys, [_cut(filled(1, 10), 5)])
    with pytest.raises(ValueError):  # noqa: PT011
        framing_store.get_frames_into(keys, [(blank(5), blank(5))])


def test_parts_are_counted_as_puts_and_gets(framing_store: KvStore) -> None:
    present, absent = random_keys(2)
    framing_store.put_frames([present], [_cut(filled(1, 100), 64)])
    frames = [(blank(64), blank(36)) for _ in range(2)]
    framing_store.get_frames_into([present, absent], frames)
    stats = framing_store.stats()
    assert (stats.puts, stats.put_bytes) == (1, 100)
    assert (stats.gets, stats.hits, stats.get_bytes) == (2, 1, 100)
