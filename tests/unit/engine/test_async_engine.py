"""`AsyncEngine` over a runner without a model: delivery, aborts, draining, failures."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from baton.common.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from engine import step_watch as step_watch_module
from engine.batch import ScheduledBatch, StepOutput
from engine.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from engine.kv_transfer.costs import MAX_SILENCE_S
from engine.loop.async_engine import AsyncEngine
from engine.loop.core import EngineCore
from engine.request import EngineOutput, EngineRequest, FinishReason
from engine.schedule.scheduler import Scheduler
from kvstore.handoff import KvHandoff
from tests.support.fake_runner import FakeRunner, expected_tokens, fake_config, fake_info
from tests.support.requests import engine_request

PROMPT = (0, 1, 1, 0, 1)


class GatedRunner(FakeRunner):
    """A runner that executes one step per release of `gate`, and any number after `free()`."""

    def __init__(self) -> None:
        super().__init__(fake_info(block_size=4, max_model_len=64), num_blocks=32)
        self.gate = threading.Semaphore(0)
        self.is_free = False
        self.error: BaseException | None = None

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        if not self.is_free:
            self.gate.acquire(timeout=30)
        if self.error is not None:
            raise self.error
        return super().execute(batch)

    def free(self) -> None:
        self.is_free = True
        self.gate.release()


class Collector:
    """An output handler that a coroutine can wait on."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.ended = asyncio.Event()
        self.started = asyncio.Event()

    def __call__(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.started.set()
        if output.is_last:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


def make_request(request_id: str, max_tokens: int = 6, **overrides: object) -> EngineRequest:
    fields = {"prompt_token_ids": PROMPT, "max_tokens": max_tokens}
    return engine_request(request_id=request_id, **(fields | overrides))


@pytest.fixture
def runner() -> GatedRunner:
    return GatedRunner()


@pytest.fixture
async def engine(runner: GatedRunner) -> AsyncIterator[AsyncEngine]:
    config = fake_config(max_num_waiting=1, max_num_seqs=2)
    engine = AsyncEngine(EngineCore(config, runner))
    yield engine
    runner.free()
    await engine.close()


async def test_tokens_arrive_in_order_on_the_event_loop(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.free()
    collector = Collector()

    engine.submit(make_request("a"), collector)
    await asyncio.wait_for(collector.ended.wait(), 10)

    assert collector.tokens == expected_tokens(PROMPT, 6)
    assert collector.outputs[-1].finish_reason is FinishReason.LENGTH
    assert collector.outputs[0].timings is not None


async def test_an_id_used_again_after_an_abort_gets_only_its_own_tokens(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    first, second = Collector(), Collector()
    engine.submit(make_request("a"), first)
    runner.gate.release()
    await asyncio.wait_for(first.started.wait(), 10)

    assert engine.abort(["a", "unknown"]) == 1
    engine.submit(make_request("a", max_tokens=3), second)
    runner.free()
    await asyncio.wait_for(second.ended.wait(), 10)

    assert second.tokens == expected_tokens(PROMPT, 3)
    assert not first.ended.is_set()


async def test_a_handoff_made_just_before_an_abort_is_released(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread has sent the last output, and the event loop has not delivered it."""
    released: list[str] = []
    monkeypatch.setattr(engine, "release_handoff", released.append)
    collector = Collector()
    engine.submit(make_request("a"), collector)
    engine.abort(["a"])
    handoff = KvHandoff("h", b"n" * 32, (b"k" * 32,), 3, "memory", "xxh3-128", 5000)
    engine.on_outputs(
        [
            EngineOutput(request_id="a", token_ids=(1,)),
            EngineOutput(
                request_id="a", is_last=True, finish_reason=FinishReason.HANDOFF, handoff=handoff
            ),
        ]
    )
    assert released == ["h"]
    assert not collector.outputs


async def test_an_abort_with_notify_sends_an_aborted_output(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    engine.submit(make_request("a"), collector)

    engine.abort(["a"], notify=True)
    runner.free()
    await asyncio.wait_for(collector.ended.wait(), 10)

    assert collector.outputs[-1].finish_reason is FinishReason.ABORTED


async def test_invalid_and_excess_requests_are_refused(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    engine.submit(make_request("a"), Collector())

    with pytest.raises(AlreadyExistsError, match="request_id"):
        engine.submit(make_request("a"), Collector())
    with pytest.raises(InvalidArgumentError, match="prompt token_ids"):
        engine.submit(make_request("b", prompt_token_ids=(7,)), Collector())
    with pytest.raises(InvalidArgumentError, match="prompt is empty"):
        engine.submit(make_request("b", prompt_token_ids=()), Collector())
    with pytest.raises(InvalidArgumentError, match="number of prompt tokens is 64"):
        engine.submit(make_request("b", prompt_token_ids=(0,) * 64), Collector())
    for request_id in ("b", "c"):
        engine.submit(make_request(request_id), Collector())
    with pytest.raises(ResourceExhaustedError, match="3 requests"):
        engine.submit(make_request("d"), Collector())


async def test_a_passed_deadline_ends_a_request_that_no_step_has_run(engine: AsyncEngine) -> None:
    collector = Collector()

    engine.submit(make_request("a", deadline=time.monotonic() - 1), collector)
    await asyncio.wait_for(collector.ended.wait(), 10)

    assert isinstance(collector.outputs[-1].error, DeadlineExceededError)


async def test_drain_waits_for_running_requests_and_refuses_new_ones(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    engine.submit(make_request("a"), collector)

    assert await engine.drain(0) == 1
    with pytest.raises(UnavailableError):
        engine.submit(make_request("b"), Collector())
    runner.free()

    assert await engine.drain(10) == 0
    assert engine.load().draining
    assert collector.tokens == expected_tokens(PROMPT, 6)


async def until_whole(engine: AsyncEngine) -> None:
    """Waits until the engine reports that all blocks are free: its report may be a step old."""
    async with asyncio.timeout(10):
        while True:
            if engine.load().num_free_blocks == engine.num_blocks:
                return
            await asyncio.sleep(0.01)


async def test_a_failing_step_ends_its_requests_and_not_the_engine(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector, after = Collector(), Collector()
    runner.error = RuntimeError("secret detail")
    runner.free()
    engine.submit(make_request("a"), collector)
    await asyncio.wait_for(collector.ended.wait(), 10)
    runner.error = None
    engine.submit(make_request("b"), after)
    await asyncio.wait_for(after.ended.wait(), 10)

    error = collector.outputs[-1].error
    assert isinstance(error, InternalError)
    assert "secret" not in error.message
    assert after.tokens == expected_tokens(PROMPT, 6)
    await until_whole(engine)


@pytest.mark.parametrize("failing", ["_new_group", "loads.accept", "take_progress"])
async def test_an_error_while_a_request_is_added_ends_that_request_alone(
    engine: AsyncEngine,
    runner: GatedRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failing: str,
) -> None:
    scheduler = engine._core.scheduler
    owner, name = {
        "_new_group": (scheduler, "_new_group"),
        "loads.accept": (scheduler._transfers.loads, "accept"),
        "take_progress": (scheduler._outputs, "take_progress"),
    }[failing]

    def raising(*_: object) -> None:
        raise KeyError("secret detail")

    before, collector, after = Collector(), Collector(), Collector()
    runner.gate.release()
    engine.submit(make_request("before"), before)
    await asyncio.wait_for(before.started.wait(), 10)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising)
        engine.submit(make_request("a"), collector)
        runner.free()
        await asyncio.wait_for(collector.ended.wait(), 10)
    await asyncio.wait_for(before.ended.wait(), 10)
    engine.submit(make_request("a"), after)  # its id is free again
    await asyncio.wait_for(after.ended.wait(), 10)

    (output,) = collector.outputs
    assert isinstance(output.error, InternalError)
    assert "secret" not in output.error.message
    assert any("request a could not be added" in record.message for record in caplog.records)
    assert before.tokens == after.tokens == expected_tokens(PROMPT, 6)
    assert not scheduler._groups
    assert engine.load().num_waiting == 0
    await until_whole(engine)


async def test_a_device_that_fails_every_step_ends_the_engine(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.error = RuntimeError("device lost")
    runner.free()
    for index in range(3):
        collector = Collector()
        engine.submit(make_request(str(index)), collector)
        await asyncio.wait_for(collector.ended.wait(), 10)

    assert await asyncio.wait_for(engine.wait_failed(), 10) is runner.error
    with pytest.raises(UnavailableError):
        engine.submit(make_request("more"), Collector())


async def test_a_handler_that_raises_does_not_disturb_other_requests(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    def raising(output: EngineOutput) -> None:
        raise ValueError("a bug")

    collector = Collector()
    engine.submit(make_request("a"), raising)
    engine.submit(make_request("b"), collector)
    runner.free()
    await asyncio.wait_for(collector.ended.wait(), 10)

    assert collector.tokens == expected_tokens(PROMPT, 6)


async def test_close_ends_running_requests_with_an_error(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    engine.submit(make_request("a", max_tokens=50), collector)
    runner.gate.release(2)
    await asyncio.wait_for(collector.started.wait(), 10)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    runner.gate.release()
    await closing

    assert isinstance(collector.outputs[-1].error, UnavailableError)


async def test_a_dead_engine_fails_its_requests_and_refuses_new_ones(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    runner.error = KeyboardInterrupt()  # not an Exception: nothing in the loop handles it
    engine.submit(make_request("a"), collector)
    runner.free()

    await asyncio.wait_for(engine.wait_failed(), 10)

    error = collector.outputs[-1].error
    assert isinstance(error, UnavailableError)  # another replica can continue the request
    assert error.message == "the engine of this replica has stopped"
    with pytest.raises(UnavailableError):
        engine.submit(make_request("b"), Collector())


async def test_each_candidate_has_its_own_tokens_and_finish_reason(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    runner.free()
    engine.submit(make_request("a", n=2), collector)
    await asyncio.wait_for(collector.ended.wait(), 10)

    for index in range(2):
        mine = [output for output in collector.outputs if output.index == index]
        assert [token for output in mine for token in output.token_ids] == expected_tokens(
            PROMPT, 6
        )
        assert mine[-1].finish_reason is FinishReason.LENGTH
    assert [output.is_last for output in collector.outputs].count(True) == 1


async def test_a_finished_candidate_gets_no_further_tokens(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    engine.submit(make_request("a", n=2), collector)
    runner.gate.release()
    await asyncio.wait_for(collector.started.wait(), 10)

    engine.finish_candidate("a", 0)
    engine.finish_candidate("unknown", 0)
    runner.free()
    await asyncio.wait_for(collector.ended.wait(), 10)

    finished = [output for output in collector.outputs if output.index == 0]
    # The step in flight may still have delivered a token.
    assert sum(len(output.token_ids) for output in finished) <= 2
    assert all(output.finish_reason is None for output in finished)
    assert [t for o in collector.outputs if o.index == 1 for t in o.token_ids] == expected_tokens(
        PROMPT, 6
    )


async def test_finishing_the_last_candidate_ends_the_request(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector = Collector()
    engine.submit(make_request("a", n=2), collector)
    runner.gate.release()
    await asyncio.wait_for(collector.started.wait(), 10)

    for index in range(2):
        engine.finish_candidate("a", index)
    runner.free()
    await asyncio.wait_for(collector.ended.wait(), 10)

    assert [o.finish_reason for o in collector.outputs if o.is_last] == [FinishReason.ABORTED]
    assert await engine.drain(10) == 0
    await until_whole(engine)


async def test_an_abort_after_finishing_every_candidate_leaves_no_state(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    collector, again = Collector(), Collector()
    engine.submit(make_request("a", n=2), collector)
    runner.gate.release()
    await asyncio.wait_for(collector.started.wait(), 10)

    for index in range(2):
        engine.finish_candidate("a", index)
    engine.abort(["a"])
    engine.submit(make_request("a", max_tokens=3), again)
    runner.free()
    await asyncio.wait_for(again.ended.wait(), 10)

    assert again.tokens == expected_tokens(PROMPT, 3)
    assert not collector.ended.is_set()
    assert await engine.drain(10) == 0
    assert not engine._aborting
    await until_whole(engine)


async def test_kv_events_follow_the_prefix_cache_and_its_reset(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.free()
    async with asyncio.timeout(10), aclosing(engine.kv_events()) as events:
        collector = Collector()
        engine.submit(make_request("a"), collector)
        await collector.ended.wait()
        cached: set[bytes] = set()
        while len(cached) < 2:  # 11 tokens, of which the last was never computed
            cached = replay(await anext(events), cached)
        assert await engine.reset_prefix_cache() == 2
        while cached:
            cached = replay(await anext(events), cached)
    assert await engine.reset_prefix_cache() == 0


def replay(events: Sequence[KvEvent], cached: set[bytes]) -> set[bytes]:
    for event in events:
        match event:
            case BlocksStored(_, keys, _):
                cached = cached | set(keys)
            case BlocksRemoved(_, keys):
                cached = cached - set(keys)
            case CacheCleared():
                cached = set()
    return cached


async def test_a_stopped_engine_refuses_to_reset_its_prefix_cache(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    runner.free()
    await engine.close()
    with pytest.raises(UnavailableError):
        await engine.reset_prefix_cache()


async def test_a_call_that_fails_ends_the_engine_and_what_waits_for_it(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising() -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(engine._core.scheduler.kv, "reset_prefix_cache", raising)
    monkeypatch.setattr(Scheduler, "has_open_saves", True)
    async with asyncio.timeout(10):
        drain = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)  # the drain asks to be told of the last save, which never ends
        with pytest.raises(UnavailableError):
            await engine.reset_prefix_cache()
        assert isinstance(await engine.wait_failed(), KeyError)
        assert await drain == 0


async def until_stalled(engine: AsyncEngine, is_stalled: bool) -> None:
    """Waits until the engine's load says so; nothing reports the change."""
    deadline = time.monotonic() + 10
    while engine.load().stalled is not is_stalled:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_step_that_hangs_is_reported_and_fails_the_engine_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_watch_module, "_FIRST_S", 0.2)
    runner = GatedRunner()
    config = fake_config(max_num_waiting=1, max_num_seqs=2, step_timeout_s=2.0)
    engine = AsyncEngine(EngineCore(config, runner))
    collector = Collector()
    engine.submit(make_request("a"), collector)

    await until_stalled(engine, True)
    assert not collector.ended.is_set()
    cause = await asyncio.wait_for(engine.wait_failed(), 10)
    assert "a step has not ended within 2 s" in str(cause)
    assert isinstance(collector.outputs[-1].error, UnavailableError)
    with pytest.raises(UnavailableError):
        engine.submit(make_request("b"), collector)
    await asyncio.wait_for(engine.close(), 5)  # does not wait for the stuck thread
    runner.free()


async def test_a_step_that_ends_after_all_lets_the_engine_go_on(
    engine: AsyncEngine, runner: GatedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch_module, "_FIRST_S", 0.2)
    collector = Collector()
    engine.submit(make_request("a"), collector)
    await until_stalled(engine, True)
    runner.free()
    await asyncio.wait_for(collector.ended.wait(), 10)
    await until_stalled(engine, False)
    assert collector.tokens == expected_tokens(PROMPT, 6)


async def test_a_load_says_which_requests_it_cannot_include(
    engine: AsyncEngine, runner: GatedRunner
) -> None:
    """One that comes while a step computes is taken after it."""
    async with asyncio.timeout(10):
        while engine.load().age_s:  # noqa: ASYNC110 - until the engine sleeps
            await asyncio.sleep(0)
        first, second = Collector(), Collector()
        engine.submit(make_request("a", max_tokens=2), first)
        runner.gate.release()
        await first.started.wait()
        submitted_at = time.monotonic()
        engine.submit(make_request("b"), second)
        while engine.load().age_s <= 0.02:  # noqa: ASYNC110 - in a step at the gate
            await asyncio.sleep(0.001)
        asked_at, load = time.monotonic(), engine.load()
        assert asked_at - load.age_s <= submitted_at or load.num_queued_tokens >= 5
        runner.free()
        await second.ended.wait()
        while engine.load().age_s:  # noqa: ASYNC110 - until it sleeps again
            await asyncio.sleep(0.001)
    assert (engine.load().num_running, engine.load().num_waiting) == (0, 0)
    assert engine.load().prompt_token_s > 0
    assert engine.load().decode_step_s > 0


async def test_the_queue_of_a_load_falls_with_each_chunk_and_within_it(
    runner: GatedRunner,
) -> None:
    """Steps may take seconds. Routers must see what came before one, and not take a prompt for
    queued that is nearly computed.
    """
    runner.costs = replace(runner.costs, prompt_token_s=0.005)
    engine = AsyncEngine(EngineCore(fake_config(max_num_batched_tokens=4), runner))
    seen: list[int] = []

    async def until_queued(num_tokens: int) -> None:
        async with asyncio.timeout(10):
            while not seen or seen[-1] != num_tokens:
                seen.append(engine.load().num_queued_tokens)
                await asyncio.sleep(0.001)

    try:
        collector = Collector()
        prompt = (0, 1) * 6
        engine.submit(make_request("a", prompt_token_ids=prompt, max_tokens=1), collector)
        await until_queued(8)
        assert engine._thread.load.num_queued_tokens == 12
        assert engine.load().queued_prompt_s == pytest.approx(8 * 0.005)
        runner.gate.release()
        await until_queued(4)
        assert engine._thread.load.num_queued_tokens == 8
        runner.free()
        await asyncio.wait_for(collector.ended.wait(), 10)
        await until_queued(0)
    finally:
        runner.free()
        await engine.close()


async def test_an_idle_engine_forgets_how_fast_loads_were(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(10):
        while engine.load().age_s:  # noqa: ASYNC110 - until the engine sleeps
            await asyncio.sleep(0)
    thread = engine._thread
    thread.load = replace(thread.load, load_bytes_per_s=1e6)
    assert engine.load().load_bytes_per_s == 1e6
    monkeypatch.setattr(thread, "_called_at", time.monotonic() - 2 * MAX_SILENCE_S)
    assert engine.load().load_bytes_per_s == 0
