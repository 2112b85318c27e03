"""No error about a connector's URL repeats a password, wherever that stands in it."""

import pytest

from baton.common.errors import ConfigurationError
from baton.doctor import connectors
from kvstore.registry import connector_capabilities, open_connector
from kvstore.stores.redis.url import RedisUrl
from kvstore.url import printable_url

PASSWORDS = [
    "se/cret",
    "se#cret",
    "se?cret",
    "se?cr=et",
    "se[cret",
    "se]cret",
    "se@cret",
    "se:cret",
]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://user:secret@host:1/0?ttl_s=3", "redis://host:1/0"),
        ("rediss+sentinel://a,b/s?sentinel_password=secret", "rediss+sentinel://a,b/s"),
        ("redis://h/0?password=s@t", "redis://..."),
        ("redis://:se/cret@host/0", "redis://host/0"),
        ("redis://:se@cret@host/0", "redis://host/0"),
        ("redis://:se#cret@host/0", "redis://..."),
        ("file:///a@b/c?max_bytes=1", "file:///a@b/c"),
        ("shm://name", "shm://name"),
        ("grpc://", "grpc://"),
        ("multi://grpc://h,redis://:secret@a", "multi://grpc://h,redis://a"),
        ("faulty+redis://:secret@a/0", "faulty+redis://a/0"),
        ("redis:/:secret@host", "..."),
        ("secret", "..."),
        ("redis:secret@a,shm://x", "..."),
        ("redis://:secret", "redis://..."),
        ("redis://user:123456", "redis://..."),
        ("redis://user:5secret/0", "redis://..."),
        ("redis://user:12:secret@[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis+sentinel://[fd00::1]:1,b:2/s", "redis+sentinel://[fd00::1]:1,b:2/s"),
        ("file:///a:b/c", "file:///a:b/c"),
        ("file:///a,redis://:secret@host/0", "file://host/0"),
        ("redis:///user:secret@host", "redis://host"),
        ("faulty+multi:///a,redis://:secret@host", "faulty+multi://host"),
    ],
)
def test_users_passwords_and_options_are_not_shown(url, shown):
    assert printable_url(url) == shown


def malformed_urls(password):
    yield f"redis://:{password}@127.0.0.1:1/0"
    yield f"redis://user:{password}@127.0.0.1:1/0?nonsense=1"
    yield f"redis+sentinel://127.0.0.1:1/name?sentinel_password={password}"
    yield f"redis+sentinel://:{password}@127.0.0.1:1/name/0"
    yield f"redis://127.0.0.1:1/0?password={password}"
    yield f"multi://grpc://,redis://:{password}@127.0.0.1:1/x"
    yield f"redis:/:{password}@127.0.0.1:1/0"
    yield f"nonsense://:{password}@127.0.0.1:1/0"
    yield f"redis:{password}@127.0.0.1,shm://x"
    yield f":{password}@127.0.0.1:1/0"
    yield f"grpc://user:{password}@127.0.0.1"
    if "@" in password:  # what is behind it looks like a host
        return
    # The host was forgotten.
    yield f"redis://:{password}"
    yield f"redis+cluster://a,user:{password}"
    yield f"multi://grpc://,redis+sentinel://:{password}"
    yield f"grpc://user:{password}"
    yield f"memory://:{password}/"
    yield f"shm://:{password}"


def error_of(use, url):
    """Returns the message of an error, or an empty one."""
    try:
        opened = use(url)
    except ConfigurationError as error:
        return error.message
    if use is open_connector:
        _, worker = opened
        worker.close()
    return ""


@pytest.mark.parametrize("password", PASSWORDS)
@pytest.mark.parametrize("use", [connector_capabilities, open_connector])
def test_no_error_repeats_a_part_of_a_password(use, password):
    for url in malformed_urls(password):
        message = error_of(use, url)
        assert "cret" not in message
        assert "'se" not in message


@pytest.mark.parametrize("password", PASSWORDS)
def test_the_doctor_repeats_no_part_of_a_password(password):
    for url in malformed_urls(password):
        for finding in connectors.check_connector(url):
            text = finding.text + str(finding.facts)
            assert "cret" not in text
            assert "'se" not in text


@pytest.mark.parametrize(
    "url",
    [
        "file:///a#b",
        "shm://a#b",
        "memory://a?ttl_s=3#b",
        "redis+sentinel://a/s?sentinel_password=b#c",
        "rediss://a/0#b",
        "grpc://a:1#b",
        "nixl://#b",
        "multi://grpc://#b,shm://a",
        "faulty+memory://a#b",
    ],
)
def test_a_fragment_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"malformed: .*percent-encoded"):
        open_connector(url)


@pytest.mark.parametrize("password", ["se/cret", "se#cret", "se?cret", "se?cr=et", "se[cret"])
def test_a_password_that_must_be_encoded_is_refused_with_how_to_write_it(password):
    with pytest.raises(ConfigurationError, match=r"percent-encoded.*password_file"):
        RedisUrl.parse(f"redis://:{password}@127.0.0.1:1/0")


def test_encoded_passwords_are_decoded():
    assert RedisUrl.parse("redis://:se%2Fc%23r%3Fe%5Bt@h/0").login == {"password": "se/c#r?e[t"}
