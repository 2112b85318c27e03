"""The session that the headers of a call name."""

import pytest

from rpc.call_sessions import SESSION_HEADERS, session_from


@pytest.mark.parametrize("name", SESSION_HEADERS)
@pytest.mark.parametrize("value", ["chat-1", b"chat-1"])
def test_each_name_is_known(name: str, value: str | bytes) -> None:
    assert session_from([("x-request-id", "1"), (name, value)]) == "chat-1"


def test_the_common_name_counts_first() -> None:
    headers = [(name, name.upper()) for name in reversed(SESSION_HEADERS)]
    assert session_from(headers) == "X-SESSION-ID"


@pytest.mark.parametrize("value", ["", "a b", "ä", "x" * 257, "a\n", b"\xff"])
def test_other_values_name_none(value: str | bytes) -> None:
    assert session_from([("x-session-id", value)]) == ""
    assert session_from([("x-session-id", value), ("x-session-token", "t")]) == "t"


def test_a_repeated_header_counts_once() -> None:
    assert session_from([("x-session-id", "a"), ("x-session-id", "b")]) == "a"
    assert session_from([]) == ""
