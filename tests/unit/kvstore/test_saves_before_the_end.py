"""A drain waits for saves and leases, and a stop for saves: `AsyncEngine.drain`, `finish_saves`."""

import asyncio
import threading
import time

import pytest

from engine.loop.async_engine import AsyncEngine
from engine.loop.core import EngineCore
from engine.request import EngineOutput
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, LookupJob, TransferResults
from tests.support.fake_connector import FakeWorker
from tests.support.fake_runner import FakeRunner, fake_config, fake_info
from tests.support.prefill_core import with_role
from tests.support.requests import engine_request

PROMPT = (0, 1, 1, 0, 1)
SHORT_S = 0.05
LONG_S = 10.0


class Worker(FakeWorker):
    """Ends look-ups at once, and saves from the time on at which `may_end` is set.

    Attributes:
        has_started: set once a save has started.
    """

    def __init__(self, *, lends: bool) -> None:
        super().__init__({}, lends=lends)
        self.may_end = threading.Event()
        self.has_started = threading.Event()

    def start(self, work: ConnectorWork) -> None:
        super().start(work)
        if work.saves:
            self.has_started.set()
        self._wake()

    def poll(self) -> TransferResults:
        may_end = self.may_end.is_set()
        for index, job in reversed(list(enumerate(self.pending))):
            if may_end or isinstance(job, LookupJob):
                self.end(index, fails=False)
        return super().poll()

    def allow(self) -> None:
        """Lets saves end from now on."""
        self.may_end.set()
        self._wake()


def make_core(worker: Worker, role: str) -> EngineCore:
    config = fake_config(block_size=4, kv_connector="fake://", kv_publish="finish")
    runner = FakeRunner(fake_info(block_size=4, max_model_len=64), num_blocks=32)
    scheduler = KvConnectorScheduler("fake", lease_s=60, finds_by_key=not worker.lends)
    return with_role(EngineCore(config, runner, (scheduler, worker)), role)


async def run_request(engine: AsyncEngine) -> EngineOutput:
    """Runs a request; returns its last output."""
    ended: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()

    def take(output: EngineOutput) -> None:
        if output.is_last:
            ended.set_result(output)

    engine.submit(engine_request("a", prompt_token_ids=PROMPT, max_tokens=6), take)
    return await asyncio.wait_for(ended, LONG_S)


async def test_a_drain_waits_until_no_block_is_lent() -> None:
    worker = Worker(lends=True)
    worker.may_end.set()
    engine = AsyncEngine(make_core(worker, "prefill"))
    try:
        handoff = (await run_request(engine)).handoff
        assert isinstance(handoff, KvHandoff)

        assert await engine.drain(SHORT_S) == 0  # within its time
        assert worker.leases == [handoff.handoff_id]
        draining = asyncio.create_task(engine.drain(LONG_S))
        await asyncio.wait((draining,), timeout=SHORT_S)
        assert not draining.done()

        engine.release_handoff(handoff.handoff_id)
        assert await asyncio.wait_for(draining, LONG_S) == 0
        assert worker.leases == []
    finally:
        await engine.close()


async def test_a_drain_waits_for_saves_of_generated_blocks() -> None:
    worker = Worker(lends=False)
    engine = AsyncEngine(make_core(worker, "decode"))
    try:
        await run_request(engine)
        draining = asyncio.create_task(engine.drain(LONG_S))
        await asyncio.wait((draining,), timeout=SHORT_S)
        assert not draining.done()

        worker.allow()
        assert await asyncio.wait_for(draining, LONG_S) == 0
        assert len(worker.store) == 2
    finally:
        await engine.close()


async def test_a_drain_of_a_failed_engine_ends_at_once() -> None:
    worker = Worker(lends=False)
    engine = AsyncEngine(make_core(worker, "decode"))
    await run_request(engine)
    engine.on_failed(RuntimeError("injected by the test"))

    assert await asyncio.wait_for(engine.drain(2 * LONG_S), LONG_S) == 0
    worker.allow()
    await engine.close()


async def test_saves_under_way_end_before_the_connector_is_closed() -> None:
    worker = Worker(lends=False)
    engine = AsyncEngine(make_core(worker, "decode"))
    await run_request(engine)
    closing = asyncio.create_task(engine.close())
    await asyncio.to_thread(worker.has_started.wait, LONG_S)
    worker.allow()
    await closing

    assert len(worker.store) == 2


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_wait_for_saves_is_bounded(is_slow: bool) -> None:
    worker = Worker(lends=False)
    core = make_core(worker, "both")
    core.scheduler.add(engine_request("a", prompt_token_ids=PROMPT, max_tokens=1))
    while not worker.has_started.is_set():
        core.run_step(lambda outputs: None)
    allowing = threading.Timer(SHORT_S, worker.allow)
    if not is_slow:
        allowing.start()
    began_at = time.monotonic()
    core.finish_saves(SHORT_S if is_slow else LONG_S)

    assert time.monotonic() - began_at < LONG_S
    assert len(worker.store) == (0 if is_slow else 1)
    core.close()
