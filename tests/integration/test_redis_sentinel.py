"""The redis store behind sentinels: it follows the master, and no stopped server blocks it."""

import os
import time
from contextlib import closing

import pytest

from kvstore.conformance.objects import as_object, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.redis.objects import object_name
from tests.support.redis_deployments import ask, running_sentinels
from tests.support.redis_server import await_true, running_redis_server

_TIMEOUT_S = 2.0
_SLACK_S = 4.0  # a busy machine; a call that hangs takes longer than any slack


@pytest.fixture
def deployment(tmp_path):
    with running_sentinels(tmp_path) as deployment:
        yield deployment


@pytest.fixture
def store(deployment):
    with closing(open_store(f"{deployment.url}?timeout_s={_TIMEOUT_S}")) as store:
        yield store


def works(store, keys, values):
    """Puts objects and reads them back; returns whether that succeeds."""
    try:
        store.put(keys, values)
        return [
            read(store, key, value.nbytes) for key, value in zip(keys, values, strict=True)
        ] == [value.to_bytes() for value in values]
    except StoreUnavailableError:
        return False


def test_the_store_follows_the_master(deployment, store):
    keys = random_keys(2)
    values = [filled(1, 1000), as_object(os.urandom(5_000_000))]
    assert works(store, keys, values)
    deployment.await_replicated()
    deployment.master.kill()
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        store.contains_prefix(keys)
    assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S
    await_true(lambda: works(store, random_keys(1), values[:1]), "the store has a new master")
    assert ask(deployment.replica, "ROLE")[0] == b"master"
    assert store.contains_prefix(keys) == 2, "the replicated objects are found"
    deployment.master.start()  # it acts as a master until a sentinel finds it
    new_keys = random_keys(2)
    assert works(store, new_keys, values)
    names = [object_name(key) for key in new_keys]
    assert ask(deployment.replica, "EXISTS", *names) == 2


@pytest.mark.slow
def test_the_store_leaves_a_demoted_master(deployment, store):
    """Without a crash the connections stay open, and the old master would answer reads."""
    (key,) = random_keys(1)
    assert works(store, [key], [filled(1, 100)])
    deployment.await_replicated()
    # Refused while the sentinel has not asked the replica yet what it is.
    failover = "SENTINEL", "FAILOVER", "kv"
    await_true(lambda: ask(deployment.sentinels[0], *failover) == b"OK", "a failover begins")
    await_true(lambda: ask(deployment.master, "ROLE")[0] == b"slave", "the old master is demoted")
    await_true(lambda: works(store, random_keys(1), [filled(1, 100)]), "the store has a new master")
    assert read(store, key, 100) == filled(1, 100).to_bytes()


@pytest.mark.slow
def test_a_stopped_sentinel_is_skipped(deployment):
    deployment.sentinels[0].pause()
    started_s = time.monotonic()
    with closing(open_store(f"{deployment.url}?timeout_s={_TIMEOUT_S}")) as store:
        store.put(random_keys(1), [filled(1, 100)])
    assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S
    deployment.sentinels[0].resume()


@pytest.mark.slow
def test_a_service_that_sentinels_do_not_know_is_unavailable(deployment):
    url = deployment.url.replace("/kv/", "/other/")
    with (
        closing(open_store(url)) as store,
        pytest.raises(StoreUnavailableError, match="No master found for 'other'"),
    ):
        store.contains_prefix(random_keys(1))


def test_sentinels_have_their_own_password(tmp_path):
    with running_redis_server("--requirepass", "data") as master:
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor kv 127.0.0.1 {master.port} 1\nsentinel auth-pass kv data\n"
            "requirepass guard\n"
        )
        with running_redis_server("--sentinel", config=str(config)) as sentinel:
            url = f"redis+sentinel://:data@127.0.0.1:{sentinel.port}/kv"
            with closing(open_store(url)) as store, pytest.raises(StoreUnavailableError):
                store.contains_prefix(random_keys(1))
            with closing(open_store(f"{url}?sentinel_password=guard")) as store:
                await_true(lambda: works(store, [bytes(32)], [filled(1, 9)]), "a master is known")
                assert read(store, random_keys(1)[0], 9) is GetStatus.MISSING
