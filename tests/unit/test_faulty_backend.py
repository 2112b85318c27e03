"""`faulty+`: its options, and the effect of each fault on puts and fetches."""

import time

import pytest

from baton.errors import ConfigurationError
from kvstore.codec import HEADER_BYTES, seal, verify
from kvstore.faults import FAULTS, FaultPlan, FaultyBackend, take_fault_options
from kvstore.registry import open_connector
from kvstore.store import GetStatus, KvObject, StoreUnavailableError

KEYS = tuple(bytes([number]) * 32 for number in range(8))
SLOT_BYTES = HEADER_BYTES + 200


class DictBackend:
    """Keeps objects by key, and records each call of `put`."""

    def __init__(self):
        self.objects = {}
        self.puts = []

    def num_held(self, keys):
        return next((i for i, key in enumerate(keys) if key not in self.objects), len(keys))

    def put(self, job, keys, slots):
        self.puts.append(list(keys))
        for key, slot in zip(keys, slots, strict=True):
            self.objects.setdefault(key, slot.to_bytes())

    def fetch(self, job, keys, slots):
        statuses = []
        for key, slot in zip(keys, slots, strict=True):
            value = self.objects.get(key)
            if value is None:
                statuses.append(GetStatus.MISSING)
            elif len(value) != slot.nbytes:
                statuses.append(GetStatus.WRONG_SIZE)
            else:
                slot.fill(value)
                statuses.append(GetStatus.HIT)
        return statuses

    def discard(self, key):
        self.objects.pop(key, None)


def new_slot(*, is_whole):
    if is_whole:
        return KvObject.split(memoryview(bytearray(SLOT_BYTES)), HEADER_BYTES)
    return KvObject(memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(200)))


def sealed(*, are_whole=True):
    slots = []
    for number, key in enumerate(KEYS):
        slot = new_slot(is_whole=are_whole)
        slot.payload[:] = bytes([number + 1]) * 200
        seal([slot], [key])
        slots.append(slot)
    return slots


def faulty(inner=None, seed=0, delay_s=0.0, **probabilities):
    return FaultyBackend(inner or DictBackend(), FaultPlan(probabilities, seed, delay_s))


def fetched(backend, *, are_whole=True):
    """Returns each key's state: good, bad, missing, or another size."""
    slots = [new_slot(is_whole=are_whole) for _ in KEYS]
    statuses = backend.fetch(None, KEYS, slots)
    states = {GetStatus.MISSING: "missing", GetStatus.WRONG_SIZE: "size"}
    return [
        states.get(status, "good" if verify([slot], [key]) else "bad")
        for status, slot, key in zip(statuses, slots, KEYS, strict=True)
    ]


def filled():
    inner = DictBackend()
    inner.put(None, KEYS, sealed())
    return inner


def test_without_faults_everything_passes():
    inner = DictBackend()
    backend = faulty(inner, **dict.fromkeys(FAULTS, 0.0))
    backend.put(None, KEYS, sealed())
    assert fetched(backend) == ["good"] * 8
    assert backend.num_held(KEYS) == 8
    assert inner.puts == [list(KEYS)]
    backend.discard(KEYS[0])
    assert KEYS[0] not in inner.objects


@pytest.mark.parametrize(
    ("fault", "states"),
    [
        ("corrupt", {"bad"}),
        ("truncate", {"bad", "size"}),
        ("drop", {"missing"}),
        ("reorder", {"bad"}),
    ],
)
@pytest.mark.parametrize("are_whole", [True, False])
def test_what_is_put_goes_wrong(fault, states, are_whole):
    inner, slots = DictBackend(), sealed(are_whole=are_whole)
    before = [slot.to_bytes() for slot in slots]
    faulty(inner, **{fault: 1.0}).put(None, KEYS, slots)
    assert set(fetched(inner)) <= states
    assert [slot.to_bytes() for slot in slots] == before, "the slots are the caller's"


def test_a_duplicate_is_put_twice():
    inner = DictBackend()
    faulty(inner, duplicate=1.0).put(None, KEYS[:2], sealed()[:2])
    assert inner.puts == [[KEYS[0], KEYS[0], KEYS[1], KEYS[1]]]


