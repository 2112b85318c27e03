"""`lease_s`: eviction takes nothing that was touched a moment ago."""

import time
from collections.abc import Callable

import pytest

from baton.common.errors import ConfigurationError
from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import KvStore, StoreUnavailableError

_OBJECT_BYTES = 10_000
_CAPACITY = 40
_MAX_BYTES = _CAPACITY * _OBJECT_BYTES
_SHORT_LEASE_S = 0.5
_POLL_S = 0.02
_DEADLINE_S = 30.0
_NUM_ATTEMPTS = 5

pytestmark = pytest.mark.usefixtures("leases")


@pytest.fixture
def leases(store: KvStore) -> None:
    store.close()
    if not store.capabilities.keeps_leases:
        pytest.skip("the store keeps no leases")


@pytest.fixture
def open_leasing(open_kv_store: StoreOpener) -> StoreOpener:
    """Opens the store small and empty, with a lease."""

    def open_empty(**options: float) -> KvStore:
        store = open_kv_store(lease_s=0, max_bytes=_MAX_BYTES)
        (key,) = random_keys(1)
        store.put([key], [filled(1, _MAX_BYTES)])  # what other tests left goes
        store.delete([key])
        store.close()
        return open_kv_store(max_bytes=_MAX_BYTES, **options)

    return open_empty


def _put(store: KvStore, key: bytes) -> bool:
    """Puts an object; whether there was room."""
    try:
        store.put([key], [filled(1, _OBJECT_BYTES)])
    except StoreUnavailableError as error:
        return "leased" not in str(error) and pytest.fail(f"refused for another reason: {error}")
    return True


def _fill(store: KvStore) -> list[bytes]:
    """Puts objects until the store refuses; those that it took. On a machine that pauses for longer
    than a lease it may take all.
    """
    keys, began_s = random_keys(3 * _CAPACITY), time.monotonic()
    num_put = next((index for index, key in enumerate(keys) if not _put(store, key)), len(keys))
    is_paused = time.monotonic() > began_s + store.lease_s
    assert num_put < len(keys) or is_paused, "it evicts what is leased"
    return keys[:num_put]


def _touch(store: KvStore, key: bytes, how: str) -> None:
    if how == "put":
        assert _put(store, key)
    elif how == "get":
        read(store, key, _OBJECT_BYTES)
    else:
        store.contains_prefix([key])


def _await_room(store: KvStore) -> bytes:
    """Puts an object as soon as the store takes it."""
    (key,) = random_keys(1)
    deadline_s = time.monotonic() + _DEADLINE_S
    while not _put(store, key):
        assert time.monotonic() < deadline_s, "leases do not end"
        time.sleep(_POLL_S)
    return key


def test_a_put_evicts_nothing_that_is_leased(open_leasing: StoreOpener) -> None:
    store = open_leasing(lease_s=600)
    keys = _fill(store)
    assert _CAPACITY // 2 <= len(keys) <= _CAPACITY
    assert store.contains_prefix(keys) == len(keys)
    store.delete(keys)


def test_a_refused_batch_leaves_whole_objects(open_leasing: StoreOpener) -> None:
    store = open_leasing(lease_s=600)
    keys = random_keys(2 * _CAPACITY)
    with pytest.raises(StoreUnavailableError, match="leased"):
        store.put(keys, [filled(1, _OBJECT_BYTES)] * len(keys))
    alive = [key for key in keys if store.contains_prefix([key])]
    assert len(alive) <= _CAPACITY
    assert all(
        read(store, key, _OBJECT_BYTES) == filled(1, _OBJECT_BYTES).to_bytes() for key in alive
    )
    store.delete(keys)


def test_what_exists_can_be_put_in_a_full_store(open_leasing: StoreOpener) -> None:
    store = open_leasing(lease_s=600)
    keys = _fill(store)
    assert all(_put(store, key) for key in keys)
    store.delete(keys)


def test_deleting_what_is_leased_makes_room(open_leasing: StoreOpener) -> None:
    store = open_leasing(lease_s=600)
    keys = _fill(store)
    num_deleted = len(keys) // 2
    assert store.delete(keys[:num_deleted]) == num_deleted
    assert all(_put(store, key) for key in keys[:num_deleted])
    store.delete(keys)


def test_what_is_no_longer_leased_goes(open_leasing: StoreOpener) -> None:
    store = open_leasing(lease_s=_SHORT_LEASE_S)
    keys = _fill(store)
    new_key = _await_room(store)
    assert store.contains_prefix([new_key]) == 1
    assert store.contains_prefix(keys[:1]) == 0


@pytest.mark.parametrize("touch", ["put", "get", "contains_prefix"])
def test_a_touch_renews_the_lease(open_leasing: StoreOpener, touch: str) -> None:
    store = open_leasing(lease_s=_SHORT_LEASE_S)

    def outlives_others() -> bool:
        """False where the machine paused for longer than the lease."""
        touched, *_ = _fill(store)
        time.sleep(_SHORT_LEASE_S)
        touched_s = time.monotonic()
        _touch(store, touched, touch)
        _fill(store)
        is_alive = store.contains_prefix([touched]) == 1
        if time.monotonic() > touched_s + _SHORT_LEASE_S:
            store.delete([touched])
            return False
        return is_alive or pytest.fail("evicted in its lease")

    if not any(outlives_others() for _ in range(_NUM_ATTEMPTS)):
        pytest.fail("this machine pauses too long to tell")


def test_the_ttl_ends_a_lease(open_leasing: StoreOpener) -> None:
    store = open_leasing(ttl_s=_SHORT_LEASE_S, lease_s=_SHORT_LEASE_S)
    store.put(random_keys(1), [filled(1, _MAX_BYTES)])
    _await_room(store)


def test_the_lease_is_the_urls(open_kv_store: StoreOpener) -> None:
    assert open_kv_store(lease_s=7).lease_s == 7


def test_the_lease_defaults_to_half_a_minute(kv_connector_url: str) -> None:
    store = open_store(kv_connector_url)
    store.close()
    assert store.lease_s == 30


def test_the_default_lease_is_not_over_the_ttl(kv_connector_url: str) -> None:
    separator = "&" if "?" in kv_connector_url else "?"
    store = open_store(f"{kv_connector_url}{separator}ttl_s=5")
    store.close()
    assert store.lease_s == 5


@pytest.mark.parametrize("value", ["-1", "601", "nan", "inf", "soon", ""])
def test_a_bad_lease_is_an_error_that_names_it(make_url: Callable[..., str], value: str) -> None:
    with pytest.raises(ConfigurationError, match="lease_s"):
        open_store(make_url(ttl_s=600, lease_s=value))
