"""`max_bytes`: the store is bounded, and the least recently touched objects go first."""

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import filled, random_keys, read
from kvstore.store import KvStore, StoreUnavailableError

_OBJECT_BYTES = 10_000
_CAPACITY = 40


@pytest.fixture
def open_bounded(store: KvStore, open_kv_store: StoreOpener) -> StoreOpener:
    if not store.capabilities.takes_max_bytes:
        pytest.skip("the backend is bounded by its own configuration")
    store.close()
    return lambda: open_kv_store(max_bytes=_CAPACITY * _OBJECT_BYTES)


def _put(store: KvStore, key: bytes) -> None:
    store.put([key], [filled(1, _OBJECT_BYTES)])


def _alive(store: KvStore, keys: list[bytes]) -> list[bool]:
    return [store.contains_prefix([key]) == 1 for key in keys]


def test_objects_keep_to_the_bound(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    keys = random_keys(4 * _CAPACITY)
    for num_put, key in enumerate(keys, start=1):
        _put(store, key)
        if num_put % 20 == 0:
            assert sum(_alive(store, keys[:num_put])) <= _CAPACITY
    alive = _alive(store, keys)
    assert _CAPACITY // 2 <= sum(alive) <= _CAPACITY
    assert alive == sorted(alive), "a younger object went before an older one"


def test_evictions_are_counted_where_they_are_known(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    keys = random_keys(2 * _CAPACITY)
    for key in keys:
        _put(store, key)
    num_gone = len(keys) - sum(_alive(store, keys))
    evictions = store.stats().evictions
    assert evictions is None or evictions >= num_gone


def test_two_stores_keep_to_one_bound(open_bounded: StoreOpener) -> None:
    first, second = open_bounded(), open_bounded()
    keys = random_keys(4 * _CAPACITY)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        _put(first, even)
        _put(second, odd)
    assert _CAPACITY // 2 <= sum(_alive(first, keys)) <= _CAPACITY


def test_opening_evicts_nothing(open_bounded: StoreOpener) -> None:
    first = open_bounded()
    keys = random_keys(_CAPACITY)
    for key in keys:
        _put(first, key)
    alive = _alive(first, keys)
    for _ in range(2):
        assert _alive(open_bounded(), keys) == alive


def test_a_batch_beyond_the_bound_keeps_its_end(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    keys = random_keys(2 * _CAPACITY)
    store.put(keys, [filled(1, _OBJECT_BYTES)] * len(keys))
    alive = _alive(store, keys)
    assert sum(alive) <= _CAPACITY
    assert alive[-1]


def test_what_is_read_stays(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    read_key, *others = random_keys(1 + 3 * _CAPACITY)
    _put(store, read_key)
    for key in others:
        _put(store, key)
        assert isinstance(read(store, read_key, _OBJECT_BYTES), bytes)
    assert not store.contains_prefix(others[:1])


def test_what_is_put_again_stays(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    again, *others = random_keys(1 + 3 * _CAPACITY)
    _put(store, again)
    for key in others:
        store.put([again], [filled(2, _OBJECT_BYTES)])
        _put(store, key)
    assert read(store, again, _OBJECT_BYTES) == filled(1, _OBJECT_BYTES).to_bytes(), (
        "it went meanwhile"
    )


def test_what_is_looked_up_stays(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    looked_up, others = random_keys(3), random_keys(3 * _CAPACITY)
    store.put(looked_up, [filled(1, _OBJECT_BYTES)] * len(looked_up))
    for key in others:
        _put(store, key)
        assert store.contains_prefix(looked_up) == len(looked_up)
    assert not store.contains_prefix(others[:1])


def test_deleting_makes_room(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    kept = random_keys(_CAPACITY // 2)
    for key in kept:
        _put(store, key)
    for _ in range(4):
        passing = random_keys(_CAPACITY // 4)
        for key in passing:
            _put(store, key)
        assert store.delete(passing) == len(passing)
    assert all(_alive(store, kept))


def test_an_object_beyond_the_bound_is_refused(open_bounded: StoreOpener) -> None:
    store = open_bounded()
    too_large, fitting = random_keys(2)
    with pytest.raises(StoreUnavailableError):
        store.put([too_large], [filled(1, (_CAPACITY + 1) * _OBJECT_BYTES)])
    _put(store, fitting)
    assert store.contains_prefix([fitting])
