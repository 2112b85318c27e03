"""Time to live: an object lives `ttl_s` from its last touch, and not much longer."""

import time
from collections.abc import Callable

import pytest

from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import filled, random_keys, read
from kvstore.store import GetStatus, KvStore

_TTL_S = 0.6
_GRACE_S = 5.0
_CLOCK_TOLERANCE_S = 0.01
_POLL_S = 0.02
_NUM_ATTEMPTS = 5


@pytest.fixture
def short_lived(open_kv_store: StoreOpener) -> KvStore:
    return open_kv_store(ttl_s=_TTL_S)


def _wait_until_gone(store: KvStore, key: bytes) -> None:
    """Looks by `contains_prefix`, which does not touch."""
    deadline_s = time.monotonic() + _TTL_S + _GRACE_S
    while store.contains_prefix([key]):
        assert time.monotonic() < deadline_s, f"alive {_GRACE_S:g} s after its TTL"
        time.sleep(_POLL_S)


def _outlives_its_ttl(is_alive_then_touch: Callable[[], bool]) -> bool:
    """Touches for two TTLs; False where the machine paused for longer than a TTL."""
    started_s = touched_s = time.monotonic()
    while time.monotonic() < started_s + 2 * _TTL_S:
        time.sleep(_TTL_S / 6)
        next_touched_s = time.monotonic()
        was_alive = is_alive_then_touch()
        if time.monotonic() > touched_s + _TTL_S - _CLOCK_TOLERANCE_S:
            return False
        assert was_alive, "gone before its TTL"
        touched_s = next_touched_s
    return True


def _assert_outlives_its_ttl(store: KvStore, touch: Callable[[bytes], bool]) -> None:
    for _ in range(_NUM_ATTEMPTS):
        (key,) = random_keys(1)
        store.put_many([key], [filled(1, 100)])
        if _outlives_its_ttl(lambda key=key: touch(key)):  # type: ignore[misc]
            return
    pytest.fail("this machine pauses too long to tell")


def test_the_ttl_is_the_urls(short_lived: KvStore) -> None:
    assert short_lived.ttl_s == _TTL_S


def test_an_object_lives_its_ttl_and_then_goes(short_lived: KvStore) -> None:
    (key,) = random_keys(1)
    before_put_s = time.monotonic()
    short_lived.put_many([key], [filled(1, 100)])
    _wait_until_gone(short_lived, key)
    assert time.monotonic() - before_put_s >= _TTL_S - _CLOCK_TOLERANCE_S


def test_what_expired_is_as_if_it_had_never_been(short_lived: KvStore) -> None:
    (key,) = random_keys(1)
    short_lived.put_many([key], [filled(1, 100)])
    _wait_until_gone(short_lived, key)
    assert read(short_lived, key, 100) is GetStatus.MISSING
    assert short_lived.delete([key]) == 0
    short_lived.put_many([key], [filled(2, 50)])
    assert read(short_lived, key, 50) == bytes(filled(2, 50))


def test_a_hit_touches(short_lived: KvStore) -> None:
    _assert_outlives_its_ttl(
        short_lived, lambda key: read(short_lived, key, 100) == bytes(filled(1, 100))
    )


def test_putting_an_existing_object_touches(short_lived: KvStore) -> None:
    def put_again(key: bytes) -> bool:
        is_alive = short_lived.contains_prefix([key]) == 1
        short_lived.put_many([key], [filled(2, 100)])
        return is_alive

    _assert_outlives_its_ttl(short_lived, put_again)
