"""Tokens in files, and in the authorization headers of calls."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.file_access import reason_of
from baton.common.security.watched_files import WatchedFiles

__all__ = ["bearer", "carries_token", "checked_token", "watched_tokens"]

_MIN_CHARS = 16


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
    if len(token) < _MIN_CHARS or not (token.isascii() and token.isprintable()):
        raise ConfigurationError(
            f"{where}: a token needs {_MIN_CHARS} printable ASCII characters or more"
        )
    return token
