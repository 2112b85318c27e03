"""`map_many`: objects shown where they lie, which nothing changes until they are closed."""

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import filled, random_keys
from kvstore.store import KvStore, MappedObjects

_OBJECT_BYTES = 10_000
_CAPACITY = 40


@pytest.fixture
def mapping_store(store: KvStore) -> KvStore:
    if not store.capabilities.maps_objects:
        pytest.skip("the store does not map objects")
    return store


def _map(store: KvStore, keys: list[bytes]) -> MappedObjects:
    mapped = store.map_many(keys)
    assert mapped is not None, "declared and not done"
    return mapped


def test_what_is_not_declared_is_not_done(store: KvStore) -> None:
    if store.capabilities.maps_objects:
        pytest.skip("the store maps objects")
    assert store.map_many(random_keys(1)) is None


def test_views_are_whole_objects_in_order(mapping_store: KvStore) -> None:
    keys = random_keys(20)
    mapping_store.put_many(keys, [filled(index, 5000 * index + 1) for index in range(20)])
    with _map(mapping_store, keys[::-1]) as mapped:
        assert mapped.views == [filled(index, 5000 * index + 1) for index in reversed(range(20))]


def test_what_is_missing_has_no_view(mapping_store: KvStore) -> None:
    present, absent = random_keys(2)
    mapping_store.put_many([present], [filled(1, 100)])
    with _map(mapping_store, [absent, present, absent]) as mapped:
        assert mapped.views == [None, filled(1, 100), None]
    with _map(mapping_store, []) as mapped:
        assert mapped.views == []


def test_views_cannot_be_written(mapping_store: KvStore) -> None:
    (key,) = random_keys(1)
    mapping_store.put_many([key], [filled(1, 100)])
    with _map(mapping_store, [key]) as mapped:
        (view,) = mapped.views
        assert view is not None
        assert view.readonly
        assert view.contiguous


def test_views_end_with_the_mapping(mapping_store: KvStore) -> None:
    (key,) = random_keys(1)
    mapping_store.put_many([key], [filled(1, 100)])
    mapped = _map(mapping_store, [key])
    (view,) = mapped.views
    mapped.close()
    mapped.close()
    with pytest.raises(ValueError, match="released"):
        bytes(view or b"")


def test_what_still_borrows_keeps_its_bytes(mapping_store: KvStore) -> None:
    keys = random_keys(2)
    mapping_store.put_many(keys[:1], [filled(1, _OBJECT_BYTES)])
    mapped = _map(mapping_store, keys[:1])
    borrowed = memoryview(mapped.views[0] or b"")[10:]
    mapped.close()
    mapping_store.delete(keys[:1])
    mapping_store.put_many(keys[1:], [filled(2, _OBJECT_BYTES)])
    assert borrowed == filled(1, _OBJECT_BYTES - 10)


def test_deleting_changes_no_view(mapping_store: KvStore) -> None:
    keys, others = random_keys(10), random_keys(10)
    mapping_store.put_many(keys, [filled(1, _OBJECT_BYTES)] * 10)
    with _map(mapping_store, keys) as mapped:
        assert mapping_store.delete(keys) == 10
        mapping_store.put_many(others, [filled(2, _OBJECT_BYTES)] * 10)
        mapping_store.put_many(keys, [filled(3, _OBJECT_BYTES)] * 10)
        assert mapped.views == [filled(1, _OBJECT_BYTES)] * 10
    with _map(mapping_store, keys) as mapped:
        assert mapped.views == [filled(3, _OBJECT_BYTES)] * 10


def test_eviction_changes_no_view(mapping_store: KvStore, open_kv_store: StoreOpener) -> None:
    if not mapping_store.capabilities.takes_max_bytes:
        pytest.skip("the backend is bounded by its own configuration")
    mapping_store.close()
    store = open_kv_store(max_bytes=_CAPACITY * _OBJECT_BYTES)
    keys = random_keys(_CAPACITY // 2)
    store.put_many(keys, [filled(1, _OBJECT_BYTES)] * len(keys))
    with _map(store, keys) as mapped:
        for key in random_keys(4 * _CAPACITY):
            store.put_many([key], [filled(2, _OBJECT_BYTES)])
        assert store.contains_prefix(keys) == 0
        assert mapped.views == [filled(1, _OBJECT_BYTES)] * len(keys)


def test_closing_the_store_changes_no_view(mapping_store: KvStore) -> None:
    (key,) = random_keys(1)
    mapping_store.put_many([key], [filled(1, _OBJECT_BYTES)])
    with _map(mapping_store, [key]) as mapped:
        mapping_store.close()
        assert mapped.views == [filled(1, _OBJECT_BYTES)]


def test_mappings_are_counted_as_gets(mapping_store: KvStore) -> None:
    present, absent = random_keys(2)
    mapping_store.put_many([present], [filled(1, 100)])
    _map(mapping_store, [present, absent]).close()
    stats = mapping_store.stats()
    assert (stats.gets, stats.hits, stats.get_bytes) == (2, 1, 100)
