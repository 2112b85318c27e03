"""The redis store on a cluster: keys on all servers, slots that move, servers that stop."""

import os
import time
from contextlib import closing

import pytest
from redis.crc import key_slot
from redis.exceptions import MovedError

from baton.doctor import Level
from baton.doctor.connectors import check_store
from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, PartlyUnavailableError, StoreUnavailableError
from kvstore.store_connector import StoreConnectorWorker
from kvstore.stores.redis.objects import object_name
from tests.support.redis_deployments import acl_rules, ask, running_cluster
from tests.support.redis_server import await_true, running_redis_server
from tests.support.thread_time import ThreadTime

_TIMEOUT_S = 1.0
_SLACK_S = 4.0  # a busy machine; a call that hangs takes longer than any slack


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def store(cluster):
    with closing(open_store(f"{cluster.url}?timeout_s=10")) as store:
        yield store


@pytest.fixture
def short_timeout_store(cluster):
    """Opens a store with connections to all servers and a short timeout."""
    with closing(open_store(f"{cluster.url}?timeout_s={_TIMEOUT_S}")) as store:
        store.contains_prefix(random_keys(100))
        store.put(random_keys(100), [filled(1, 10)] * 100)
        yield store


def keys_of(cluster, index, num_keys):
    """Returns keys of different slots that the server of that index holds."""
    first, end = 16384 * index // 3, 16384 * (index + 1) // 3
    keys = (os.urandom(32) for _ in range(100 * num_keys))
    by_slot = {key_slot(object_name(key)): key for key in keys}
    return [key for slot, key in by_slot.items() if first <= slot < end][:num_keys]


def give_slots(cluster, keys, giver, taker):
    """Gives slots to the server that imports them; returns once all servers know it.

    A server that does not know the taker's new epoch believes older news of the giver.
    """
    taker_id = cluster.id_of(taker)
    others = [server for index, server in enumerate(cluster.servers) if index not in (giver, taker)]
    for name in map(object_name, keys):
        for server in (cluster.servers[taker], cluster.servers[giver], *others):
            reply = ask(server, "CLUSTER", "SETSLOT", key_slot(name), "NODE", taker_id)
            assert reply == b"OK"

    def epoch(server):
        nodes = map(str.split, ask(server, "CLUSTER", "NODES").decode().splitlines())
        return next(node[6] for node in nodes if node[0] == taker_id)

    def is_owner(server, name):
        reply = ask(server, "EXISTS", name)
        port = reply.port if isinstance(reply, MovedError) else server.port
        return port == cluster.servers[taker].port

    def is_known():
        epochs = {epoch(server) for server in cluster.servers}
        names = [object_name(key) for key in keys]
        owners = (is_owner(server, name) for server in cluster.servers for name in names)
        return len(epochs) == 1 and all(owners)

    await_true(is_known, "slots of the taker")


def test_all_servers_hold_objects(cluster, store):
    keys = random_keys(60)
    values = [as_object(os.urandom(size)) for size in [1000] * 57 + [5_000_000] * 3]
    before = [ask(server, "DBSIZE") for server in cluster.servers]
    store.put(keys, values)
    after = [ask(server, "DBSIZE") for server in cluster.servers]
    assert sum(after) - sum(before) == 60
    assert all(more > less for less, more in zip(before, after, strict=True))
    found = [blank(value.nbytes) for value in values]
    assert store.get_into(keys, found) == [GetStatus.HIT] * 60
    assert found == values
    assert store.contains_prefix(keys) == 60
    assert store.delete(keys) == 60


def test_a_lookup_touches_nothing_after_the_first_missing_key(cluster, store):
    keys = random_keys(30)
    present = keys[:10] + keys[11:]
    store.put(present, [filled(1, 10)] * 29)
    holders = {
        key: next(one for one in cluster.servers if ask(one, "EXISTS", object_name(key)) == 1)
        for key in present
    }
    for key in present:
        ask(holders[key], "PEXPIRE", object_name(key), 60_000)
    assert store.contains_prefix(keys) == 10
    lives_ms = [ask(holders[key], "PTTL", object_name(key)) for key in present]
    assert min(lives_ms[:10]) > 60_000
    assert max(lives_ms[10:]) <= 60_000


@pytest.fixture(params=["ip", "unknown-endpoint", pytest.param("hostname", marks=pytest.mark.slow)])
def endpoints(cluster, request):
    """Makes servers announce addresses, or "?" for lack of a name, or nothing."""
    for server in cluster.servers:
        ask(server, "CONFIG", "SET", "cluster-preferred-endpoint-type", request.param)
    yield request.param
    for server in cluster.servers:
        ask(server, "CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")


