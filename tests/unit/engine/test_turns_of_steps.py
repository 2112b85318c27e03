"""An engine waits for its turn before it schedules a step, and does all else meanwhile."""

import math
import threading
import time

import pytest

from engine.batch import ScheduledBatch
from engine.loop.core import EngineCore
from engine.request import EngineOutput
from kvstore.connector import KvConnectorScheduler
from tests.support.driven_scheduler import request
from tests.support.fake_connector import FakeWorker, Store
from tests.support.fake_model import expected_tokens
from tests.support.fake_runner import FakeRunner, fake_config, fake_info
from tests.support.held_turns import HeldTurns
from tests.support.prefill_core import with_role


class Engine:
    """An engine on a store, and its outputs."""

    def __init__(self, store: Store, role: str) -> None:
        self.turns = HeldTurns()
        self.runner = FakeRunner(fake_info(4, 64), num_blocks=32)
        self.runner.turns = self.turns
        self.worker = FakeWorker(store)
        connector = KvConnectorScheduler("fake", lease_s=60, finds_by_key=True), self.worker
        config = fake_config(kv_connector="fake://", async_scheduling=False)
        self.core = with_role(EngineCore(config, self.runner, connector), role)
        self.outputs: list[EngineOutput] = []

    def add(self, request_id: str, num_tokens: int) -> None:
        self.outputs += self.core.scheduler.add(request(request_id, num_tokens))

    def step(self) -> ScheduledBatch | None:
        """Runs a step; returns what it computed."""
        num_before = len(self.runner.batches)
        self.core.run_step(self.outputs.extend)
        assert not self.turns.is_taken
        return next(iter(self.runner.batches[num_before:]), None)

    def run(self) -> None:
        while self.core.scheduler.num_unfinished:
            self.step()
            self.worker.end_all()


@pytest.fixture
def store() -> Store:
    return {}


@pytest.fixture
def decode(store: Store) -> Engine:
    """A decode engine, and a store with the KV of nine tokens."""
    prefill = Engine(store, "prefill")
    prefill.add("a", 9)
    prefill.run()
    return Engine(store, "decode")


def test_requests_that_are_loaded_while_an_engine_waits_for_its_turn_join_its_step(
    decode: Engine,
) -> None:
    decode.add("short", 3)
    assert decode.step()
    decode.turns.is_held = True
    decode.turns.in_waits = [lambda: decode.add("a", 9), *[decode.worker.end_all] * 2]
    # Woken by the request, the end of its look-up, and that of its load.
    assert [decode.step() for _ in range(3)] == [None] * 3
    batch = decode.step()
    assert batch is not None
    assert len(batch.decode_rows) == 1
    assert [(chunk.start_position, chunk.num_tokens) for chunk in batch.chunks] == [(8, 1)]
    decode.run()
    tokens = [t for output in decode.outputs if output.request_id == "a" for t in output.token_ids]
    assert tokens == expected_tokens(request("a", 9).spec.prompt_token_ids, 4)


def test_a_handoff_is_reported_while_an_engine_waits_for_its_turn(store: Store) -> None:
    prefill = Engine(store, "prefill")
    prefill.add("a", 9)
    prefill.step()
    prefill.worker.end_all()  # its look-up
    assert prefill.step()
    prefill.add("b", 3)
    prefill.turns.is_held = True
    prefill.turns.in_waits = [prefill.worker.end_all] * 2
    assert [prefill.step(), prefill.step()] == [None, None]
    assert [output.request_id for output in prefill.outputs if output.handoff] == ["a"]
    assert prefill.turns.is_held


def test_an_engine_with_nothing_to_compute_does_not_wait_for_a_turn(decode: Engine) -> None:
    decode.turns.is_held = True
    decode.step()
    assert decode.core.is_stalled
    decode.add("a", 9)
    decode.turns.in_waits = [decode.worker.end_all]
    decode.step()
    assert not decode.core.is_stalled, "the look-up has ended"
    decode.step()
    assert decode.core.is_stalled, "until the load ends"
    assert decode.turns.is_held


def test_an_engine_waits_for_its_turn_until_a_deadline_at_most(decode: Engine) -> None:
    late = request("short", 3, deadline=time.monotonic() + 30)
    decode.outputs += decode.core.scheduler.add(late)
    decode.turns.is_held = True
    decode.turns.in_waits = [lambda: None]
    assert decode.step() is None
    (timeout_s,) = decode.turns.timeouts_s
    assert 0 < timeout_s <= 30


def test_an_interrupt_ends_a_turn_that_was_just_taken(decode: Engine) -> None:
    class InterruptedTurns(HeldTurns):
        def take(self, woken: threading.Event | None = None, timeout_s: float = math.inf) -> bool:
            super().take(woken, timeout_s)
            raise KeyboardInterrupt

    decode.turns = decode.runner.turns = InterruptedTurns()
    decode.add("short", 3)
    with pytest.raises(KeyboardInterrupt):
        decode.step()
    assert not decode.turns.is_taken


def test_a_step_that_fails_ends_its_turn(decode: Engine) -> None:
    decode.runner.fault = "raise"
    decode.add("short", 3)
    assert decode.step()
    assert decode.outputs[-1].error is not None
