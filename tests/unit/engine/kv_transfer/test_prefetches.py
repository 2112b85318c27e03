"""Prefetches: decode loads blocks of prompts that prefill still computes."""

from dataclasses import replace

import pytest

from engine.kv_cache.events import BlocksStored
from kvstore.handoff import KvHandoff
from kvstore.jobs import LoadJob, LoadResult, TransferResults
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request


def decode_engine(**config: object) -> DrivenScheduler:
    return DrivenScheduler(with_connector=True, role="decode", **config)


def start_prefetch_beside_two_running(driven: DrivenScheduler) -> LoadJob:
    """Starts two requests that will need the whole pool, and a prefetch into its free blocks."""
    driven.add(request("a", 6, max_tokens=9), request("b", 6, max_tokens=9, first_token=2))
    driven.step()
    driven.answer()
    driven.step()
    driven.end_all_saves()
    ahead = handed_over("c", 13, first_token=0)
    driven.scheduler.prefetch(_first_blocks(ahead.handoff, 3))
    (load,) = driven.work().loads
    assert len(load.keys) == 3
    return load


def test_prefetched_blocks_are_cached_and_the_request_loads_the_rest() -> None:
    driven = decode_engine()
    submitted = handed_over("a", max_tokens=2)
    driven.scheduler.prefetch(_first_blocks(submitted.handoff, 1))
    (early,) = driven.work().loads
    assert early.keys == submitted.handoff.block_keys[:1]
    driven.add(submitted)
    driven.step()
    assert driven.work().loads == [], "the request waits for the prefetch in flight"
    driven.end_load(early, submitted.spec.prompt_token_ids)
    driven.step()
    (rest,) = driven.work().loads
    assert rest.keys == submitted.handoff.block_keys[1:]
    assert rest.handoff == submitted.handoff


def test_blocks_cached_or_in_flight_are_not_prefetched_again() -> None:
    driven = decode_engine()
    handoff = handed_over("a").handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 1))
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    first, second = driven.work().loads
    assert (first.keys, second.keys) == (handoff.block_keys[:1], handoff.block_keys[1:2])
    driven.scheduler.apply(
        TransferResults(loads=(LoadResult(first.job_id, 1), LoadResult(second.job_id, 1)))
    )
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    assert driven.work().loads == []
    assert driven.num_free == 32


def test_only_blocks_that_arrived_are_cached() -> None:
    driven = decode_engine()
    handoff = handed_over("a").handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    (early,) = driven.work().loads
    result = LoadResult(early.job_id, 1, "corrupt")
    driven.scheduler.apply(TransferResults(loads=(result,)))
    assert driven.scheduler.kv.pool.cached_keys() == handoff.block_keys[:1]
    assert driven.num_free == 32


def test_a_reset_of_the_cache_drops_prefetches_in_flight() -> None:
    driven = decode_engine()
    handoff = handed_over("a").handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    (early,) = driven.work().loads
    driven.scheduler.kv.reset_prefix_cache()
    driven.scheduler.apply(TransferResults(loads=(LoadResult(early.job_id, 2),)))
    assert driven.scheduler.kv.pool.cached_keys() == ()
    assert driven.num_free == 32


def test_a_prefetch_loads_only_the_blocks_that_fit() -> None:
    driven = DrivenScheduler(3, with_connector=True, role="decode")
    handoff = handed_over("a", 16).handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 3))
    (load,) = driven.work().loads
    assert load.keys == handoff.block_keys[:2]
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 2),)))
    last = replace(handoff, block_keys=handoff.block_keys[3:])
    driven.scheduler.prefetch(last)
    assert driven.work().loads == [], "a prefix match cannot skip the gap"


def test_a_prefetch_does_not_evict_cached_blocks_of_its_own_prompt() -> None:
    driven = DrivenScheduler(3, with_connector=True, role="decode")
    handoff = handed_over("a", 16).handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    (load,) = driven.work().loads
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 2),)))
    again = replace(handoff, handoff_id="again")
    driven.scheduler.prefetch(_first_blocks(again, 4))
    assert driven.work().loads == []
    assert driven.scheduler.kv.pool.cached_keys() == handoff.block_keys[:2]


def test_a_prefetch_is_cancelled_before_a_running_request_is_preempted() -> None:
    driven = DrivenScheduler(8, with_connector=True, role="decode")
    load = start_prefetch_beside_two_running(driven)
    cancelled = []
    for _ in range(8):
        driven.step()
        cancelled += driven.work().cancelled_loads
    assert cancelled == [load.job_id]
    assert driven.shares == {}, "both requests wait for the cancelled prefetch"
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 0, "cancelled"),)))
    driven.run()
    driven.end_all_saves()
    assert driven.scheduler.load().num_preemptions == 0
    assert driven.num_free == 8


