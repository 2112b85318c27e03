"""`RedisUrl`: the servers that a Redis URL names, and how to reach them.

    redis[s]://[user:password@]host[:port][/database]
    redis[s]+sentinel://[user:password@]host[:port],.../service[/database]
    redis[s]+cluster://[user:password@]host[:port],...

`rediss` uses TLS for all servers. User and password are percent-encoded and are
those of the servers; sentinels have options of their own. Either password can be
in a file. Files that a URL names are opened when the store connects, so that one
that is absent now makes the store unavailable and does not end a start.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from kvstore.url import DEFAULT_TIMEOUT_S, DEFAULT_TTL_S, StoreUrl

__all__ = ["Address", "RedisUrl"]

Address = tuple[str, int]
"""Host and port."""


_TLS_FILES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
_SENTINEL_LOGIN = {"sentinel_user": "username", "sentinel_password": "password"}
_SENTINEL_OPTIONS = (*_SENTINEL_LOGIN, "sentinel_password_file")
_COMMON_OPTIONS = ("ttl_s", "timeout_s", "max_connections", "password_file")
_REFUSED_OPTIONS = {
    "max_bytes": "max_bytes is the server's to keep: start it with --maxmemory SIZE "
    "--maxmemory-policy allkeys-lru",
    "db": "the database is the last part of the path",
    "username": "the user is written before the host",
    "password": "the password is written before the host, or in a password_file",
    "ssl_cert_reqs": "certificates are always checked; ca_file names the authority of your own",
}
_DEFAULT_PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}
_DEFAULT_CONNECTIONS, _MAX_CONNECTIONS = 16, 1024
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed Redis URL.

    Attributes:
        topology: empty for one server, else `sentinel` or `cluster`.
        addresses: of the server, of the sentinels, or of some of the cluster's servers.
        service: the sentinels' name for the master; empty without sentinels.
        database: number of the database; 0 in a cluster.
        login: redis-py's `username` and `password` for the servers.
        password_file: file with their password; empty if the URL has none.
        sentinel_login: as `login`, for the sentinels.
        sentinel_password_file: as `password_file`, for the sentinels.
        tls: files for `redis.SSLConnection`; None without TLS.
        max_connections: most concurrent calls, and connections to one server.
        timeout_s: longest time of a call.
        ttl_s: seconds that an object lives from its last touch.
    """

    topology: str
    addresses: tuple[Address, ...]
    service: str
    database: int
    login: Mapping[str, str]
    password_file: str
    sentinel_login: Mapping[str, str]
    sentinel_password_file: str
    tls: Mapping[str, str] | None
    max_connections: int
    timeout_s: float
    ttl_s: float

    @classmethod
    def parse(cls, url: str) -> "RedisUrl":
        """Parses a URL whose scheme is one of the above.

        Raises:
            ConfigurationError: the host is missing, or a port, the path or an option is wrong.
        """
        parts = StoreUrl.parse(url, *_known_options(url.partition("://")[0].lower()))
        security, _, topology = parts.scheme.partition("+")
        service, database = _service_and_database(parts, topology)
        return cls(
            topology=topology,
            addresses=_addresses(parts, topology),
            service=service,
            database=database,
            login=_login(parts),
            password_file=parts.options.get("password_file", ""),
            sentinel_login=_sentinel_login(parts),
            sentinel_password_file=parts.options.get("sentinel_password_file", ""),
            tls=_tls_files(parts) if security == "rediss" else None,
            max_connections=_max_connections(parts),
            timeout_s=parts.seconds("timeout_s", DEFAULT_TIMEOUT_S),
            ttl_s=parts.seconds("ttl_s", DEFAULT_TTL_S),
        )


def _known_options(scheme: str) -> tuple[set[str], dict[str, str]]:
    """Returns the options that a scheme takes, and those that it refuses with a reason."""
    security, _, topology = scheme.partition("+")
    known, refused = set(_COMMON_OPTIONS), dict(_REFUSED_OPTIONS)
    if security == "rediss":
        known.update(_TLS_FILES)
    else:
        refused.update({name: f"{name} is for TLS: write rediss://" for name in _TLS_FILES})
    if topology == "sentinel":
        known.update(_SENTINEL_OPTIONS)
    return known, refused


def _addresses(parts: StoreUrl, topology: str) -> tuple[Address, ...]:
    texts = parts.authority.rpartition("@")[2].split(",")
    if len(texts) > 1 and not topology:
        raise parts.error("one host; several are for redis+sentinel:// and redis+cluster://")
    return tuple(_address(parts, text, _DEFAULT_PORTS[topology]) for text in texts)


def _address(parts: StoreUrl, text: str, default_port: int) -> Address:
    match = _ADDRESS.fullmatch(text)
    port = int(match[2] or default_port) if match else 0
    if match is None or not 0 < port < 1 << 16:
        raise parts.error(f"{text!r} is neither host nor host:port")
    return match[1].strip("[]"), port


def _login(parts: StoreUrl) -> dict[str, str]:
    """Returns only what the URL has, because a server without a password refuses a log-in."""
    user, _, password = parts.authority.rpartition("@")[0].partition(":")
    if password and "password_file" in parts.options:
        raise parts.error("the password is written before the host or in password_file, not both")
    login = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in login.items() if value}


def _sentinel_login(parts: StoreUrl) -> dict[str, str]:
    if {"sentinel_password", "sentinel_password_file"} <= parts.options.keys():
        raise parts.error("write sentinel_password or sentinel_password_file, not both")
    return _given(parts, _SENTINEL_LOGIN)


def _service_and_database(parts: StoreUrl, topology: str) -> tuple[str, int]:
    first, _, rest = parts.path.removeprefix("/").partition("/")
    service, database = (first, rest) if topology == "sentinel" else ("", parts.path[1:])
    if topology == "sentinel" and not service:
        raise parts.error(f"write {parts.scheme}://host:port,host:port/service/database")
    if topology == "cluster" and database not in ("", "0"):
        raise parts.error("a cluster has no databases: leave the path out")
    if not (database or "0").isdecimal():
        raise parts.error(f"{database!r} is no number of a database")
    return service, int(database or 0)


def _tls_files(parts: StoreUrl) -> dict[str, str]:
    if ("cert_file" in parts.options) != ("key_file" in parts.options):
        raise parts.error("cert_file and key_file go together")
    return _given(parts, _TLS_FILES)


def _given(parts: StoreUrl, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the options that the URL has, under redis-py's names."""
    return {theirs: parts.options[ours] for ours, theirs in names.items() if ours in parts.options}


def _max_connections(parts: StoreUrl) -> int:
    text = parts.options.get("max_connections", str(_DEFAULT_CONNECTIONS))
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_CONNECTIONS:
        raise parts.error(f"max_connections is {text!r}; it must be 1 to {_MAX_CONNECTIONS}")
    return int(text)