@pytest.mark.parametrize(
    ("fault", "states"),
    [
        ("corrupt", {"bad"}),
        ("truncate", {"bad", "size"}),
        ("drop", {"missing"}),
        ("reorder", {"bad"}),
        ("duplicate", {"bad", "good"}),  # the first has nothing before it
    ],
)
@pytest.mark.parametrize("are_whole", [True, False])
def test_what_is_fetched_goes_wrong(fault, states, are_whole):
    inner = filled()
    assert set(fetched(faulty(inner, **{fault: 1.0}), are_whole=are_whole)) == states
    assert fetched(inner) == ["good"] * 8, "only the way is bad"


def test_a_load_fails_after_a_hit():
    backend = faulty(filled(), fail_load=0.2)
    outcomes = set()
    for _ in range(50):
        assert backend.num_held(KEYS) == 8
        try:
            outcomes |= set(fetched(backend))
        except StoreUnavailableError:
            outcomes.add("unavailable")
    assert outcomes == {"good", "missing", "unavailable"}


def test_what_was_dropped_is_said_to_be_held():
    assert faulty(drop=1.0).num_held(KEYS) == 8
    assert faulty(drop=0.0).num_held(KEYS) == 0


def test_a_call_is_delayed_once_and_not_longer_than_asked():
    backend = faulty(filled(), delay=1.0, delay_s=0.05)
    began_at = time.monotonic()
    assert fetched(backend) == ["good"] * 8
    assert time.monotonic() - began_at > 0.01, "eight draws, of which the longest counts"


def test_a_seed_draws_the_same_whatever_the_order_of_calls():
    def draw(seed, order):
        backend = faulty(filled(), seed=seed, drop=0.5)
        slots = [new_slot(is_whole=True)]
        drawn = {}
        for _ in range(4):
            for key in order:
                drawn.setdefault(key, []).append(backend.fetch(None, [key], slots)[0])
        return drawn

    assert draw(1, KEYS) == draw(1, KEYS[::-1])
    assert draw(1, KEYS) != draw(2, KEYS)
    assert any(len(set(statuses)) > 1 for statuses in draw(1, KEYS).values()), "each time anew"


def test_how_often_a_fault_strikes():
    num_struck = sum(
        fetched(faulty(filled(), seed=seed, drop=0.1)).count("missing") for seed in range(200)
    )
    assert 100 < num_struck < 230  # 1600 draws; three standard deviations are 36


def test_options_are_taken_out_of_the_url():
    plan, url = take_fault_options(
        "faulty+redis://u:p@h:1/0?ttl_s=5&faults=corrupt:0.5,delay:1&fault_seed=-3&lease_s=2&fault_delay_s=0.2"
    )
    assert url == "redis://u:p@h:1/0?ttl_s=5&lease_s=2"
    assert plan == FaultPlan({"corrupt": 0.5, "delay": 1.0}, seed=-3, delay_s=0.2)
    assert take_fault_options("faulty+memory://x") == (FaultPlan(delay_s=0.1), "memory://x")
    assert take_fault_options("faulty+memory://x?faults=")[1] == "memory://x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("faults=explode:0.1", "'explode'; known are corrupt"),
        ("faults=corrupt:2", "corrupt is '2'"),
        ("faults=corrupt", "corrupt is ''"),
        ("faults=corrupt:nan", "corrupt is 'nan'"),
        ("fault_seed=x", "fault_seed is 'x'"),
        ("fault_delay_s=-1", "fault_delay_s is '-1'"),
        ("no_such_option=1", "no_such_option"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ConfigurationError) as caught:
        open_connector(f"faulty+memory://x?{options}")
    assert message in caught.value.message


def test_faults_go_into_members_and_not_into_all_of_them():
    with pytest.raises(ConfigurationError, match="before each member"):
        open_connector("faulty+multi://memory://a,memory://b?faults=drop:1")


class MiscountingBackend(DictBackend):
    """Returns fewer or more statuses than keys."""

    def __init__(self, num_more):
        super().__init__()
        self.num_more = num_more

    def fetch(self, job, keys, slots):
        statuses = super().fetch(job, keys, slots)
        extra = [GetStatus.MISSING] * max(0, self.num_more)
        return (statuses + extra)[: len(keys) + self.num_more]


@pytest.mark.parametrize("num_more", [-8, -2, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_any_number_of_statuses_is_passed_on(fault, num_more):
    inner = MiscountingBackend(num_more)
    inner.put(None, KEYS, sealed())
    slots = [new_slot(is_whole=True) for _ in KEYS]
    try:
        statuses = faulty(inner, **{fault: 1.0}).fetch(None, KEYS, slots)
    except StoreUnavailableError:
        assert fault == "fail_load"
    else:
        assert len(statuses) == len(KEYS) + num_more