def test_objects_are_found_while_their_slot_moves_and_after(cluster, endpoints, store):
    (source, target), (source_id, target_id) = cluster.servers[:2], map(cluster.id_of, (0, 1))
    small, large, late = keys_of(cluster, 0, 3)
    values = {small: filled(1, 1000), large: as_object(os.urandom(9_000_000))}
    store.put(list(values), list(values.values()))
    slots = [key_slot(object_name(key)) for key in (small, large, late)]

    def assert_found():
        for key, value in values.items():
            assert read(store, key, value.nbytes) == value.to_bytes()
        assert store.contains_prefix(list(values)) == len(values)

    for slot in slots:
        ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    assert_found()
    for key in list(values):
        ask(source, "MIGRATE", "127.0.0.1", target.port, object_name(key), 0, 5000)
        assert ask(target, "CLUSTER", "COUNTKEYSINSLOT", key_slot(object_name(key))) == 1
    assert_found()
    values[late] = filled(3, 1000)
    store.put([late], [values[late]])
    assert_found()
    give_slots(cluster, list(values), giver=0, taker=1)
    assert_found()
    assert store.delete(list(values)) == 3
    for slot in slots:  # back, as `keys_of` of later tests may draw a key of it
        ask(source, "CLUSTER", "SETSLOT", slot, "IMPORTING", target_id)
    give_slots(cluster, list(values), giver=1, taker=0)


def test_calls_to_a_stopped_server_fail_in_time_and_succeed_once_it_continues(
    cluster, short_timeout_store
):
    here, there = keys_of(cluster, 0, 5), keys_of(cluster, 1, 5)
    short_timeout_store.put(here + there, [filled(1, 100)] * 10)
    cluster.servers[0].pause()
    for call in (
        lambda: short_timeout_store.contains_prefix(here),
        lambda: short_timeout_store.put(here, [filled(2, 1_000_000)] * 5),
        lambda: read(short_timeout_store, here[0], 100),
        lambda: short_timeout_store.delete(here),
    ):
        started_s = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            call()
        assert time.monotonic() - started_s < _TIMEOUT_S + _SLACK_S
    await_true(lambda: is_held(short_timeout_store, there, 5), "the other servers answer")
    cluster.servers[0].resume()
    await_true(lambda: is_held(short_timeout_store, here, 5), "the server answers again")


def test_no_call_waits_for_a_server_that_is_probed_beside_the_calls(cluster, short_timeout_store):
    store, server, keys = short_timeout_store, cluster.servers[0], keys_of(cluster, 0, 2)
    store.put(keys, [filled(1, 100)] * 2)
    assert store.probe_servers() is None
    server.pause()
    with pytest.raises(StoreUnavailableError):
        store.contains_prefix(keys)
    assert [str(server.port) in text for text in store.failing_servers] == [True]
    ends_at, waited_s = time.monotonic() + 1.5, 0.0  # the first probe is due within a second
    while time.monotonic() < ends_at:
        work, began_at = ThreadTime(), time.monotonic()
        with pytest.raises(StoreUnavailableError):
            store.contains_prefix(keys)
        waited_s = max(waited_s, time.monotonic() - began_at - work.busy_s())
        time.sleep(0.01)
    assert waited_s < _TIMEOUT_S / 2
    server.resume()
    await_true(lambda: store.probe_servers() is None, "the server answers a probe")
    assert is_held(store, keys, 2)
    assert not store.failing_servers


def test_a_dead_server_takes_only_its_own_objects_away(cluster, short_timeout_store, caplog):
    """Blocks before the first one on the dead server are found; the others are read and written."""
    store, server = short_timeout_store, cluster.servers[0]
    alive, dead = [*keys_of(cluster, 1, 4), *keys_of(cluster, 2, 4)], keys_of(cluster, 0, 4)
    store.put(alive + dead, [filled(1, 1000)] * 12)
    prefix = [*alive[2:6], dead[0], *alive[:2]]
    late = [*keys_of(cluster, 1, 1), *keys_of(cluster, 0, 1), *keys_of(cluster, 2, 1)]
    for stop in (server.pause, server.kill):
        stop()
        for _ in range(2):
            assert store.contains_prefix(prefix) == 4
            statuses = store.get_into(prefix, [blank(1000) for _ in prefix])
            assert statuses == [GetStatus.HIT] * 4 + [GetStatus.MISSING] + [GetStatus.HIT] * 2
            with pytest.raises(PartlyUnavailableError, match=str(server.port)):
                store.put(late, [filled(1, 5_000_000)] * 3)
            assert is_held(store, late[::2], 2), "the other servers are written"
            with pytest.raises(PartlyUnavailableError):
                store.contains_prefix(dead)
            store.delete(late[::2])
    lines = [record.message for record in caplog.records]
    assert len(lines) <= 2, "an outage is logged once"
    assert all(str(server.port) in line for line in lines)
    server.start()
    await_true(lambda: is_held(store, dead, 0), "the server answers again")