def test_a_prefetch_that_does_not_end_is_waited_for_until_the_transfer_timeout() -> None:
    driven = DrivenScheduler(8, with_connector=True, role="decode", kv_transfer_timeout_s=5.0)
    start_prefetch_beside_two_running(driven)
    driven.steps(8)
    assert driven.scheduler.load().num_preemptions == 0
    driven.now = 5.0
    driven.scheduler.expire()
    for _ in range(60):
        driven.step()
        driven.end_saves(job.job_id for job in driven.answer().saves)
    assert driven.scheduler.num_unfinished == 0
    assert driven.scheduler.load().num_preemptions == 1
    assert driven.metrics.snapshot()[0]["baton_kv_failures", "load", "timed_out"] == 1


def test_a_prefetch_that_times_out_is_cancelled() -> None:
    driven = decode_engine(kv_transfer_timeout_s=5.0)
    driven.scheduler.prefetch(_first_blocks(handed_over("a").handoff, 2))
    (load,) = driven.work().loads
    driven.now = 5.0
    driven.scheduler.expire()
    assert driven.work().cancelled_loads == [load.job_id]
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 0, "cancelled"),)))
    assert driven.num_free == 32


@pytest.mark.parametrize("num_good", [0, 1])
def test_no_blocks_are_prefetched_behind_a_block_that_failed(num_good: int) -> None:
    driven = decode_engine()
    handoff = handed_over("a", 20).handoff
    driven.scheduler.prefetch(_first_blocks(handoff, 2))
    (load,) = driven.work().loads
    result = LoadResult(load.job_id, num_good, "unavailable")
    driven.scheduler.apply(TransferResults(loads=(result,)))
    driven.scheduler.prefetch(replace(handoff, block_keys=handoff.block_keys[2:4], num_tokens=16))
    assert driven.work().loads == []


def test_a_repeated_key_is_cached_once() -> None:
    driven = decode_engine()
    handoff = handed_over("a").handoff
    twice = replace(handoff, block_keys=handoff.block_keys[:1] * 2, num_tokens=8)
    driven.scheduler.prefetch(twice)
    (load,) = driven.work().loads
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, len(load.keys)),)))
    assert driven.scheduler.kv.pool.cached_keys() == handoff.block_keys[:1]
    assert driven.num_free == 32


def test_a_prefetch_leaves_room_for_waiting_requests() -> None:
    driven = DrivenScheduler(7, with_connector=True, role="decode")
    driven.add(request("a", 8, max_tokens=4), request("b", 12))
    driven.scheduler.prefetch(_first_blocks(handed_over("c", 16, first_token=0).handoff, 4))
    (load,) = driven.work().loads
    assert len(load.keys) == 7 - 1 - 2 - 3


def test_events_of_prefetched_blocks_have_their_parent() -> None:
    driven = decode_engine()
    handoff = handed_over("a", 20).handoff
    first, second, third, fourth, *_ = handoff.block_keys
    driven.scheduler.prefetch(_first_blocks(handoff, 1))
    (load,) = driven.work().loads
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 1),)))
    driven.scheduler.kv.events.start_recording()
    rest = replace(handoff, block_keys=handoff.block_keys[1:4], num_tokens=16)
    driven.scheduler.prefetch(rest)
    (load,) = driven.work().loads
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 3),)))
    (stored,) = driven.scheduler.kv.events.take_events()
    assert isinstance(stored, BlocksStored)
    assert (stored.keys, stored.parent) == ((second, third, fourth), first)


def test_a_request_does_not_wait_for_a_prefetch_that_timed_out() -> None:
    driven = decode_engine(kv_transfer_timeout_s=5.0)
    submitted = handed_over("a")
    driven.scheduler.prefetch(_first_blocks(submitted.handoff, 1))
    driven.work()
    driven.add(submitted)
    driven.step()
    driven.now = 5.0
    driven.scheduler.expire()
    driven.step()
    (load,) = driven.work().loads
    assert load.keys == submitted.handoff.block_keys


def _first_blocks(handoff: KvHandoff, count: int) -> KvHandoff:
    return replace(handoff, block_keys=handoff.block_keys[:count], num_tokens=4 * count)


def test_a_prefetch_in_doubt_does_not_block_running_requests() -> None:
    driven = DrivenScheduler(8, with_connector=True, role="decode", kv_transfer_timeout_s=5.0)
    load = start_prefetch_beside_two_running(driven)
    driven.scheduler.apply(TransferResults(doubted=(load.job_id,)))
    for _ in range(60):
        driven.step()
        driven.end_saves(job.job_id for job in driven.answer().saves)
    assert driven.scheduler.num_unfinished == 0
    assert driven.scheduler.load().num_preemptions == 1
    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 0, "unavailable"),)))
    assert driven.num_free == 8
