"""`Announcements`: leases, bounds and refusals."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError, ResourceExhaustedError
from rpc.discovery.announcements import MAX_LABELS, Announcements
from tests.support.clock import Clock

LABELS = {"role": "decode"}


class Known:
    """What a listener of announcements knows."""

    def __init__(self):
        self.addresses = {}
        self.removed = []

    def __call__(self, address, labels):
        if labels is None:
            del self.addresses[address]
            self.removed.append(address)
        else:
            self.addresses[address] = dict(labels)


async def test_a_lease_ends_unless_it_is_renewed(monkeypatch):
    announcements, known = Announcements(lease_s=15.0), Known()
    loop, clock = asyncio.get_running_loop(), Clock()
    monkeypatch.setattr(loop, "time", clock)
    with announcements.watching(known):
        announcements.announce("a:1", LABELS)
        announcements.announce("b:2", LABELS)
        began_at = clock.now
        while known.addresses.keys() != {"b:2"}:  # until the lease of a:1 is over
            announcements.announce("b:2", LABELS)
            assert clock.now < began_at + 20
            clock.now += 1.0
            for _ in range(2):
                await asyncio.sleep(0)  # timers that are due run after this task
        assert clock.now == began_at + 15
        assert len(announcements) == 1
        assert known.removed == ["a:1"]
        announcements.withdraw("b:2")  # so that no timer is left


async def test_a_flood_of_announcements_is_refused_and_changes_nothing():
    announcements, known = Announcements(max_workers=3), Known()
    with announcements.watching(known):
        for number in range(3):
            announcements.announce(f"a:{number + 1}", LABELS)
        for number in range(3, 50):
            with pytest.raises(ResourceExhaustedError, match="knows 3 announced workers"):
                announcements.announce(f"a:{number + 1}", LABELS)
        announcements.announce("a:1", {"role": "prefill"})  # those that it knows are renewed
        assert known.addresses == {"a:1": {"role": "prefill"}, "a:2": LABELS, "a:3": LABELS}
        announcements.withdraw("a:2")
        announcements.announce("a:9", LABELS)
    assert len(announcements) == 3


@pytest.mark.parametrize(
    ("address", "labels", "field"),
    [
        ("", {}, "address"),
        ("host", {}, "address"),
        ("host:0", {}, "address"),
        ("host:65536", {}, "address"),
        ("host:\u0661", {}, "address"),
        (":50062", {}, "address"),
        ("dns:///host:1", {}, "address"),
        ("a b:1", {}, "address"),
        ("h" * 300 + ":1", {}, "address"),
        ("a:1", {"": "x"}, "labels"),
        ("a:1", {"-a": "x"}, "labels"),
        ("a:1", {"a" * 64: "x"}, "labels"),
        ("a:1", {"a": "x" * 256}, r"labels\[a\]"),
        ("a:1", {"a": "x\n"}, r"labels\[a\]"),
        ("a:1", {f"a{number}": "" for number in range(MAX_LABELS + 1)}, "labels is 33"),
    ],
)
async def test_malformed_announcements_are_refused_by_field(address, labels, field):
    announcements = Announcements()
    with pytest.raises(InvalidArgumentError, match=f"^{field}"):
        announcements.announce(address, labels)
    assert len(announcements) == 0


ADDRESSES = st.sampled_from(["a:1", "b:2", "c:3", "d:4"])
STEPS = st.lists(st.tuples(ADDRESSES, st.sampled_from([None, "prefill", "decode"])), max_size=30)


@given(steps=STEPS, num_before=st.integers(0, 30))
def test_a_listener_knows_what_was_announced_and_not_withdrawn(steps, num_before):
    """Whenever it begins to watch; the table is never larger than its bound."""

    async def check():
        announcements, known, expected = Announcements(max_workers=3), Known(), {}

        def apply(address, role):
            if role is None:
                announcements.withdraw(address)
                expected.pop(address, None)
                return
            try:
                announcements.announce(address, {"role": role})
            except ResourceExhaustedError:
                assert address not in expected
                assert len(expected) == 3
            else:
                expected[address] = {"role": role}

        for step in steps[:num_before]:
            apply(*step)
        with announcements.watching(known):
            assert known.addresses == expected
            for step in steps[num_before:]:
                apply(*step)
                assert known.addresses == expected
                assert len(announcements) == len(expected) <= 3
        for address in tuple(expected):
            announcements.withdraw(address)  # so that no timer is left

    asyncio.run(check())
