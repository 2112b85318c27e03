"""`RedisUrl`: the servers that a Redis URL names, and how to reach them: addresses, credentials.

    redis[s]://[user:password@]host[:port][/database]
    redis[s]+sentinel://[user:password@]host[:port],.../service[/database]
    redis[s]+cluster://[user:password@]host[:port],...

`rediss` uses TLS for all servers. User and password are percent-encoded and are
those of the servers; sentinels have options of their own. Either password can be
in a file. Files that a URL names are opened when the store connects, so that one
that is absent now makes the store unavailable and does not end a start.
"""

import math
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from redis import AuthenticationError, CredentialProvider

from baton.common.errors import ConfigurationError
from baton.common.security.watched_files import WatchedFiles
from kvstore.url import DEFAULT_TIMEOUT_S, DEFAULT_TTL_S, StoreUrl

__all__ = ["Address", "AddressBook", "PasswordFile", "RedisUrl", "login_settings"]

_NEWS_AFTER_S = 60.0
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


class AddressBook:
    """Resolves names, and remembers which of their addresses did not answer.

    A name may have an address that drops what is sent to it, for example an IPv6 address behind a
    firewall. The address that answered is tried first the next time. Thread-safe: each name's
    entry is replaced as a whole.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed_at: dict[str, dict[str, float]] = {}  # by name, then by address

    def addresses_of(self, host: str, port: int) -> list[str]:
        """Returns the numerical addresses of a name, in the order in which to try them.

        Raises:
            OSError: the name cannot be resolved.
        """
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        before = self._failed_at.get(host, {})
        failed_at = {address: before[address] for address in addresses if address in before}
        self._failed_at[host] = failed_at
        return sorted(addresses, key=lambda address: failed_at.get(address, -math.inf))

    def failed(self, host: str, address: str) -> bool:
        """Notes that an address did not answer; returns whether that is news worth a log line."""
        now, before = self._clock(), self._failed_at.get(host, {})
        self._failed_at[host] = before | {address: now}
        return now - before.get(address, -math.inf) > _NEWS_AFTER_S


class PasswordFile(CredentialProvider):  # type: ignore[misc]  # redis-py is untyped
    """Gives each new connection the password that the file holds now.

    Connections that are open keep what they logged in with. A file that cannot be read at first
    makes the store unavailable until it can; later, the last good password stays in use.

    Args:
        user: name of the user; empty for the default one.
        option: name of the URL's option, for errors.
        path: the file.
    """

    def __init__(self, user: str, option: str, path: str) -> None:
        self._user = user
        self._option = option
        self._path = path
        self._watched: WatchedFiles[str] | None = None

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Returns the arguments of AUTH.

        Raises:
            redis.AuthenticationError: the file could not be read yet, or was empty.
        """
        try:
            if self._watched is None:
                self._watched = WatchedFiles((self._path,), self._read, "passwords of redis")
            password = self._watched.current()
        except ConfigurationError as error:
            raise AuthenticationError(error.message) from None
        return (self._user, password) if self._user else (password,)

    def _read(self) -> str:
        """Returns the password.

        Raises:
            ConfigurationError: there is none. The text does not quote the file.
        """
        try:
            password = Path(self._path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            message = f"{self._option} is {self._path!r}, which cannot be read"
            raise ConfigurationError(message) from None
        if not password:
            raise ConfigurationError(f"{self._option} is {self._path!r}, which is empty")
        return password


def login_settings(login: Mapping[str, str], option: str, path: str) -> dict[str, Any]:
    """Returns redis-py's settings for a login.

    Args:
        login: its `username` and `password`, as far as the URL has them.
        option: name of the option for a file with the password.
        path: that file; empty for none.
    """
    if not path:
        return dict(login)
    return {"credential_provider": PasswordFile(login.get("username", ""), option, path)}


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
