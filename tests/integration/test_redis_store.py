"""The redis store when its server is slow, stopped, absent, restarted, full, locked or uses TLS."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from redis import Redis

from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.redis.objects import object_name
from tests.support.ports import reserved_port
from tests.support.redis_deployments import ask, make_certificate
from tests.support.redis_server import running_redis_server

_TIMEOUT_S = 0.3
_SLACK_S = 4.0  # a busy machine; a call that hangs takes longer than any slack


@pytest.fixture
def store(redis_server):
    with closing(open_store(f"{redis_server.url}?timeout_s={_TIMEOUT_S}")) as store:
        yield store


def every_call(store):
    """Returns each method that calls the server, as a function without arguments."""
    keys = random_keys(3)
    return [
        lambda: store.put(keys, [filled(1, 4_000_000)] * 3),
        lambda: store.get_into(keys, [blank(100) for _ in keys]),
        lambda: store.contains_prefix(keys),
        lambda: store.delete(keys),
    ]


def assert_unavailable_in_time(call):
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        call()
    assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S


@pytest.mark.parametrize("is_connected", [True, False])
def test_calls_to_a_stopped_server_fail_in_time(redis_server, store, is_connected):
    if is_connected:
        store.put(random_keys(1), [filled(1, 100)])
    redis_server.pause()
    for call in every_call(store):
        assert_unavailable_in_time(call)
    redis_server.resume()


def test_calls_of_many_threads_to_a_stopped_server_fail_in_time(redis_server, store):
    redis_server.pause()
    with ThreadPoolExecutor(24) as pool:
        started_s = time.monotonic()
        calls = [pool.submit(store.contains_prefix, random_keys(1)) for _ in range(24)]
        errors = [call.exception(timeout=30) for call in calls]
    assert {type(error) for error in errors} == {StoreUnavailableError}
    assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S
    redis_server.resume()


def test_the_store_works_again_once_a_stopped_server_continues(redis_server, store):
    (key,) = random_keys(1)
    store.put([key], [filled(1, 100)])
    redis_server.pause()
    for call in every_call(store):
        assert_unavailable_in_time(call)
    redis_server.resume()
    assert read(store, key, 100) == filled(1, 100).to_bytes()


def test_the_store_works_again_when_a_killed_server_returns(redis_server, store):
    (key,) = random_keys(1)
    with ThreadPoolExecutor(8) as pool:  # so that the pool has several connections to lose
        list(pool.map(lambda byte: store.put([key], [filled(byte, 100_000)]), range(8)))
    redis_server.kill()
    for call in every_call(store):
        assert_unavailable_in_time(call)
    redis_server.start()
    assert read(store, key, 100) is GetStatus.MISSING
    store.put([key], [filled(2, 100)])
    assert store.contains_prefix([key]) == 1


def test_a_store_opens_without_its_server(store):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with closing(open_store(f"redis://127.0.0.1:{unused.getsockname()[1]}/0")) as absent:
            for call in every_call(absent):
                assert_unavailable_in_time(call)


def test_a_call_to_a_peer_that_never_answers_fails_in_time_without_a_retry():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with closing(open_store(f"redis://127.0.0.1:{port}/0?timeout_s={_TIMEOUT_S}")) as store:
            assert_unavailable_in_time(lambda: store.contains_prefix(random_keys(1)))
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # there was one connection: the call was not retried
            silent.accept()


def test_the_servers_bound_evicts_the_least_recently_used():
    with (
        running_redis_server("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru") as server,
        closing(open_store(server.url)) as store,
    ):
        keys = random_keys(200)
        for key in keys:
            store.put([key], [filled(1, 200_000)])
        assert store.contains_prefix(keys[-1:]) == 1
        num_alive = sum(store.contains_prefix([key]) for key in keys)
        assert 20 < num_alive < 100


def test_a_full_server_that_does_not_evict_is_unavailable():
    with (
        running_redis_server("--maxmemory", "5mb", "--maxmemory-policy", "noeviction") as server,
        closing(open_store(server.url)) as store,
    ):
        keys = random_keys(40)
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            store.put(keys, [filled(1, 500_000)] * 40)
        assert store.contains_prefix(keys) < 40


def test_a_replica_is_read_and_left_for_the_next_call(redis_server, store):
    """What it holds is good, but a name may lead to another server by then."""
    (key,) = random_keys(1)
    store.put([key], [filled(1, 100)])
    ask(redis_server, "REPLICAOF", "127.0.0.1", reserved_port())
    before = ask(redis_server, "INFO")["total_connections_received"]
    assert read(store, key, 100) == filled(1, 100).to_bytes()
    for call in (lambda: store.put([key], [filled(2, 100)]), lambda: store.delete([key])):
        assert_unavailable_in_time(call)
    received = ask(redis_server, "INFO")["total_connections_received"] - before
    assert received >= 3, "the store stays connected, and would not look for the master"
    ask(redis_server, "REPLICAOF", "NO", "ONE")
    assert read(store, key, 100) == filled(1, 100).to_bytes()


def test_a_password_is_needed_and_used():
    with running_redis_server("--requirepass", "p@ss/word") as server:
        with closing(open_store(server.url)) as store, pytest.raises(StoreUnavailableError):
            store.contains_prefix(random_keys(1))
        url = server.url.replace("//", "//:p%40ss%2Fword@")
        with closing(open_store(url)) as store:
            assert store.contains_prefix(random_keys(1)) == 0


def test_objects_of_an_existing_key_are_not_sent_again(redis_server, store):
    (key,) = random_keys(1)
    with Redis.from_url(redis_server.url) as client:
        store.put([key], [filled(1, 1_000_000)])
        received = client.info("stats")["total_net_input_bytes"]
        store.put([key], [filled(1, 1_000_000)])
        assert client.info("stats")["total_net_input_bytes"] - received < 10_000


def test_a_prefix_lookup_is_one_command(redis_server, store):
    keys = random_keys(500)
    store.put(keys, [filled(1, 10)] * 500)
    store.contains_prefix(keys)  # the first call loads the script into the server
    with Redis.from_url(redis_server.url) as client:
        before = client.info("commandstats")["cmdstat_eval"]["calls"]
        assert store.contains_prefix(keys) == 500
        assert client.info("commandstats")["cmdstat_eval"]["calls"] == before + 1


def test_a_lookup_renews_the_expiry_of_the_objects_it_counts(redis_server, store):
    counted, missing, behind = random_keys(3)
    store.put([counted, behind], [filled(1, 10)] * 2)
    with Redis.from_url(redis_server.url) as client:
        for key in (counted, behind):
            client.pexpire(object_name(key), 60_000)
        assert store.contains_prefix([counted, missing, behind]) == 1
        assert 3_590_000 < client.pttl(object_name(counted)) <= 3_600_000
        assert client.pttl(object_name(behind)) <= 60_000
        assert client.pttl(object_name(missing)) == -2


def test_keys_carry_the_prefix_and_an_expiry(redis_server, store):
    (key,) = random_keys(1)
    store.put([key], [filled(1, 10)])
    with Redis.from_url(redis_server.url) as client:
        assert client.keys() == [object_name(key)]
        assert 3_590_000 < client.pttl(object_name(key)) <= 3_600_000


@pytest.fixture
def tls_server(tmp_path):
    """Yields a certificate and the URL of a server that requires it, a password and TLS."""
    certificate, port = make_certificate(tmp_path), reserved_port()
    arguments = certificate.server_arguments(port, clients=True)
    with running_redis_server(*arguments, "--requirepass", "p@ss"):
        yield certificate, f"rediss://:p%40ss@127.0.0.1:{port}/0?timeout_s=10"


def test_tls_is_used_and_both_sides_are_checked(tls_server):
    certificate, url = tls_server
    files = f"&cert_file={certificate.path}&key_file={certificate.key}"
    (key,) = random_keys(1)
    for lacking in (url, url + files, f"{url}&ca_file={certificate.path}"):
        with closing(open_store(lacking)) as store, pytest.raises(StoreUnavailableError):
            store.contains_prefix([key])
    with closing(open_store(f"{url}{files}&ca_file={certificate.path}")) as store:
        for num_bytes in (1_000_000, 9_000_000):
            value = os.urandom(num_bytes)
            store.put([key], [as_object(value)])
            assert read(store, key, num_bytes) == value
            assert store.delete([key]) == 1


def test_the_certificate_authority_of_the_environment_is_trusted(tmp_path, monkeypatch):
    certificate, port = make_certificate(tmp_path), reserved_port()
    monkeypatch.setenv("SSL_CERT_FILE", certificate.path)
    with (
        running_redis_server(*certificate.server_arguments(port)),
        closing(open_store(f"rediss://127.0.0.1:{port}")) as store,
    ):
        assert store.contains_prefix(random_keys(1)) == 0
