"""Overlapped steps: a step is scheduled while the one before it computes."""

import pytest

from engine.request import FinishReason
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_model import expected_tokens
from tests.support.reference_decoding import expected_results


def test_a_decode_is_scheduled_before_its_token_is_known() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", max_tokens=9))
    first = driven.begin()
    second = driven.begin()

    assert driven.shares == {"a": 1}
    assert second.decode_rows == (first.chunks[0].row,)
    tokens = [output.token_ids for batch in (first, second) for output in driven.end(batch)]
    assert [*tokens[0], *tokens[1]] == expected_tokens((1,) * 6, 2)


def test_a_stop_discovered_late_drops_the_token_after_it() -> None:
    stop, *_ = expected_tokens((1,) * 6, 1)
    driven = DrivenScheduler()
    driven.add(request("a", stop_token_ids=frozenset({stop})))
    first, second = driven.begin(), driven.begin()
    (output,) = driven.end(first)

    assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, (stop,))
    assert driven.num_free == 32 - 2, "the second step still writes to two blocks"
    assert driven.end(second) == []
    assert driven.num_free == 32


def test_no_step_runs_beyond_the_last_token() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", max_tokens=2))
    first, second = driven.begin(), driven.begin()

    assert driven.begin() is None
    assert [output.finish_reason for output in driven.end(first)] == [None]
    assert [output.finish_reason for output in driven.end(second)] == [FinishReason.LENGTH]


def test_a_request_that_draws_its_last_token_frees_its_budget() -> None:
    driven = DrivenScheduler(max_num_batched_tokens=4)
    driven.add(request("a", 3, max_tokens=2), request("b", 12))
    shares = []
    for _ in range(3):
        driven.begin()
        shares.append(driven.shares)

    assert shares == [{"a": 3, "b": 1}, {"b": 3, "a": 1}, {"b": 4}]


def test_an_abort_fences_the_blocks_of_a_step_in_flight() -> None:
    driven = DrivenScheduler(num_blocks=4)
    driven.add(request("a", 12, max_tokens=2))
    batch = driven.begin()
    driven.scheduler.abort(["a"])
    driven.add(request("b", 9, first_token=0, max_tokens=2))

    assert driven.begin() is None, "three blocks are fenced"
    assert driven.end(batch) == []
    driven.step()
    assert driven.shares == {"b": 9}


def test_after_a_failed_step_the_one_in_flight_counts_for_the_others_alone() -> None:
    driven = DrivenScheduler(max_num_batched_tokens=8)
    driven.add(request("a", 6))
    driven.add(request("b", 8, first_token=2), request("c", 8, first_token=3))
    first = driven.begin()
    assert driven.shares == {"a": 6, "b": 2}
    second = driven.begin()
    assert driven.shares == {"a": 1, "b": 6, "c": 1}

    assert driven.fail(first) == []
    assert driven.begin() is None, "a step of one request alone overlaps no other"
    driven.runner.execute(first)  # a runner may have executed the step before it failed
    assert driven.end(second) == []
    driven.step()
    assert driven.shares == {"a": 6}
    driven.step()
    assert driven.shares == {"b": 8}
    for first_token, (_, tokens) in enumerate(sorted(driven.run().items()), 1):
        expected = expected_tokens((first_token, *(1,) * (5 if first_token == 1 else 7)), 4)
        assert tokens == expected[-len(tokens) :]
    assert driven.num_free == 32


def test_a_failed_step_that_swaps_a_group_out_makes_it_compute_again() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, preemption_mode="swap")
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    batch = driven.begin()
    while not batch.swap_outs:
        driven.end(batch)
        batch = driven.begin()

    assert driven.shares == {}, "request a waits for the blocks of b"
    assert driven.fail(batch) == []
    assert driven.scheduler.load().num_swapped_blocks == 0
    for num_prompt, (_, rest) in zip((7, 8), sorted(driven.run().items()), strict=True):
        assert rest == expected_tokens((1,) * num_prompt, 9)[-len(rest) :]
    assert driven.num_free == 5


def test_a_failed_step_ends_the_group_that_it_swaps_in() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, preemption_mode="swap")
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    batch = driven.begin()
    while not batch.swap_ins:
        driven.end(batch)
        batch = driven.begin()

    assert [output.request_id for output in driven.fail(batch)] == ["b"]
    assert driven.scheduler.num_unfinished == 0
    assert driven.num_free == 5


def test_a_request_that_waits_outlives_a_failed_step() -> None:
    driven = DrivenScheduler(max_num_seqs=1)
    driven.add(request("a"), request("b"))
    assert [output.request_id for output in driven.fail(driven.begin())] == ["a"]

    assert driven.run()["b"] == expected_tokens((1,) * 6, 4)


def test_the_tokens_of_a_group_preempted_in_flight_count_once() -> None:
    """The step in flight draws a token for the group, which is drawn again later."""
    submitted = request("b", 8, max_tokens=9, best_of=2)
    driven = DrivenScheduler(num_blocks=8, preemption_mode="recompute")
    driven.add(request("a", 7, max_tokens=20), submitted)
    outputs, in_flight = [], driven.begin()
    while driven.scheduler.num_unfinished:
        following = driven.begin()
        if in_flight is not None:
            outputs += driven.end(in_flight)
        in_flight = following

    (best,) = [output for output in outputs if output.request_id == "b"]
    assert driven.scheduler.load().num_preemptions > 0
    (expected,) = expected_results(submitted, 64)
    assert best.token_ids == expected.token_ids
    assert best.score == pytest.approx(expected.score)
