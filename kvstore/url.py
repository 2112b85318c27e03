"""The grammar of store and connector URLs. Pure.

- `scheme://authority/path?option=value` is a store or peer (`StoreUrl`). Every store takes the
  option `ttl_s`; most take `lease_s`, `max_bytes` and `timeout_s`. A store lists the options that
  it takes, and any other is an error, so that a misspelt option is noticed.
- `multi://URL,URL,...` is several connectors as one, each with its own options.
- `faulty+URL` is a connector with injected faults, for tests.
- Sizes in options are written as in flags (`baton.common.flags.values`).
"""

import math
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from baton.common.errors import ConfigurationError
from baton.common.flags.values import parse_byte_size
from baton.common.machine_limits import read_memory
from kvstore.store import DEFAULT_TIMEOUT_S

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "DEFAULT_TTL_S",
    "FAULTY_PREFIX",
    "LIMIT_OPTIONS",
    "MULTI_SCHEME",
    "StoreLimits",
    "StoreUrl",
    "bound_in_memory",
    "printable_url",
    "scheme_of",
    "split_members",
]

FAULTY_PREFIX = "faulty+"
MULTI_SCHEME = "multi"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_IPV6_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.]*(%\w+)?\]")
# Outside of an IPv6 address: a bracket, or a colon that is not before a port.
_NO_ADDRESS = re.compile(r"[\[\]]|:(?![0-9]{0,5}(,|$))")
_QUOTED = re.compile(r"""(['"]).*\1""", re.DOTALL)
_OPTION_NAME = re.compile(r"\w*", re.ASCII)
_HIDDEN = "..."
_HOW_TO_WRITE = (
    "in a user name or password, characters such as / ? # [ ] @ are written percent-encoded (/ as "
    "%2F); a redis password can be in a password_file instead"
)

# A comma separates members only if a scheme follows it; hosts and options may have commas, too.
_NEXT_MEMBER = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")

DEFAULT_TTL_S = 3600.0
LIMIT_OPTIONS = ("ttl_s", "lease_s", "max_bytes", "timeout_s")
"""The options that `StoreUrl.limits` reads."""

_DEFAULT_LEASE_S = 30.0
_SHARE_OF_MEMORY = 16
"""A store in memory takes by default at most the memory limit divided by this."""
_SECONDS_RANGE = (0.001, 1e9)


