"""Limits of open files, which the connections of a process's servers share."""

import resource

__all__ = ["MAX_CONNECTIONS", "connection_budget", "raise_descriptor_limit"]

MAX_CONNECTIONS = 8192
"""The most connections of a server, unless a flag states another number."""
_MIN_RESERVE = 256


def raise_descriptor_limit() -> None:
    """Raises the number of files that this process may open as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_budget() -> int:
    """How many connections the servers of this process may have together.

    The rest of the open files is a reserve for calls to other servers, stores and files: an
    eighth of the limit and at least 256, but not more than half.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return 2 * MAX_CONNECTIONS
    return limit - min(max(limit // 8, _MIN_RESERVE), limit // 2)
