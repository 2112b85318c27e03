"""Opening stores by URL: schemes, options, and messages that keep secrets."""

import pytest

from baton.errors import ConfigurationError
from kvstore.registry import open_store
from kvstore.stores.memory import MemoryStore
from kvstore.stores.url import StoreUrl


def test_an_unknown_scheme_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"'floppy'.*file://.*memory://.*redis://.*shm://"):
        open_store("floppy://a")


@pytest.mark.parametrize("url", ["", "memory", "memory:x", "://x", "redis:/user:hunter2@host"])
def test_what_is_no_url_is_refused_without_repeating_it(url):
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
def test_a_bad_url_is_refused_without_telling_the_password(url):
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
        ("redis://", "host"),
        ("redis://host/0?max_bytes=1GiB", "max_bytes is the server's to keep"),
        ("redis://host/0?ttl=1", "'ttl'; it takes max_connections, timeout_s, ttl_s"),
        ("redis://host/1/2", "database"),
    ],
)
def test_a_bad_url_says_what_to_write(url, message):
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert message in caught.value.message


def test_options_are_read_with_their_units():
    url = StoreUrl.parse("x://h/p%20q?ttl_s=1.5&max_bytes=2MiB", ("ttl_s", "max_bytes"))
    assert (url.scheme, url.authority, url.path) == ("x", "h", "/p q")
    assert (url.seconds("ttl_s", 1), url.num_bytes("max_bytes")) == (1.5, 2 << 20)
    assert (url.seconds("timeout_s", 2), url.num_bytes("other")) == (2, None)


def test_a_memory_name_has_one_set_of_options_and_lives_as_long_as_its_users():
    first = open_store("memory://unit?max_bytes=1MiB")
    second = open_store("memory://unit?max_bytes=1MiB")
    with pytest.raises(ConfigurationError, match="max_bytes=1048576"):
        open_store("memory://unit")
    first.put_many([b"k" * 32], [memoryview(b"value")])
    first.close()
    first.close()
    assert second.contains_prefix([b"k" * 32]) == 1
    second.close()
    third = open_store("memory://unit")
    assert third.contains_prefix([b"k" * 32]) == 0
    third.close()
