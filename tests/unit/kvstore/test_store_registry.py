"""Opening stores and connectors by URL: schemes, options, and errors without secrets."""

import importlib
from importlib.metadata import EntryPoint

import pytest

from baton.common.errors import ConfigurationError
from kvstore import registry
from kvstore.conformance.objects import as_object
from kvstore.connector import ConnectorCapabilities, null_connector
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities, open_connector, open_store
from kvstore.stores.memory import MemoryStore
from kvstore.url import StoreUrl


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'floppy'.*file://.*memory://.*redis://.*shm://"):
        open_store("floppy://a")


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "://x", "redis:/user:hunter2@host"])
def test_an_invalid_store_url_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert "hunter2" not in caught.value.message


def test_the_scheme_may_be_in_capitals():
    store = open_store("MEMORY://capitals")
    store.close()
    assert isinstance(store, MemoryStore)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host:port/0",
        "redis://user:hunter2@host:99999/0",
        "redis://user:hunter2@host/zero",
        "redis://user:hunter2@/0",
        "redis://user:hunter2@[::1/0",
        "redis://user:hunter2@host/0?no_such_option=1",
        "redis://user:hunter2@host/0?ttl_s=x",
        "redis://user:hunter2@host/0?max_bytes=1GiB",
        "redis://user:hunter2@host/0?ttl_s=1&ttl_s=2",
        "redis://user:hunter2@host/0?ttl_s",
    ],
)
def test_the_error_of_an_invalid_url_does_not_contain_the_password(url):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://a/path", "memory://NAME"),
        ("memory://a?max_byte=1", "'max_byte'; it takes lease_s, max_bytes, timeout_s, ttl_s"),
        ("memory://a?ttl_s=1&ttl_s=2", "repeated"),
        ("memory://a?ttl_s", "malformed"),
        ("file://relative/path", "file:///absolute/path"),
        ("file:///", "file:///absolute/path"),
        ("shm://../etc", "shm://NAME"),
        ("shm://a/b", "shm://NAME"),
        ("shm://a%2Fb", "shm://NAME"),
        ("shm://" + 300 * "x", "shm://NAME, the name of up to 200 letters"),
        ("file:///a%00b", "null character"),
        ("redis://", "host"),
        ("redis://host/0?max_bytes=1GiB", "max_bytes is the server's to keep"),
        (
            "redis://host/0?ttl=1",
            "'ttl'; it takes max_connections, password_file, timeout_s, ttl_s",
        ),
        ("redis://host/1/2", "database"),
    ],
)
def test_the_error_of_an_invalid_url_shows_the_valid_form(url, message):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert message in caught.value.message


def test_options_are_read_with_their_units():
    url = StoreUrl.parse("x://h/p%20q?ttl_s=1.5&max_bytes=2MiB", ("ttl_s", "max_bytes"))
    assert (url.scheme, url.authority, url.path) == ("x", "h", "/p q")
    assert (url.seconds("ttl_s", 1), url.num_bytes("max_bytes")) == (1.5, 2 << 20)
    assert (url.seconds("timeout_s", 2), url.num_bytes("other")) == (2, None)


def test_a_memory_store_has_one_set_of_options_and_lives_until_its_last_user_closes_it():
    first = open_store("memory://unit?max_bytes=1MiB")
    second = open_store("memory://unit?max_bytes=1MiB")
    with pytest.raises(ConfigurationError, match="max_bytes=1048576"):
        open_store("memory://unit")
    first.put([b"k" * 32], [as_object(b"value")])
    first.close()
    first.close()
    assert second.contains_prefix([b"k" * 32]) == 1
    second.close()
    third = open_store("memory://unit")
    assert third.contains_prefix([b"k" * 32]) == 0
    third.close()


def test_an_unknown_connector_lists_the_known_ones():
    known = r"'floppy'.*file://.*grpc://.*memory://.*multi://.*nixl://.*redis://.*shm://"
    for url in ("floppy://a", "faulty+floppy://a", "multi://memory://a,floppy://b"):
        with pytest.raises(ConfigurationError, match=known):
            open_connector(url)


@pytest.mark.parametrize("url", ["", "memory", "redis:/user:hunter2@host", "faulty+"])
def test_an_invalid_connector_url_is_refused_without_repeating_it(url):
    with pytest.raises(ConfigurationError, match="begins with one of") as caught:
        open_connector(url)
    assert "hunter2" not in caught.value.message


def test_capabilities_are_known_without_opening_the_connector():
    assert connector_capabilities("memory://x?nonsense=1").shared_between_processes is False
    for url in ("grpc://", "nixl://", "faulty+grpc://"):
        peer = connector_capabilities(url)
        assert (peer.lends_blocks, peer.finds_by_key) == (True, False)
    assert connector_capabilities("faulty+shm://x") == connector_capabilities("shm://x")


@pytest.mark.parametrize("url", ["grpc://", "multi://grpc://,memory://a"])
def test_peers_learn_their_rank(url, monkeypatch):
    ranks = []
    monkeypatch.setattr(
        "kvstore.peer.worker.open_peer_connector",
        lambda url, security, rank: ranks.append(rank) or null_connector(),
    )
    _, worker = open_connector(url, None, 2)
    worker.close()
    assert ranks == [2]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (None, ""),
        ("memory://x", "memory"),
        ("FAULTY+Redis://h?faults=drop:1", "redis"),
        ("multi://nixl://?lease_s=3,rediss://a:1/0?ttl_s=9", "multi(nixl,redis)"),
        ("multi://redis+cluster://h1:1,h2:2,faulty+grpc://", "multi(redis,grpc)"),
    ],
)
def test_the_name_of_a_connector_omits_its_address_and_options(url, name):
    assert connector_name(url) == name


class _ThirdPartyConnector:
    capabilities = ConnectorCapabilities(True, True)

    @staticmethod
    def open(url):
        return ("scheduler", "worker", url)


def test_the_connector_of_a_third_party_is_found_by_its_entry_point(monkeypatch):
    value = f"{__name__}:_ThirdPartyConnector"
    broken = {"absent": "no_such_module:X", "wrong": "kvstore.layout:KvLayout"}
    points = [
        EntryPoint(name, value, "baton.kv_connectors")
        for name, value in {"mine": value, "memory": value, **broken}.items()
    ]

    def fake_entry_points(*, group, name=None):
        return [each for each in points if group == each.group and name in (None, each.name)]

    monkeypatch.setattr(registry, "entry_points", fake_entry_points)
    monkeypatch.setattr(EntryPoint, "load", _load)

    assert open_connector("mine://a") == ("scheduler", "worker", "mine://a")
    assert connector_capabilities("mine://a") is _ThirdPartyConnector.capabilities
    assert connector_capabilities("memory://a").shared_between_hosts is False, (
        "a built-in scheme cannot be replaced"
    )
    with pytest.raises(ConfigurationError, match="no_such_module"):
        open_connector("absent://a")
    with pytest.raises(ConfigurationError, match="needs `capabilities` and `open`"):
        open_connector("wrong://a")
    with pytest.raises(ConfigurationError, match="mine://"):
        open_connector("floppy://a")


def _load(point):
    """Loads an entry point like `EntryPoint.load`, but does not import this module again."""
    module, _, attribute = point.value.partition(":")
    if module == __name__:
        return globals()[attribute]
    return getattr(importlib.import_module(module), attribute)
