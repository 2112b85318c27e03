"""Time to live: an object lives `ttl_s` from its last touch, and not much longer."""

import time
from collections.abc import Callable

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import blank, filled, random_keys, read
from kvstore.store import GetStatus, KvStore

_TTL_S = 0.6
_GRACE_S = 5.0
_CLOCK_TOLERANCE_S = 0.01
_POLL_S = 0.02
_NUM_ATTEMPTS = 5
_NUM_PROBES = round((_TTL_S + _GRACE_S) / _POLL_S)
_TOUCHES_PER_TTL = 6
_NUM_TOUCHED = 3 * _TOUCHES_PER_TTL


@pytest.fixture
def short_lived(open_kv_store: StoreOpener) -> KvStore:
    return open_kv_store(ttl_s=_TTL_S)


def _put_and_await_expiry(store: KvStore) -> bytes:
    """Polls a different object each time, because `contains_prefix` renews its TTL.

    Returns the first expired key.
    """
    keys = random_keys(_NUM_PROBES)
    store.put(keys, [filled(1, 100)] * _NUM_PROBES)
    for key in keys:
        if not store.contains_prefix([key]):
            return key
        time.sleep(_POLL_S)
    pytest.fail(f"alive {_GRACE_S:g} s after its TTL")


def _outlive_their_ttl(store: KvStore, check_and_touch: Callable[[list[bytes]], bool]) -> bool:
    """Keeps objects alive for two TTLs.

    Returns False if the test itself was paused too long to tell.
    """
    keys = random_keys(_NUM_TOUCHED)
    started_s = touched_s = time.monotonic()
    store.put(keys, [filled(1, 100)] * _NUM_TOUCHED)
    while time.monotonic() < started_s + 2 * _TTL_S:
        time.sleep(_TTL_S / _TOUCHES_PER_TTL)
        next_touched_s = time.monotonic()
        were_alive = check_and_touch(keys)
        if time.monotonic() > touched_s + _TTL_S - _CLOCK_TOLERANCE_S:
            return False
        assert were_alive, "gone before its TTL"
        touched_s = next_touched_s
    return True


def _put_anew_and_read(store: KvStore) -> bool:
    """Puts an expired object again and reads it.

    Returns False if the test itself was paused too long to tell.
    """
    key = _put_and_await_expiry(store)
    put_s = time.monotonic()
    store.put([key], [filled(2, 50)])
    value = read(store, key, 50)
    if time.monotonic() > put_s + _TTL_S - _CLOCK_TOLERANCE_S:
        return False
    assert value == filled(2, 50).to_bytes()
    return True


def _repeat_if_paused(attempt: Callable[[], bool]) -> None:
    """Makes attempts until one was not paused."""
    if not any(attempt() for _ in range(_NUM_ATTEMPTS)):
        pytest.fail("this machine pauses too long to tell")


def _assert_touches(store: KvStore, check_and_touch: Callable[[list[bytes]], bool]) -> None:
    """Asserts that `check_and_touch` keeps objects alive."""
    _repeat_if_paused(lambda: _outlive_their_ttl(store, check_and_touch))


def test_the_ttl_is_the_urls(short_lived: KvStore) -> None:
    assert short_lived.ttl_s == _TTL_S


def test_an_object_lives_its_ttl_and_then_goes(short_lived: KvStore) -> None:
    before_put_s = time.monotonic()
    _put_and_await_expiry(short_lived)
    assert time.monotonic() - before_put_s >= _TTL_S - _CLOCK_TOLERANCE_S


def test_what_expired_is_as_if_it_had_never_been(short_lived: KvStore) -> None:
    key = _put_and_await_expiry(short_lived)
    assert read(short_lived, key, 100) is GetStatus.MISSING
    assert short_lived.delete([key]) == 0


def test_what_expired_can_be_put_anew(short_lived: KvStore) -> None:
    _repeat_if_paused(lambda: _put_anew_and_read(short_lived))


def test_a_hit_touches(short_lived: KvStore) -> None:
    def read_all(keys: list[bytes]) -> bool:
        return all(read(short_lived, key, 100) == filled(1, 100).to_bytes() for key in keys)

    _assert_touches(short_lived, read_all)


def test_the_hits_of_one_batch_touch(short_lived: KvStore) -> None:
    def read_all(keys: list[bytes]) -> bool:
        objects = [blank(100) for _ in keys]
        return short_lived.get_into(keys, objects) == [GetStatus.HIT] * len(keys)

    _assert_touches(short_lived, read_all)


def test_a_look_up_touches_all_that_it_counts(short_lived: KvStore) -> None:
    _assert_touches(short_lived, lambda keys: short_lived.contains_prefix(keys) == _NUM_TOUCHED)


def test_putting_an_existing_object_touches(short_lived: KvStore) -> None:
    def put_again_and_read_one(keys: list[bytes]) -> bool:
        """Reads each object once, so that only the puts can keep it alive."""
        short_lived.put(keys, [filled(2, 100)] * len(keys))
        return read(short_lived, keys.pop(), 100) == filled(1, 100).to_bytes()

    _assert_touches(short_lived, put_again_and_read_one)
