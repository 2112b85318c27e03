"""`PasswordFile`: a user and a password from a file, which is read again when it changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis import AuthenticationError, CredentialProvider

from baton.common.errors import ConfigurationError
from baton.common.security.watched_files import WatchedFiles

__all__ = ["PasswordFile", "login_settings"]


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
