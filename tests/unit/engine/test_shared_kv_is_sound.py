"""KV of a request that others can find in the prefix cache or the store, even after failures."""

import pytest

from engine.request import EngineOutput
from kvstore.jobs import SaveJob
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.engine_work import has_work
from tests.support.fake_connector import Store
from tests.support.fake_model import expected_tokens, fake_info
from tests.support.reference_decoding import progress_of

Windows = tuple[int | None, ...]


def cached_keys(driven: DrivenScheduler) -> tuple[bytes, ...]:
    """Returns the keys of the blocks that a new request can reuse."""
    return driven.scheduler.kv.pool.cached_keys()


def engine_with(store: Store, windows: Windows = (None,), **config: object) -> CheckedEngine:
    """Returns an engine with steps of up to 8 tokens and blocks of 4; the test ends its jobs."""
    info = fake_info(4, 64, windows=windows)
    return CheckedEngine(info, 64, store=store, max_num_batched_tokens=8, **config)


def add(engine: CheckedEngine, num_tokens: int, **fields: object) -> None:
    submitted = request("a", num_tokens, **fields)
    engine.add(CheckedRequest.of(submitted, engine.info))


def num_cached(engine: CheckedEngine) -> int:
    """Returns the number of blocks in the prefix cache, over all layer groups."""
    return sum(map(len, engine.core.scheduler.kv.pool._block_of))


def step_and_end_jobs(engine: CheckedEngine, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.worker.end_all()


def run(engine: CheckedEngine) -> None:
    while has_work(engine.core):
        step_and_end_jobs(engine, 1)
    engine.check_is_empty()


# Steps in flight.


def test_blocks_of_a_failed_step_are_not_cached() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 13))
    first, second = driven.begin(), driven.begin()
    assert cached_keys(driven) == ()
    driven.fail(first)
    driven.fail(second)

    assert cached_keys(driven) == ()
    driven.add(request("b", 13))
    assert driven.run()["b"] == expected_tokens((1,) * 13, 4)


def test_blocks_of_an_aborted_request_are_not_cached_before_their_step_has_reported() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 13))
    batch = driven.begin()
    driven.scheduler.abort(["a"])
    assert cached_keys(driven) == ()
    driven.fail(batch)

    driven.add(request("b", 13))
    assert driven.run()["b"] == expected_tokens((1,) * 13, 4)


def test_a_request_that_arrives_during_a_step_shares_none_of_its_blocks() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 13))
    first = driven.begin()
    driven.add(request("b", 13))
    second = driven.begin()
    assert driven.shares == {"a": 1, "b": 13}

    driven.runner.fault = "raise"
    with pytest.raises(RuntimeError):
        driven.runner.execute(first)
    assert [output.request_id for output in driven.fail(first)] == ["a"]
    (output,) = driven.end(second)
    assert output.token_ids == tuple(expected_tokens((1,) * 13, 1))


def test_once_its_step_has_reported_a_prompt_is_cached() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 13))
    first = driven.begin()
    second = driven.begin()
    driven.end(first)

    assert len(cached_keys(driven)) == 3
    driven.end(second)


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
def test_overlapped_steps_publish_the_same_blocks_as_the_plain_loop(windows: Windows) -> None:
    stores: tuple[Store, Store] = ({}, {})
    for is_overlapped, store in enumerate(stores):
        prefill = engine_with(store, windows, role="prefill", async_scheduling=bool(is_overlapped))
        add(prefill, 36)
        run(prefill)

    assert len(stores[0]) == 9 * len(windows)
    assert stores[1] == stores[0]
    other = engine_with(stores[1], windows)
    add(other, 40)
    step_and_end_jobs(other, 2)
    outputs: list[EngineOutput] = []
    other.core.run_step(outputs.extend)
    (output,) = outputs
    assert output.cached_tokens == 36


def test_a_failed_step_deletes_nothing_from_the_store() -> None:
    """Its saves in progress contain valid blocks that other requests may load."""
    store: Store = {}
    engine = engine_with(store)
    add(engine, 28)
    step_and_end_jobs(engine, 1)
    while not (saves := [job for job in engine.worker.pending if isinstance(job, SaveJob)]):
        engine.step()
    engine.break_next_step("raise")
    engine.step()
    assert not engine.live
    run(engine)

    assert store.keys() == {key for save in saves for key in save.keys}


# KV that is not finite.


def test_invalid_candidates_that_were_resumed_leave_no_blocks_behind() -> None:
    """Their common prefix, prompt and tokens, was saved before the candidates ran."""
    submitted = {"n": 2, "max_tokens": 12}
    plain = request("a", 17, **submitted)
    begun = (progress_of(plain, 0, (0, 1)), progress_of(plain, 1, (1, 0)))
    engine = engine_with({})
    add(engine, 17, progress=begun, **submitted)
    group = engine.core.scheduler._groups["a"]
    while group.root is not None:
        step_and_end_jobs(engine, 1)
    assert len(engine.worker.store) == 4
    fail_as_not_finite(engine)

    assert engine.worker.store == {}
    assert num_cached(engine) == 0


@pytest.mark.parametrize("windows", [(8,), (None, 8)])
def test_invalid_blocks_behind_a_window_are_deleted(windows: Windows) -> None:
    engine = engine_with({}, windows)
    add(engine, 30)
    step_and_end_jobs(engine, 5)
    assert num_cached(engine) > 2 * len(windows), "blocks behind the window are cached too"
    fail_as_not_finite(engine)

    assert engine.worker.store == {}
    assert num_cached(engine) == 0


def fail_as_not_finite(engine: CheckedEngine) -> None:
    engine.break_next_step("not finite")
    run(engine)
    assert engine.finished["a"].ended == set()


# Resets of the prefix cache.


def test_requests_that_run_during_a_reset_are_not_cached_afterwards() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 9, max_tokens=20))
    driven.steps(2)
    assert driven.scheduler.kv.reset_prefix_cache() == 2
    driven.run()

    assert cached_keys(driven) == ()
    driven.add(request("b", 9))
    driven.run()
    assert len(cached_keys(driven)) == 3, "requests after the reset are cached"


def test_requests_swapped_out_during_a_reset_are_not_cached_afterwards() -> None:
    driven = DrivenScheduler(num_blocks=8, num_host_blocks=40, preemption_mode="swap")
    driven.add(request("a", 9, max_tokens=16), request("b", 9, first_token=0, max_tokens=16))
    while driven.scheduler.load().num_swapped_blocks == 0:
        driven.step()
    driven.scheduler.kv.reset_prefix_cache()
    driven.run()

    assert cached_keys(driven) == ()
