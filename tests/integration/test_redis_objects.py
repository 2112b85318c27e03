"""How objects are stored in a Redis server: large ones in parts, all of which must be present."""

import os
from contextlib import closing

import pytest
from redis import Redis, ResponseError

from kvstore.conformance.objects import as_object, blank, filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import GetStatus, StoreUnavailableError
from kvstore.stores.redis.cluster import open_servers
from kvstore.stores.redis.connection import CallDeadline
from kvstore.stores.redis.objects import StagedObject, get_status, object_name
from kvstore.stores.redis.pipeline import run_commands
from kvstore.stores.redis.url import RedisUrl
from tests.support.redis_server import running_redis_server

_LARGE_BYTES = 9_000_001  # three parts
_MAX_VALUE_BYTES = 4 << 20


@pytest.fixture
def store(redis_server):
    with closing(open_store(f"{redis_server.url}?timeout_s=30")) as store:
        yield store


@pytest.fixture
def client(redis_server):
    with Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def large(store):
    """Returns the key and the bytes of a large object that the store holds."""
    (key,) = random_keys(1)
    value = os.urandom(_LARGE_BYTES)
    store.put([key], [as_object(value)])
    return key, value


@pytest.fixture
def run(redis_server):
    """Yields a function that sends commands as a store does, which may die after any of them."""
    url, deadline = RedisUrl.parse(redis_server.url), CallDeadline()
    with closing(open_servers(url, deadline)) as servers, deadline.within(30):
        yield lambda commands: run_commands(servers, commands)


@pytest.mark.parametrize(
    ("num_bytes", "num_parts"),
    [(_MAX_VALUE_BYTES + 1, 2), (2 * _MAX_VALUE_BYTES, 2), (2 * _MAX_VALUE_BYTES + 1, 3)],
)
def test_a_large_object_is_equal_parts_under_one_key(store, client, num_bytes, num_parts):
    (key,) = random_keys(1)
    value = os.urandom(num_bytes)
    store.put([key], [as_object(value)])
    assert client.keys() == [object_name(key)]
    sizes = [client.hstrlen(object_name(key), index) for index in range(num_parts)]
    assert client.hlen(object_name(key)) == num_parts + 1
    assert sum(sizes) == num_bytes
    assert max(sizes) - min(sizes) < num_parts
    assert read(store, key, num_bytes) == value


def test_an_object_of_one_value_is_a_string(store, client):
    (key,) = random_keys(1)
    store.put([key], [filled(1, _MAX_VALUE_BYTES)])
    assert client.strlen(object_name(key)) == _MAX_VALUE_BYTES
    assert read(store, key, _MAX_VALUE_BYTES) == filled(1, _MAX_VALUE_BYTES).to_bytes()


def test_small_and_large_objects_share_a_batch(store):
    sizes = [100, _LARGE_BYTES, 5_000_000, 7, 4_200_000]
    keys, values = random_keys(5), [as_object(os.urandom(size)) for size in sizes]
    store.put(keys, values)
    found = [blank(size) for size in sizes]
    assert store.contains_prefix(keys) == 5
    assert store.get_into(keys, found) == [GetStatus.HIT] * 5
    assert found == values
    assert store.delete(keys) == 5


@pytest.mark.parametrize("field", ["head", 0, 2])
def test_an_object_that_lost_a_part_is_missing(store, client, large, field):
    key, _ = large
    client.hdel(object_name(key), field)
    assert read(store, key, _LARGE_BYTES) is GetStatus.MISSING


@pytest.mark.parametrize("num_bytes", [100, 5_000_000, _LARGE_BYTES - 1, _LARGE_BYTES + 1])
def test_a_large_object_read_with_another_size_has_the_wrong_size(store, large, num_bytes):
    assert read(store, large[0], num_bytes) is GetStatus.WRONG_SIZE


def test_a_small_object_read_as_a_large_one_has_the_wrong_size(store):
    (key,) = random_keys(1)
    store.put([key], [filled(1, 100)])
    assert read(store, key, _LARGE_BYTES) is GetStatus.WRONG_SIZE
    assert read(store, key, 100) == filled(1, 100).to_bytes()


def test_parts_of_two_objects_are_never_mixed():
    """A read gets these replies if its object is deleted and put again between its commands."""
    size = _LARGE_BYTES.to_bytes(8, "little")
    parts = [3_000_001, 3_000_001, 2_999_999]
    buffer = blank(_LARGE_BYTES)
    before, after = size + b"a" * 16, size + b"b" * 16
    assert get_status(buffer, [1, before, *parts, before]) is GetStatus.HIT
    assert get_status(buffer, [1, before, *parts, after]) is GetStatus.MISSING
    assert get_status(buffer, [1, before, *parts, None]) is GetStatus.MISSING
    assert get_status(buffer, [0, None, *parts, after]) is GetStatus.MISSING


def test_the_first_writer_of_a_large_object_wins(run, store, client, large):
    key, value = large
    late = StagedObject(object_name(key), filled(1, _LARGE_BYTES))
    run(late.put_commands(60_000))
    client.pexpire(object_name(key), 30_000)
    assert run(late.commit_commands(3_600_000)) == [0, 1, 1]
    assert read(store, key, _LARGE_BYTES) == value
    assert client.keys() == [object_name(key)]
    assert client.pttl(object_name(key)) > 3_500_000, "the late put did not touch the object"


def test_parts_of_a_writer_that_dies_are_invisible_and_expire(run, store, client):
    (key,) = random_keys(1)
    staged = StagedObject(object_name(key), filled(1, _LARGE_BYTES))
    for num_sent in range(1, 9):
        run(list(staged.put_commands(60_000))[:num_sent])
        assert store.contains_prefix([key]) == 0
        assert read(store, key, _LARGE_BYTES) is GetStatus.MISSING
    (name,) = client.keys()
    assert 0 < client.pttl(name) <= 60_000


def test_a_commit_after_parts_were_evicted_makes_no_object(run, store, client):
    (key,) = random_keys(1)
    staged = StagedObject(object_name(key), filled(1, _LARGE_BYTES))
    first, second = list(staged.put_commands(60_000))[:4], list(staged.put_commands(60_000))[4:]
    run(first)
    client.flushall()
    assert not staged.is_whole(run(second)[-1])
    client.flushall()
    refusal, *others = run(staged.commit_commands(60_000))
    assert isinstance(refusal, ResponseError), "nothing was there to rename"
    assert others == [0, 0]
    assert client.keys() == []
    assert read(store, key, _LARGE_BYTES) is GetStatus.MISSING


def test_a_large_object_is_touched_as_a_whole(store, client, large):
    key, value = large
    touches = [
        lambda: store.put([key], [as_object(value)]),
        lambda: store.contains_prefix([key]),
        lambda: read(store, key, _LARGE_BYTES),
    ]
    for touch in touches:
        client.pexpire(object_name(key), 60_000)
        touch()
        assert client.pttl(object_name(key)) > 3_500_000


def test_a_full_server_keeps_no_partial_object():
    with (
        running_redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server,
        closing(open_store(f"{server.url}?timeout_s=30")) as store,
    ):
        (key,) = random_keys(1)
        with pytest.raises(StoreUnavailableError, match="maxmemory"):
            store.put([key], [filled(1, _LARGE_BYTES)])
        assert store.contains_prefix([key]) == 0
        assert read(store, key, _LARGE_BYTES) is GetStatus.MISSING
