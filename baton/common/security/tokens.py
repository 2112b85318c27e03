"""Tokens in files and in calls' headers; API keys of the router's clients, and their hashes."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.file_access import reason_of
from baton.common.security.watched_files import WatchedFiles

__all__ = [
    "bearer",
    "carries_token",
    "checked_token",
    "hash_of_key",
    "key_entry",
    "new_key",
    "watched_tokens",
]

_KEY_PREFIX = "sk-baton-"
_MIN_KEY_CHARS = 8
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_MIN_TOKEN_CHARS = 16


def new_key() -> str:
    """Returns a new random key."""
    return _KEY_PREFIX + secrets.token_urlsafe(32)


def hash_of_key(key: str) -> str:
    """Returns the hash of a key, as files of tenants have it: `sha256:` and hexadecimal digits."""
    return f"sha256:{hashlib.sha256(key.encode(errors='replace')).hexdigest()}"


def key_entry(text: str, where: str, *, takes_keys: bool) -> str:
    """Returns the hash that a flag or a file has, or that of the key that it has.

    Args:
        text: the value. It may be a secret, which no error shows.
        where: the flag or the field, for errors.
        takes_keys: whether the value may be a key instead of a hash.

    Raises:
        ConfigurationError: the value is no hash, nor a key of enough printable characters.
    """
    if _HASH.fullmatch(text):
        return text
    if not takes_keys:
        raise ConfigurationError(
            f"{where} must have hashes: sha256: and 64 hexadecimal digits, as `baton api-key` "
            "prints them"
        )
    is_printable = text.isascii() and text.isprintable() and " " not in text
    if len(text) < _MIN_KEY_CHARS or not is_printable:
        raise ConfigurationError(
            f"{where} must have keys of {_MIN_KEY_CHARS} printable ASCII characters or more"
        )
    return hash_of_key(text)


def bearer(token: str) -> str:
    """The authorization header that carries a token."""
    return f"Bearer {token}"


def carries_token(header: str | bytes, tokens: Iterable[str]) -> bool:
    """Whether an authorization header carries one of the tokens. Takes the same time for each
    header of a length.
    """
    credential = header.encode() if isinstance(header, str) else header
    digest = hashlib.sha256(credential).digest()
    matches = [
        hmac.compare_digest(digest, hashlib.sha256(bearer(token).encode()).digest())
        for token in tokens
    ]
    return any(matches)


def watched_tokens(flag: str, path: str) -> Callable[[], tuple[str, ...]]:
    """Returns a function that returns the tokens of a file, which is read again when it changes.

    Args:
        flag: what names the file in errors.
        path: the file: tokens, separated by white space.

    Raises:
        ConfigurationError: the file cannot be read, or has no token or a bad one.
    """

    def read() -> tuple[str, ...]:
        where = f"{flag} {path}"
        try:
            tokens = Path(path).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            reason = reason_of(error) if isinstance(error, OSError) else "not a text"
            raise ConfigurationError(f"{where}: {reason}") from None
        if not tokens:
            raise ConfigurationError(f"{where}: it has no token")
        return tuple(checked_token(token, where) for token in tokens)

    return WatchedFiles((path,), read, "tokens").current


def checked_token(token: str, where: str) -> str:
    """Returns a token.

    Args:
        token: the token.
        where: what names its source in the error.

    Raises:
        ConfigurationError: it is too short, or has other characters than a header may have.
    """
    if len(token) < _MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        raise ConfigurationError(
            f"{where}: a token needs {_MIN_TOKEN_CHARS} printable ASCII characters or more"
        )
    return token
