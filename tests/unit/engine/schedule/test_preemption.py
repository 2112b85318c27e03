"""Preemption: the choice of a group, recomputation and swapping."""

import pytest

from engine.runner import StepCosts
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_model import expected_tokens

RECOMPUTE = {"preemption_mode": "recompute", "enable_prefix_caching": False}
SWAP = {"preemption_mode": "swap", "enable_prefix_caching": False}


def step_until_preempted(driven: DrivenScheduler) -> list[str]:
    """Runs steps until a group is preempted; returns the ids of the groups that still run."""
    for _ in range(100):
        driven.step()
        if driven.scheduler.load().num_preemptions:
            driven.scheduler.check()
            return list(driven.shares)
    raise AssertionError("no group was preempted")


def test_the_latest_arrival_is_preempted_and_resumed() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    assert step_until_preempted(driven) == ["a"]

    shares = []
    while driven.scheduler.num_unfinished:
        driven.step()
        shares.append(driven.shares.get("b", 0))
    assert max(shares) in range(9, 17), "prompt and generated tokens are recomputed in one chunk"


def test_the_least_urgent_request_is_preempted_even_if_it_arrived_first() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9, priority=-1))

    assert step_until_preempted(driven) == ["b"]


def test_tokens_are_the_same_after_preemption() -> None:
    for config in (RECOMPUTE, SWAP):
        driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, **config)
        driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
        tokens = driven.run()

        assert driven.scheduler.load().num_preemptions > 0
        assert tokens["b"] == expected_tokens((1,) * 8, 9)


def test_a_group_is_preempted_as_a_whole() -> None:
    driven = DrivenScheduler(num_blocks=10, max_num_seqs=8, **RECOMPUTE)
    group = request("group", 6, max_tokens=9, n=3)
    driven.add(request("a", 7, max_tokens=16), group)

    assert step_until_preempted(driven) == ["a"]
    load = driven.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.num_free_blocks == 10 - 4, "request a holds 4 blocks"
    assert driven.run()["group"] == expected_tokens((1,) * 6, 9)[-3:]


@pytest.mark.parametrize("is_search", [False, True])
def test_the_common_prefix_of_candidates_is_recomputed_once(is_search: bool) -> None:
    driven = DrivenScheduler(num_blocks=8, max_num_seqs=8, **RECOMPUTE)
    two = {"beam_width": 2} if is_search else {"best_of": 2}
    group = request("group", 6, max_tokens=9, **two)
    driven.add(request("a", 7, max_tokens=24), group)
    driven.run()

    starts = [chunk.start_position for batch in driven.runner.batches for chunk in batch.chunks]
    assert driven.scheduler.load().num_preemptions > 0
    assert starts.count(0) == 2 + driven.scheduler.load().num_preemptions


def test_swapped_blocks_are_restored_without_recomputation() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=4, **SWAP)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    step_until_preempted(driven)
    load = driven.scheduler.load()
    assert (load.num_swapped_blocks, load.num_waiting) == (3, 1)

    while "b" not in driven.shares:
        driven.step()
    assert driven.shares["b"] == 1
    assert driven.scheduler.load().num_swapped_blocks == 0
    driven.run()


def test_a_group_that_does_not_fit_into_the_host_pool_is_recomputed() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=1, **SWAP)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    step_until_preempted(driven)

    assert driven.scheduler.load().num_swapped_blocks == 0
    while "b" not in driven.shares:
        driven.step()
    assert driven.shares["b"] > 8


@pytest.mark.parametrize(("block_s", "swaps"), [(1e-3, True), (1.0, False)])
def test_auto_mode_chooses_the_quicker_way(block_s: float, swaps: bool) -> None:
    driven = DrivenScheduler(
        num_blocks=5, num_host_blocks=8, preemption_mode="auto", enable_prefix_caching=False
    )
    costs = StepCosts(prompt_token_s=1e-3, swapped_block_s=block_s)
    driven.scheduler._parts.preemption._costs = costs
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    step_until_preempted(driven)

    assert (driven.scheduler.load().num_swapped_blocks > 0) == swaps


def test_the_reports_of_beams_are_kept_through_a_swap() -> None:
    """The third group is preempted, and its fenced blocks delay one beam of the second group.

    The second group is preempted too when the first needs a block, although its other beams
    have reported.
    """
    driven = DrivenScheduler(num_blocks=14, num_host_blocks=50, max_num_seqs=8, **SWAP)
    driven.add(
        request("first", 5, max_tokens=15, beam_width=3),
        request("second", 6, max_tokens=12, beam_width=3),
        request("third", 2, max_tokens=16),
    )
    driven.run()

    assert driven.scheduler.load().num_preemptions >= 2


def test_no_request_is_admitted_in_a_step_that_preempts_a_group() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    driven.step()
    driven.add(request("small", 1, max_tokens=1))

    assert step_until_preempted(driven) == ["a"]


def test_a_group_that_runs_alone_is_never_preempted() -> None:
    driven = DrivenScheduler(num_blocks=4, **RECOMPUTE)
    driven.add(request("a", 4, max_tokens=13))
    driven.run()

    assert driven.scheduler.load().num_preemptions == 0
