"""`faulty+`: its options, and the effect of each fault on puts and fetches."""

import time

import pytest

from baton.common.errors import ConfigurationError
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


def sealed_slots(*, are_whole=True):
    slots = []
    for number, key in enumerate(KEYS):
        slot = new_slot(is_whole=are_whole)
        slot.payload[:] = bytes([number + 1]) * 200
        seal([slot], [key])
        slots.append(slot)
    return slots


def faulty_backend(inner=None, seed=0, delay_s=0.0, **probabilities):
    return FaultyBackend(inner or DictBackend(), FaultPlan(probabilities, seed, delay_s))


def fetch_states(backend, *, are_whole=True):
    """Fetches every key and returns the states: good, bad, missing, or size (a wrong size)."""
    slots = [new_slot(is_whole=are_whole) for _ in KEYS]
    statuses = backend.fetch(None, KEYS, slots)
    states = {GetStatus.MISSING: "missing", GetStatus.WRONG_SIZE: "size"}
    return [
        states.get(status, "good" if verify([slot], [key]) else "bad")
        for status, slot, key in zip(statuses, slots, KEYS, strict=True)
    ]


def filled_backend():
    inner = DictBackend()
    inner.put(None, KEYS, sealed_slots())
    return inner


def test_calls_pass_unchanged_without_faults():
    inner = DictBackend()
    backend = faulty_backend(inner, **dict.fromkeys(FAULTS, 0.0))
    backend.put(None, KEYS, sealed_slots())
    assert fetch_states(backend) == ["good"] * 8
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
def test_each_fault_spoils_puts(fault, states, are_whole):
    inner, slots = DictBackend(), sealed_slots(are_whole=are_whole)
    before = [slot.to_bytes() for slot in slots]
    faulty_backend(inner, **{fault: 1.0}).put(None, KEYS, slots)
    assert set(fetch_states(inner)) <= states
    assert [slot.to_bytes() for slot in slots] == before, "the caller's slots are unchanged"


def test_a_duplicate_is_put_twice():
    inner = DictBackend()
    faulty_backend(inner, duplicate=1.0).put(None, KEYS[:2], sealed_slots()[:2])
    assert inner.puts == [[KEYS[0], KEYS[0], KEYS[1], KEYS[1]]]


@pytest.mark.parametrize(
    ("fault", "states"),
    [
        ("corrupt", {"bad"}),
        ("truncate", {"bad", "size"}),
        ("drop", {"missing"}),
        ("reorder", {"bad"}),
        ("duplicate", {"bad", "good"}),  # the first object has no predecessor to repeat
    ],
)
@pytest.mark.parametrize("are_whole", [True, False])
def test_each_fault_spoils_fetches(fault, states, are_whole):
    inner = filled_backend()
    assert set(fetch_states(faulty_backend(inner, **{fault: 1.0}), are_whole=are_whole)) == states
    assert fetch_states(inner) == ["good"] * 8, "the stored objects are intact"


def test_fail_load_fails_fetches_of_objects_that_were_found():
    backend = faulty_backend(filled_backend(), fail_load=0.2)
    outcomes = set()
    for _ in range(50):
        assert backend.num_held(KEYS) == 8
        try:
            outcomes |= set(fetch_states(backend))
        except StoreUnavailableError:
            outcomes.add("unavailable")
    assert outcomes == {"good", "missing", "unavailable"}


def test_a_backend_that_drops_puts_claims_to_hold_every_key():
    assert faulty_backend(drop=1.0).num_held(KEYS) == 8
    assert faulty_backend(drop=0.0).num_held(KEYS) == 0


def test_a_call_is_delayed():
    backend = faulty_backend(filled_backend(), delay=1.0, delay_s=0.05)
    began_at = time.monotonic()
    assert fetch_states(backend) == ["good"] * 8
    assert time.monotonic() - began_at > 0.01, "the longest of eight drawn delays counts"


def test_a_seed_determines_the_faults_of_each_key_in_any_order_of_calls():
    def draw(seed, order):
        backend = faulty_backend(filled_backend(), seed=seed, drop=0.5)
        slots = [new_slot(is_whole=True)]
        drawn = {}
        for _ in range(4):
            for key in order:
                drawn.setdefault(key, []).append(backend.fetch(None, [key], slots)[0])
        return drawn

    assert draw(1, KEYS) == draw(1, KEYS[::-1])
    assert draw(1, KEYS) != draw(2, KEYS)
    assert any(len(set(statuses)) > 1 for statuses in draw(1, KEYS).values()), (
        "every call draws anew"
    )


def test_a_fault_occurs_with_its_probability():
    num_faults = sum(
        fetch_states(faulty_backend(filled_backend(), seed=seed, drop=0.1)).count("missing")
        for seed in range(200)
    )
    assert 100 < num_faults < 230  # 1600 draws; three standard deviations are 36


def test_fault_options_are_removed_from_the_url():
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


def test_faults_of_a_multi_connector_are_refused():
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
def test_a_wrong_number_of_statuses_is_passed_on(fault, num_more):
    inner = MiscountingBackend(num_more)
    inner.put(None, KEYS, sealed_slots())
    slots = [new_slot(is_whole=True) for _ in KEYS]
    try:
        statuses = faulty_backend(inner, **{fault: 1.0}).fetch(None, KEYS, slots)
    except StoreUnavailableError:
        assert fault == "fail_load"
    else:
        assert len(statuses) == len(KEYS) + num_more
