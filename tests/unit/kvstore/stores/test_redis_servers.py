"""Parts of the redis store that ask no server: addresses, slots, allowances, error texts."""

import pytest
from redis import AuthenticationError, InvalidResponse, ResponseError

from kvstore.stores.redis.cluster import SlotRange, parse_slots
from kvstore.stores.redis.diagnosis import Allowance
from kvstore.stores.redis.messages import describe
from kvstore.stores.redis.url import AddressBook


def test_the_address_that_failed_longest_ago_is_tried_first():
    now = 0.0
    book = AddressBook(clock=lambda: now)
    (address,) = book.addresses_of("127.0.0.1", 6379)
    assert address == "127.0.0.1"
    assert book.failed("127.0.0.1", address)
    now = 30.0
    assert not book.failed("127.0.0.1", address), "that is no news"
    now = 100.0
    assert book.failed("127.0.0.1", address)
    assert book.addresses_of("127.0.0.1", 6379) == ["127.0.0.1"]


METADATA = [b"hostname", b"", b"ip", b"10.0.0.3"]


@pytest.mark.parametrize(
    ("server", "address"),
    [
        ([b"10.0.0.2", 7000, b"id", []], ("10.0.0.2", 7000)),
        ([b"10.0.0.2", 7000], ("10.0.0.2", 7000)),
        ([b"kv.example", 7000, b"id", METADATA], ("kv.example", 7000)),
        ([None, 7000, b"id", METADATA], ("asked", 7000)),
        ([b"", 7000, b"id"], ("asked", 7000)),
        ([b"?", 7000, b"id", METADATA], ("10.0.0.3", 7000)),
        ([b"?", 7000, b"id", []], ("asked", 7000)),
    ],
)
def test_a_server_of_a_cluster_is_reached_where_it_says(server, address):
    assert parse_slots([[0, 5, server]], "asked") == [SlotRange(0, 5, address, ())]
    replicated = parse_slots([[0, 5, [b"a", 1], server]], "asked")
    assert replicated == [SlotRange(0, 5, ("a", 1), (address,))]


@pytest.mark.parametrize(
    "reply",
    [
        b"none", 1, None, [1], [[]], [[0, 5]], [[0, 5, [b"a"]]], [[0, 5, [b"a", b"x"]]],
        [[0, 16384, [b"a", 1]]], [[5, 0, [b"a", 1]]], [[-1, 5, [b"a", 1]]], [[0, 5, [7, 1]]],
        [[0, 5, [b"\xff", 1]]],
    ],
)  # fmt: skip
def test_malformed_slots_are_refused(reply):
    with pytest.raises(InvalidResponse, match="CLUSTER SLOTS"):
        parse_slots(reply, "asked")


def test_what_is_refused_is_tried_again_after_a_while_and_logged_once(caplog):
    now = 0.0
    allowance = Allowance("reads are plain", clock=lambda: now)
    assert allowance
    for _ in range(3):
        allowance.refuse("NOPERM")
    assert not allowance
    assert allowance.remark == "reads are plain: NOPERM"
    now = 11.0
    assert allowance
    allowance.refuse("NOPERM")
    assert not allowance
    allowance.allow()
    assert allowance
    assert not allowance.remark
    assert [record.message for record in caplog.records] == ["redis: reads are plain: NOPERM"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ResponseError(
                "unknown command 'EVAL', with args beginning with: for i", status_code="ERR"
            ),
            "ERR unknown command 'EVAL' (the server lacks the command or has renamed it)",
        ),
        (
            AuthenticationError("invalid username-password pair", status_code="WRONGPASS"),
            "WRONGPASS invalid username-password pair (the user or the password is wrong)",
        ),
        (ResponseError("first\nsecond"), "first second"),
        (ResponseError("x" * 1000), "x" * 300),
        (TimeoutError("timed out"), "not answered in time"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError(), "OSError"),
    ],
)
def test_an_error_is_one_short_line(error, text):
    assert describe(error) == text
