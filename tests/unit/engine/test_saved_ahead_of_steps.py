"""Saves scheduled before the step that computes their blocks: they save what the step computes."""

import pytest

from engine.batch import StepOutput
from engine.groups.group import GroupState
from engine.schedule.step_plan import StepPlan
from kvstore.jobs import SaveJob
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.fake_model import fake_info
from tests.support.requests import engine_request

BLOCK_SIZE = 4
NUM_BLOCKS = 64
INFO = fake_info(BLOCK_SIZE, 64)
PROMPT = (0, 1, 1, 0) * 4


def make_engine(store: dict, **config: object) -> CheckedEngine:
    """Returns an engine that computes one block per step."""
    return CheckedEngine(
        INFO,
        NUM_BLOCKS,
        store=store,
        submits="now",
        max_num_batched_tokens=BLOCK_SIZE,
        kv_transfer_layer_slices=2,
        **config,
    )


def add(engine: CheckedEngine, request_id: str) -> None:
    request = engine_request(request_id=request_id, prompt_token_ids=PROMPT, max_tokens=2)
    engine.add(CheckedRequest.of(request, INFO))


def step(engine: CheckedEngine, count: int) -> None:
    """Runs steps and ends all transfers after each."""
    for _ in range(count):
        engine.step()
        engine.worker.end_all()


@pytest.mark.parametrize("overlapped", [False, True])
def test_blocks_of_a_step_after_a_failed_one_are_not_saved(overlapped: bool) -> None:
    store: dict = {}
    first, second = (make_engine(store, role="both", async_scheduling=overlapped) for _ in range(2))
    add(first, "a")
    step(first, 2)
    first.break_next_step("raise")
    step(first, 6)  # with overlap, the step after the failed one is in flight by then
    assert first.finished.keys() == {"a"}
    add(first, "b")
    step(first, 14)
    add(second, "c")
    step(second, 14)  # loads the saved blocks; the runner detects wrong slots
    assert "b" in first.finished
    assert "c" in second.finished


def test_saves_wait_for_their_step_only_without_overlap() -> None:
    for overlapped in (False, True):
        engine = make_engine({}, role="both", async_scheduling=overlapped)
        add(engine, "a")
        jobs: list[SaveJob] = []
        for _ in range(8):
            engine.step()
            jobs += [job for job in engine.worker.pending if isinstance(job, SaveJob)]
            engine.worker.end_all()
        assert jobs
        assert all(job.step == 0 for job in jobs) == overlapped


def test_blocks_swapped_in_are_saved_after_their_swap_in() -> None:
    engine = make_engine({}, role="prefill", num_host_blocks=NUM_BLOCKS, preemption_mode="swap")
    scheduler = engine.core.scheduler
    add(engine, "a")
    step(engine, 1)  # the lookup
    for _ in range(3):
        engine.step()
    (group,) = scheduler._groups.values()

    plan = StepPlan(scheduler._num_steps + 1, BLOCK_SIZE)
    scheduler._admission._preemption._preempt(group, plan)
    record = scheduler._start_step(plan)
    assert record.swap_outs
    engine.runner.execute(record)
    scheduler.commit(record, StepOutput(record.step))
    engine.worker.end_all()
    for block in range(NUM_BLOCKS):
        engine.runner.kv_pool[block] = [(0, (9,) * BLOCK_SIZE)] * BLOCK_SIZE

    assert group.state is GroupState.SWAPPED
    step(engine, 8)  # `FakeWorker` detects changes of blocks that are being saved
    ((_, _, handoff),) = engine.handed_over
    assert handoff is not None
    assert len(handoff.block_keys) == len(PROMPT) // BLOCK_SIZE
    assert all(key in engine.worker.store for key in handoff.block_keys)
