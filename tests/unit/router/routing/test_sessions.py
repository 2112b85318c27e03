"""Homes of sessions: bounded, forgotten after a time, apart for each client."""

import itertools

from router.routing.sessions import SessionHomes, session_key


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def homes(max_sessions: int = 2) -> tuple[SessionHomes, Clock]:
    clock = Clock()
    return SessionHomes(max_sessions, ttl_s=10.0, clock=clock), clock


def test_the_home_is_where_the_last_turn_was_per_tier() -> None:
    table, _ = homes()
    table.note(b"a", "prefill", "p1")
    table.note(b"a", "decode", "d1")
    table.note(b"a", "prefill", "p2")
    assert table.homes(b"a") == {"prefill": "p2", "decode": "d1"}
    assert table.homes(b"b") == {}


def test_requests_without_a_session_have_no_home() -> None:
    table, _ = homes()
    table.note(b"", "prefill", "p1")
    assert table.homes(b"") == {}
    assert len(table) == 0


def test_a_silent_session_is_forgotten() -> None:
    table, clock = homes()
    table.note(b"a", "prefill", "p1")
    clock.now = 9.0
    assert table.homes(b"a") == {"prefill": "p1"}
    clock.now = 10.0
    assert table.homes(b"a") == {}
    table.note(b"b", "prefill", "p1")
    assert len(table) == 1


def test_sessions_that_were_all_silent_leave_a_few_at_a_time() -> None:
    table, clock = homes(max_sessions=1000)
    for number in range(1000):
        table.note(b"%d" % number, "prefill", "p1")
    clock.now = 10.0
    sizes = [len(table)]
    for number in range(1000, 1400):
        table.note(b"%d" % number, "prefill", "p1")
        sizes.append(len(table))
    assert all(before - after <= 4 for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == 400, "those that are silent have left"


def test_the_table_is_bounded_and_forgets_the_session_that_was_silent_longest() -> None:
    table, _ = homes(max_sessions=2)
    for session in (b"a", b"b", b"a", b"c"):
        for tier in ("prefill", "decode"):
            table.note(session, tier, "r")
    assert len(table) == 2
    assert table.homes(b"b") == {}
    assert table.homes(b"a") == {"prefill": "r", "decode": "r"}


def test_clients_have_sessions_of_their_own() -> None:
    assert session_key("one", "x") == session_key("one", "x") != session_key("two", "x")
    assert session_key("one", "") == b""