def scheme_of(url: str) -> str:
    """Returns the part before `://` in lower case; empty if there is no scheme there."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else ""


def printable_url(url: str) -> str:
    """Returns a connector's URL without users, passwords and options, for errors and logs.

    A URL that is malformed may have parts of a password anywhere. What could be one is left out.
    """
    scheme = scheme_of(url)
    if not scheme:
        return _HIDDEN
    if scheme == MULTI_SCHEME:
        return f"{MULTI_SCHEME}://{','.join(map(printable_url, split_members(url)))}"
    _, _, rest = url.partition("://")
    shown, *others = re.split(r"[?#]", rest, maxsplit=1)
    if any("@" in other for other in others):  # perhaps a password with a ? or # in it
        shown = _HIDDEN
    elif not shown.startswith("/") or ":" in shown:  # a plain path has no user
        shown = shown.rpartition("@")[2]
    if _NO_ADDRESS.search(_IPV6_ADDRESS.sub("", shown.partition("/")[0])):
        shown = _HIDDEN  # perhaps a password whose host was forgotten
    return f"{scheme}://{shown}"


def split_members(url: str) -> tuple[str, ...]:
    """Returns the URLs in a `multi://` URL, as written."""
    rest = url.partition("://")[2]
    return tuple(_NEXT_MEMBER.split(rest)) if rest else ()


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The limits of a store that bounds its own size.

    Attributes:
        ttl_s: seconds that an object lives from its last touch.
        lease_s: seconds from its last touch in which an object is not evicted.
        timeout_s: longest wait of a call.
        max_bytes: bound of all objects together; None if the URL names none.
        default_max_bytes: the largest bound that the store then chooses.
        store: the store's URL as logs show it.
        is_diagnosis: whether the store is opened only to find out if it works. It then removes
            nothing but what it has put, neither to keep a bound nor because a TTL is over.
    """

    ttl_s: float
    lease_s: float
    timeout_s: float
    max_bytes: int | None
    default_max_bytes: int
    store: str = "the KV store"
    is_diagnosis: bool = False


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a store's URL.

    Attributes:
        scheme: the part before `://`, in lower case.
        authority: the part between `://` and the path, as written.
        path: the part from the first slash on, percent-decoded; may be empty.
        options: the query's parameters.
        printable: the URL as errors and logs show it.
    """

    scheme: str
    authority: str
    path: str
    options: Mapping[str, str]
    printable: str

    @classmethod
    def parse(
        cls,
        url: str,
        known_options: Collection[str],
        refused_options: Mapping[str, str] = MappingProxyType({}),
    ) -> "StoreUrl":
        """Splits a URL into its parts and checks the names of its options.

        Args:
            url: the store's URL.
            known_options: names of all options that the store takes.
            refused_options: names that other stores take and this one does not,
                each with what to do instead.

        Raises:
            ConfigurationError: not a URL; an unknown, refused or repeated option; a path with a
                null character.
        """
        parts, printable = _split(url), printable_url(url)
        options = _options(parts, printable)
        parsed = cls(parts.scheme, parts.netloc, unquote(parts.path), options, printable)
        if "\0" in parsed.path:
            raise parsed.error("the path has a null character, which no file's name has")
        for name in options:
            if name in refused_options:
                raise parsed.error(refused_options[name])
            if name not in known_options and not _OPTION_NAME.fullmatch(name):
                raise parsed.error(_HOW_TO_WRITE)  # perhaps a part of a password
            if name not in known_options:
                known = ", ".join(sorted(known_options))
                raise parsed.error(f"unknown option {name!r}; it takes {known}")
        return parsed

    def limits(self, default_max_bytes: int, *, is_diagnosis: bool = False) -> StoreLimits:
        """Returns the values of `LIMIT_OPTIONS`.

        Args:
            default_max_bytes: see `StoreLimits`.
            is_diagnosis: see `StoreLimits`.

        Raises:
            ConfigurationError: one of them is out of range; names it.
        """
        ttl_s = self.seconds("ttl_s", DEFAULT_TTL_S)
        return StoreLimits(
            ttl_s=ttl_s,
            lease_s=self.lease_seconds(ttl_s),
            timeout_s=self.seconds("timeout_s", DEFAULT_TIMEOUT_S),
            max_bytes=self.num_bytes("max_bytes"),
            default_max_bytes=default_max_bytes,
            store=f"KV store {self}",
            is_diagnosis=is_diagnosis,
        )

    def seconds(self, name: str, default_s: float) -> float:
        """Returns the value of a duration option, in seconds.

        Raises:
            ConfigurationError: not a number of seconds in range.
        """
        lowest_s, highest_s = _SECONDS_RANGE
        return self._seconds_between(name, default_s, lowest_s, highest_s)

    def lease_seconds(self, ttl_s: float) -> float:
        """Returns the option `lease_s`; by default 30 seconds, or `ttl_s` if that is less.

        Raises:
            ConfigurationError: not a number of seconds from 0, for no leases, to `ttl_s`.
        """
        default_s = min(_DEFAULT_LEASE_S, ttl_s)
        return self._seconds_between("lease_s", default_s, 0.0, ttl_s)

    def _seconds_between(
        self, name: str, default_s: float, lowest_s: float, highest_s: float
    ) -> float:
        text = self.options.get(name)
        if text is None:
            return default_s
        try:
            value_s = float(text)
        except ValueError:
            value_s = math.nan
        if not lowest_s <= value_s <= highest_s:
            raise self.error(
                f"{name} is {text!r}; it must be {lowest_s:g} to {highest_s:g} seconds"
            )
        return value_s

    def choice(self, name: str, *choices: str) -> str:
        """Returns the value of an option that takes certain words; the first one is the default.

        Raises:
            ConfigurationError: the value is another word.
        """
        text = self.options.get(name, choices[0])
        if text not in choices:
            raise self.error(f"{name} is {text!r}; it must be {' or '.join(choices)}")
        return text

    def num_bytes(self, name: str) -> int | None:
        """Returns the value of a size option, in bytes; None if the URL does not have it.

        Raises:
            ConfigurationError: the value is not a positive size.
        """
        text = self.options.get(name)
        if text is None:
            return None
        try:
            num_bytes = parse_byte_size(text)
        except ValueError as error:
            raise self.error(f"{name}: {error}") from None
        if num_bytes <= 0:
            raise self.error(f"{name} is {text!r}; it must be positive")
        return num_bytes

    def error(self, message: str) -> ConfigurationError:
        """Returns a configuration error whose text begins with the URL, without secrets.

        If a part of the URL could be a password, what the message quotes could be one, too.
        """
        if self.printable.endswith(_HIDDEN):
            message = _QUOTED.sub(repr(_HIDDEN), message)
            message = message if message == _HOW_TO_WRITE else f"{message}; {_HOW_TO_WRITE}"
        return ConfigurationError(f"KV store {self}: {message}")

    def __str__(self) -> str:
        """Returns the URL without user, password and options."""
        return self.printable


def bound_in_memory(default_max_bytes: int, folder: Path | None = None) -> int:
    """Returns the bound of a store that lies in memory and whose URL names none.

    Args:
        default_max_bytes: the largest one.
        folder: the store's; the bound is at most half of its file system. None to leave that out.
    """
    bounds, limit = [default_max_bytes], read_memory().limit
    if limit is not None:
        bounds.append(limit // _SHARE_OF_MEMORY)
    if folder is not None:
        with suppress(OSError):  # a folder that cannot be looked at now may be there later
            existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
            bounds.append(shutil.disk_usage(existing).total // 2)
    return min(bounds)


def _split(url: str) -> SplitResult:
    """Splits a URL. Its errors must not repeat a password that the URL may contain.

    Raises:
        ConfigurationError: it is malformed, or a password has ended its authority early.
    """
    if not scheme_of(url):
        raise ConfigurationError("a KV store's URL is scheme://..., say memory:// or shm://name")
    error = ConfigurationError(
        f"the KV store's URL {printable_url(url)} is malformed: {_HOW_TO_WRITE}"
    )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise error from None
    if "#" in url or (parts.netloc and "@" in parts.path):
        raise error
    return parts


def _options(parts: SplitResult, printable: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigurationError(
            f"the options of the KV store's URL {printable} are malformed; they are written "
            f"?name=value&name=value, and {_HOW_TO_WRITE}"
        ) from None
    options = dict(pairs)
    if len(options) != len(pairs):
        raise ConfigurationError(f"an option of the KV store's URL {printable} is repeated")
    return options
