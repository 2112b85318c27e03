"""Runs code as a user whom the system knows nothing of, as containers do."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["OTHER_UID", "as_other_user"]

OTHER_UID = 10001


@contextmanager
def as_other_user() -> Iterator[str]:
    """Takes the rights of root from this process; one that has none keeps its user.

    Yields:
        The user, as error messages name it.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        os.setegid(OTHER_UID)
        os.seteuid(OTHER_UID)
    try:
        yield f"uid {os.geteuid()}, gid {os.getegid()}"
    finally:
        os.seteuid(uid)
        os.setegid(gid)
