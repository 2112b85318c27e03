"""Redis URLs: addresses, logins, options, refusals."""

import pytest
from redis import RedisError

from baton.common.errors import ConfigurationError
from kvstore.handoff import connector_name
from kvstore.registry import open_store
from kvstore.stores.redis.url import RedisUrl, login_settings

_PASSWORD = "hunter2"


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("redis://host", [("host", 6379)]),
        ("redis://user:p@host:7000/3", [("host", 7000)]),
        ("redis://[::1]:7000", [("::1", 7000)]),
        ("redis://[::1]", [("::1", 6379)]),
        ("redis+sentinel://a,b:1/kv", [("a", 26379), ("b", 1)]),
        ("redis+cluster://a:1,b:2,c:3", [("a", 1), ("b", 2), ("c", 3)]),
    ],
)
def test_addresses_are_read(url, addresses):
    assert list(RedisUrl.parse(url).addresses) == addresses


@pytest.mark.parametrize(
    ("login", "expected"),
    [
        ("", {}),
        ("user:p%40ss%2Fw%3Ard@", {"username": "user", "password": "p@ss/w:rd"}),
        (":only@", {"password": "only"}),
        ("us%3Aer:a:b@", {"username": "us:er", "password": "a:b"}),
    ],
)
def test_the_login_is_decoded(login, expected):
    assert RedisUrl.parse(f"redis+cluster://{login}a,b").login == expected


def test_all_options_are_parsed(tmp_path):
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).touch()
    options = (
        "ttl_s=9&timeout_s=0.5&max_connections=3&sentinel_user=s&sentinel_password=%26t"
        f"&ca_file={tmp_path}/ca.pem&cert_file={tmp_path}/cert.pem&key_file={tmp_path}/key.pem"
    )
    url = RedisUrl.parse(f"rediss+sentinel://user:pass@a,b/main/3?{options}")
    assert (url.topology, url.service, url.database) == ("sentinel", "main", 3)
    assert (url.ttl_s, url.timeout_s, url.max_connections) == (9, 0.5, 3)
    assert url.sentinel_login == {"username": "s", "password": "&t"}
    assert url.tls == {
        "ssl_ca_certs": f"{tmp_path}/ca.pem",
        "ssl_certfile": f"{tmp_path}/cert.pem",
        "ssl_keyfile": f"{tmp_path}/key.pem",
    }


@pytest.mark.parametrize("content", [None, b" \n", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_now_makes_the_store_unavailable(tmp_path, content):
    """Also without its authority's file, a worker must start, and find the files when they come."""
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    url = RedisUrl.parse(f"rediss://user@a?password_file={file}&ca_file=/no/such/file")
    password = login_settings(url.login, "password_file", url.password_file)["credential_provider"]
    reason = "is empty" if content == b" \n" else "cannot be read"
    with pytest.raises(RedisError, match=rf"password_file is '{file}', which {reason}"):
        password.get_credentials()
    file.write_text("s3cr/t\n")
    assert password.get_credentials() == ("user", "s3cr/t")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:other@a?password_file=/p", "before the host or in password_file, not both"),
        (
            "redis+sentinel://a/kv?sentinel_password=other&sentinel_password_file=/p",
            "sentinel_password or sentinel_password_file, not both",
        ),
    ],
)
def test_two_passwords_are_refused(url, reason):
    with pytest.raises(ConfigurationError, match=reason) as refusal:
        RedisUrl.parse(url)
    assert "other" not in refusal.value.message


def test_only_rediss_uses_tls():
    assert RedisUrl.parse("redis://a").tls is None
    assert RedisUrl.parse("rediss://a").tls == {}
    assert RedisUrl.parse("rediss+cluster://a").tls == {}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://a,b", "redis+cluster://"),
        ("redis://a:0", "'a:0' is neither host nor host:port"),
        ("redis://a:65536", "neither host nor host:port"),
        ("redis://a:", "neither host nor host:port"),
        ("redis://::1", "neither host nor host:port"),
        ("redis+sentinel://a,,b/kv", "'' is neither host nor host:port"),
        ("redis+sentinel://a", "/service/database"),
        ("redis+sentinel://a/kv/zero", "'zero' is no number of a database"),
        ("redis+cluster://a/1", "a cluster has no databases"),
        ("redis://a?max_bytes=1GiB", "max_bytes is the server's to keep"),
        ("redis://a?ca_file=x", "write rediss://"),
        ("redis://a?password=x", "before the host"),
        ("redis://a?db=1", "path"),
        ("redis://a?sentinel_user=x", "unknown option 'sentinel_user'"),
        ("redis://a?max_connections=0", "max_connections is '0'; it must be 1 to 1024"),
        ("redis://a?max_connections=many", "max_connections is 'many'"),
        ("rediss://a?cert_file=/no/such/file", "cert_file and key_file go together"),
        ("rediss://a?ssl_cert_reqs=none", "certificates are always checked"),
    ],
)
def test_the_error_of_an_invalid_url_says_what_to_write_without_the_password(url, message):
    secret = url.replace("://", f"://user:{_PASSWORD}@", 1)
    with pytest.raises(ConfigurationError) as caught:
        open_store(secret)
    assert message in caught.value.message
    assert _PASSWORD not in caught.value.message


def test_all_redis_schemes_have_the_same_connector_name():
    schemes = [
        f"redis{tls}{topology}" for tls in ("", "s") for topology in ("", "+sentinel", "+cluster")
    ]
    assert {connector_name(f"{scheme}://host/kv") for scheme in schemes} == {"redis"}