def test_the_commands_that_the_page_lists_suffice_for_a_cluster(cluster):
    """A slot that moves needs ASKING besides."""
    for server in cluster.servers:
        ask(server, "ACL", "SETUSER", "baton", "on", ">secret", *acl_rules("Workers"))
    (key,) = keys_of(cluster, 0, 1)
    slot, ids = key_slot(object_name(key)), [cluster.id_of(index) for index in (0, 1)]
    ask(cluster.servers[1], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    ask(cluster.servers[0], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
    url = cluster.url.replace("//", "//baton:secret@")
    with closing(open_store(f"{url}?timeout_s=10")) as store:
        keys = [key, *random_keys(6)]
        sizes = [1000] * 6 + [5_000_000]
        store.put(keys, [filled(1, size) for size in sizes])
        assert store.contains_prefix(keys) == 7
        assert store.get_into(keys, [blank(size) for size in sizes]) == [GetStatus.HIT] * 7
        assert store.delete(keys) == 7
        assert store.identity()
    for server in cluster.servers:
        ask(server, "CLUSTER", "SETSLOT", slot, "STABLE")


@pytest.mark.slow
def test_doctor_tries_each_server_and_names_the_one_that_is_dead(cluster):
    url = f"{cluster.url}?timeout_s={_TIMEOUT_S}"
    before = [ask(server, "DBSIZE") for server in cluster.servers]
    (works,) = check_store(f"{cluster.url}?timeout_s=10")
    assert works.level is Level.OK
    assert "on each of 3 servers" in works.text
    assert [ask(server, "DBSIZE") for server in cluster.servers] == before
    cluster.servers[0].pause()
    (problem,) = check_store(url)
    cluster.servers[0].resume()
    assert problem.level is Level.PROBLEM
    assert f"127.0.0.1:{cluster.servers[0].port}: does not answer" in problem.text


def test_a_breaker_of_the_connector_stays_closed_while_one_server_is_dead(
    cluster, short_timeout_store
):
    worker = StoreConnectorWorker(short_timeout_store)
    dead, alive = keys_of(cluster, 0, 1), keys_of(cluster, 1, 1)
    short_timeout_store.put(alive, [filled(1, 100)])
    cluster.servers[0].pause()
    try:
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                worker.num_held(dead)
            assert worker.num_held(alive) == 1
    finally:
        cluster.servers[0].resume()
        worker.close()


def test_a_store_opens_while_one_server_is_stopped(cluster):
    cluster.servers[0].pause()
    with closing(open_store(f"{cluster.url}?timeout_s={_TIMEOUT_S}")) as store:
        await_true(lambda: is_held(store, keys_of(cluster, 1, 5), 0), "the other servers answer")
    cluster.servers[0].resume()
    with closing(open_store(f"{cluster.url}?timeout_s={_TIMEOUT_S}")) as store:
        await_true(lambda: is_held(store, keys_of(cluster, 0, 5), 0), "the server answers again")


def test_a_killed_server_that_returns_is_empty_and_works(cluster, short_timeout_store):
    keys = keys_of(cluster, 2, 5)
    short_timeout_store.put(keys, [filled(1, 100)] * 5)
    cluster.servers[2].kill()
    with pytest.raises(StoreUnavailableError):
        short_timeout_store.contains_prefix(keys)
    cluster.servers[2].start()
    await_true(lambda: is_held(short_timeout_store, keys, 0), "the server answers again")
    short_timeout_store.put(keys, [filled(2, 100)] * 5)
    assert read(short_timeout_store, keys[0], 100) == filled(2, 100).to_bytes()


@pytest.mark.slow
def test_the_store_follows_a_failover(tmp_path):
    """The former primary stays up and redirects calls."""
    with (
        running_cluster(tmp_path, num_replicas=1) as cluster,
        closing(open_store(f"{cluster.url}?timeout_s=10")) as store,
    ):
        keys = keys_of(cluster, 0, 20)
        store.put(keys, [filled(1, 100)] * 20)
        assert ask(cluster.servers[0], "WAIT", 1, 10_000) >= 0
        assert ask(cluster.servers[3], "CLUSTER", "FAILOVER") == b"OK"
        # The new primary knows of its promotion a moment before the former one does.
        await_true(lambda: ask(cluster.servers[0], "ROLE")[0] == b"slave", "a new primary")
        assert ask(cluster.servers[3], "ROLE")[0] == b"master"
        assert store.contains_prefix(keys) == 20
        num_redirected = ask(cluster.servers[0], "INFO", "errorstats")["errorstat_MOVED"]
        assert read(store, keys[0], 100) == filled(1, 100).to_bytes()
        assert store.delete(keys) == 20
        assert ask(cluster.servers[0], "INFO", "errorstats")["errorstat_MOVED"] == num_redirected


def test_a_url_of_the_other_kind_of_deployment_is_refused(cluster):
    with (
        running_redis_server() as server,
        closing(open_store(server.url.replace("://", "+cluster://"))) as store,
        pytest.raises(StoreUnavailableError, match="cluster support disabled"),
    ):
        store.contains_prefix(random_keys(1))
    url = f"redis://127.0.0.1:{cluster.servers[0].port}"
    with (
        closing(open_store(url)) as store,
        pytest.raises(StoreUnavailableError, match=r"redis\+cluster://"),
    ):
        store.put(keys_of(cluster, 1, 1), [filled(1, 100)])


def is_held(store, keys, num_present):
    """Returns whether the keys' servers answer that they hold that many of them."""
    try:
        return store.contains_prefix(keys) == num_present
    except StoreUnavailableError:
        return False
