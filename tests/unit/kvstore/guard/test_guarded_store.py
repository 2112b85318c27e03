"""`GuardedStore` and `OutageLog`: what is asked of a store that fails, and what is logged."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from kvstore.conformance.objects import as_object
from kvstore.guard.breaker import NotAskedError
from kvstore.guard.guarded_store import GuardedStore
from kvstore.guard.status import BackendStatus
from kvstore.store import GetStatus, KvObject, StoreFullError, StoreUnavailableError
from kvstore.stores.memory import MemoryStore

KEY = b"k" * 32
NAME = "KV store redis://cache:6379/0"


class Rig:
    """A store whose kinds of calls fail at will, behind breakers with a clock."""

    def __init__(self, url: str) -> None:
        self.now = 0.0
        self.errors: dict[str, StoreUnavailableError] = {}
        self.calls: list[tuple[str, int]] = []  # with the number of bytes of the first object
        store = MemoryStore.from_url(url)
        for name in ("put", "get_into", "contains_prefix", "delete"):
            setattr(store, name, self._failing(name, getattr(store, name)))
        self.guarded = GuardedStore(store, NAME, lambda: self.now)

    def _failing(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def failing(keys: Sequence[bytes], objects: Sequence[KvObject] = ()) -> object:
            self.calls.append((name, objects[0].nbytes if objects else 0))
            if name in self.errors:
                raise type(self.errors[name])(*self.errors[name].args)
            return call(keys, objects) if objects else call(keys)

        return failing

    def asked(self, call: Callable[[], object]) -> list[tuple[str, int]]:
        """Makes a call that may fail; returns what the store was asked meanwhile."""
        before = len(self.calls)
        with suppress(StoreUnavailableError):
            call()
        return self.calls[before:]

    def put(self) -> None:
        self.guarded.put([KEY], [as_object(b"x" * 1000)])

    def get(self) -> list[GetStatus]:
        return self.guarded.get_into([KEY], [as_object(bytearray(1000))])

    def look_up(self) -> int:
        return self.guarded.num_held([KEY])

    def wait(self) -> None:
        """Lets the next probes become due, and makes them."""
        self.now += 100
        self.guarded.probe_due()


@pytest.fixture
def rig(tmp_path) -> Rig:
    rig = Rig(f"memory://{tmp_path.name}")
    rig.guarded.probe_apart_from_calls()
    return rig


def test_a_request_waits_for_a_store_that_is_down_once(rig: Rig) -> None:
    rig.errors = dict.fromkeys(("put", "get_into", "contains_prefix"), StoreUnavailableError("no"))
    assert len(rig.asked(rig.look_up)) == 1
    rig.now += 1000
    for call in (rig.put, rig.get, rig.look_up):
        assert rig.asked(call) == []
        with pytest.raises(NotAskedError, match="cache:6379"):
            call()


def test_probes_repeat_what_has_failed_at_its_size(rig: Rig) -> None:
    rig.put()
    rig.errors["put"] = StoreUnavailableError("values of more than 100 bytes are refused")
    rig.asked(rig.put)
    assert rig.asked(rig.wait) == [("put", 1000)]
    rig.errors.clear()
    assert rig.asked(rig.wait) == [("put", 1000), ("delete", 0)]
    assert rig.guarded.store.stats().num_objects == 1, "probes leave nothing behind"

    rig.errors["get_into"] = StoreUnavailableError("no permission for GETEX")
    rig.asked(rig.get)
    assert ("get_into", 1000) in rig.asked(rig.wait)
    assert not rig.guarded.answers
    rig.errors.clear()
    rig.wait()
    assert rig.guarded.answers
    assert rig.get() == [GetStatus.HIT]


def test_puts_that_fail_leave_reads_alone(rig: Rig) -> None:
    rig.put()
    rig.errors["put"] = StoreUnavailableError("read-only")
    rig.asked(rig.put)
    assert rig.look_up() == 1
    assert rig.guarded.status("id") == BackendStatus(
        NAME, "id", can_load=True, can_save=False, problem="takes no blocks: read-only"
    )


def test_only_a_call_that_was_made_wakes_the_watch(rig: Rig) -> None:
    woken: list[str] = []
    rig.errors = dict.fromkeys(("put", "delete"), StoreUnavailableError("read-only"))
    for call in (rig.put, lambda: rig.guarded.delete([KEY])):
        rig.guarded.on_open = lambda: woken.append("")
        rig.asked(call)
        assert woken
        woken.clear()
        rig.asked(call)
        assert not woken


def test_a_full_store_is_not_probed_but_checked(rig: Rig) -> None:
    """It answers at once, so that requests may ask; and without requests the state is right."""
    rig.errors["put"] = StoreFullError("full of leased objects")
    rig.asked(rig.put)
    assert rig.asked(rig.wait) == []
    assert rig.guarded.probe_due() is None
    rig.errors.clear()
    rig.guarded.check()
    assert rig.guarded.status().can_save


def test_an_outage_is_two_lines_that_name_the_store(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "baton.kvstore")
    rig.errors = dict.fromkeys(("put", "contains_prefix"), StoreUnavailableError("refused"))
    for _ in range(3):
        rig.asked(rig.put)
        rig.asked(rig.look_up)
        rig.wait()
    assert len(caplog.records) == 1
    rig.errors.clear()
    rig.wait()
    rig.wait()
    down, up = caplog.messages
    assert down.startswith(f"{NAME} takes no blocks: refused. ")
    assert up == f"{NAME} answers again"
    assert rig.guarded.status() == BackendStatus(NAME)


def test_a_full_store_that_stops_to_answer_is_news(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.errors["put"] = StoreFullError("full")
    rig.asked(rig.put)
    rig.errors["contains_prefix"] = StoreUnavailableError("refused")
    rig.asked(rig.look_up)
    assert [message.split(": ")[1].split(".")[0] for message in caplog.messages] == [
        "full",
        "refused",
    ]
