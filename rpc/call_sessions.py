"""The session of a call: the conversation that it belongs to, as its headers name it."""

import re
from collections.abc import Iterable

__all__ = ["SESSION_HEADERS", "session_from"]

SESSION_HEADERS = ("x-session-id", "x-session-token", "x-claude-code-session-id")
"""Headers of HTTP and keys of gRPC metadata that name a session; an earlier one counts before a
later one. They are the common name, llm-d's and Claude Code's."""

_FIT_SESSION = re.compile(r"[!-~]{1,256}")


def session_from(headers: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the session that the headers of a call name; empty if none does.

    A value of more than 256 characters, or with others than visible ASCII, names none.

    Args:
        headers: names in lower case, and values; at least those that begin with `x-`.
    """
    sessions: dict[str, str] = {}
    for name, value in headers:
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if name in SESSION_HEADERS and _FIT_SESSION.fullmatch(text):
            sessions.setdefault(name, text)
    return next((sessions[name] for name in SESSION_HEADERS if name in sessions), "")
