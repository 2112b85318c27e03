"""`StoreDiagnosis`: what `baton doctor` and a watch ask of a store beside the calls of workers."""

import secrets
from collections.abc import Mapping, Sequence

from kvstore.block_key import KEY_BYTES

__all__ = ["StoreDiagnosis", "unused_key"]


def unused_key() -> bytes:
    """A random key, which no object has."""
    return secrets.token_bytes(KEY_BYTES)


class StoreDiagnosis:
    """Answers for a store of one server that can be written to without harm.

    Stores for which that is not true override it.
    """

    def new_keys(self) -> Mapping[str, bytes]:
        """Returns unused keys that together reach every server of the store, by its name.

        Raises:
            StoreUnavailableError: the store does not know its servers.
        """
        return {"": unused_key()}

    def has_room(self, key: bytes, num_bytes: int) -> bool:
        """Whether a key's server can take that much without evicting anything.

        Raises:
            StoreUnavailableError: the server does not answer.
        """
        return True

    def rehearse_put(self, key: bytes, num_bytes: int) -> None:
        """Sends a server what a put of an object sends, so that it stores nothing.

        Called where `has_room` is false.

        Raises:
            StoreUnavailableError: the server refuses it.
        """

    def remarks(self) -> Sequence[str]:
        """Returns refusals of servers within calls that succeeded nevertheless."""
        return ()
