"""Opening, options, counters and closing."""

from collections.abc import Callable

import pytest

from baton.common.errors import ConfigurationError
from kvstore.conformance.conftest import StoreOpener
from kvstore.conformance.objects import blank, filled, random_keys
from kvstore.registry import open_store
from kvstore.store import KvStore, StoreCapabilities


def test_capabilities_are_declared(store: KvStore) -> None:
    assert isinstance(store.capabilities, StoreCapabilities)
    if store.capabilities.shared_between_hosts:
        assert store.capabilities.shared_between_processes


def test_an_unknown_option_is_an_error_that_names_it(make_url: Callable[..., str]) -> None:
    with pytest.raises(ConfigurationError, match="no_such_option"):
        open_store(make_url(no_such_option=1))


@pytest.mark.parametrize("option", ["ttl_s", "timeout_s"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_bad_duration_is_an_error_that_names_it(
    make_url: Callable[..., str], option: str, value: str
) -> None:
    with pytest.raises(ConfigurationError, match=option):
        open_store(make_url(**{option: value}))


@pytest.mark.parametrize("value", ["0", "-5MiB", "many", "4Gb/s", ""])
def test_a_bad_size_is_an_error_that_names_it(make_url: Callable[..., str], value: str) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes"):
        open_store(make_url(max_bytes=value))


def test_the_ttl_defaults_to_an_hour(kv_connector_url: str) -> None:
    store = open_store(kv_connector_url)
    store.close()
    assert store.ttl_s == 3600


def test_the_timeout_is_that_of_the_url(open_kv_store: StoreOpener) -> None:
    assert open_kv_store(timeout_s=30).timeout_s == 30


def test_counters_count(store: KvStore) -> None:
    hit, missing, wrong_size = random_keys(3)
    store.put([hit, wrong_size], [filled(1, 100), filled(1, 50)])
    store.put([hit], [filled(1, 100)])
    store.get_into([hit, missing, wrong_size], [blank(100) for _ in range(3)])
    stats = store.stats()
    assert (stats.puts, stats.put_bytes) == (3, 250)
    assert (stats.gets, stats.hits, stats.get_bytes) == (3, 1, 100)


def test_the_size_counts_what_is_there(store: KvStore) -> None:
    keys = random_keys(3)
    before = store.stats()
    store.put(keys, [filled(1, 1000)] * 3)
    after = store.stats()
    if before.num_objects is not None and after.num_objects is not None:
        assert after.num_objects - before.num_objects == 3
    if before.num_bytes is not None and after.num_bytes is not None:
        assert after.num_bytes - before.num_bytes == 3000


def test_the_oldest_age_is_not_negative(store: KvStore) -> None:
    store.put(random_keys(1), [filled(1, 1000)])
    age_s = store.stats().oldest_age_s
    assert age_s is None or age_s >= 0


def test_closing_twice_is_fine(open_kv_store: StoreOpener) -> None:
    store = open_kv_store()
    store.close()
    store.close()
