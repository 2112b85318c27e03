"""API keys of the router's clients, and their hashes, which stand in files."""

import hashlib
import re
import secrets

from baton.common.errors import ConfigurationError

__all__ = ["hash_of_key", "key_entry", "new_key"]

_PREFIX = "sk-baton-"
_MIN_KEY_CHARS = 8
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """Returns a new random key."""
    return _PREFIX + secrets.token_urlsafe(32)


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
