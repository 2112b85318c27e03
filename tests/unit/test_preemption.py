"""Which group is preempted, how, and how it returns."""

import pytest

from engine.runner import StepCosts
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_model import expected_tokens

RECOMPUTE = {"preemption_mode": "recompute", "enable_prefix_caching": False}
SWAP = {"preemption_mode": "swap", "enable_prefix_caching": False}


def step_until_preempted(driven: DrivenScheduler) -> list[str]:
    """Steps until a group is preempted; returns the ids of those that still run."""
    for _ in range(100):
        driven.step()
        if driven.scheduler.load().num_preemptions:
            driven.scheduler.check()
            return list(driven.shares)
    raise AssertionError("nobody had to give way")


def test_the_latest_arrival_gives_way_and_comes_back() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    assert step_until_preempted(driven) == ["a"]

    shares = []
    while driven.scheduler.num_unfinished:
        driven.step()
        shares.append(driven.shares.get("b", 0))
    assert max(shares) in range(9, 17), "prompt and generated tokens, in one chunk"


def test_the_lowest_priority_gives_way_though_it_came_first() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9, priority=1))

    assert step_until_preempted(driven) == ["b"]


def test_tokens_are_the_same_after_preemption() -> None:
    for config in (RECOMPUTE, SWAP):
        driven = DrivenScheduler(num_blocks=5, num_host_blocks=8, **config)
        driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
        tokens = driven.run()

        assert driven.scheduler.load().num_preemptions > 0
        assert tokens["b"] == expected_tokens((1,) * 8, 9)


def test_a_group_gives_way_as_a_whole() -> None:
    driven = DrivenScheduler(num_blocks=10, max_num_seqs=8, **RECOMPUTE)
    group = request("group", 6, max_tokens=9, n=3)
    driven.add(request("a", 7, max_tokens=16), group)

    assert step_until_preempted(driven) == ["a"]
    load = driven.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.num_free_blocks == 10 - 4, "what a holds"
    assert driven.run()["group"] == expected_tokens((1,) * 6, 9)[-3:]


@pytest.mark.parametrize("is_search", [False, True])
def test_what_candidates_have_in_common_is_computed_again_once(is_search: bool) -> None:
    driven = DrivenScheduler(num_blocks=8, max_num_seqs=8, **RECOMPUTE)
    two = {"beam_width": 2} if is_search else {"best_of": 2}
    group = request("group", 6, max_tokens=9, **two)
    driven.add(request("a", 7, max_tokens=24), group)
    driven.run()

    starts = [chunk.start_position for batch in driven.runner.batches for chunk in batch.chunks]
    assert driven.scheduler.load().num_preemptions > 0
    assert starts.count(0) == 2 + driven.scheduler.load().num_preemptions


def test_swapped_blocks_come_back_and_nothing_is_computed_again() -> None:
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


def test_what_the_host_has_no_room_for_is_computed_again() -> None:
    driven = DrivenScheduler(num_blocks=5, num_host_blocks=1, **SWAP)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    step_until_preempted(driven)

    assert driven.scheduler.load().num_swapped_blocks == 0
    while "b" not in driven.shares:
        driven.step()
    assert driven.shares["b"] > 8


@pytest.mark.parametrize(("block_s", "swaps"), [(1e-3, True), (1.0, False)])
def test_auto_does_what_is_quicker(block_s: float, swaps: bool) -> None:
    driven = DrivenScheduler(
        num_blocks=5, num_host_blocks=8, preemption_mode="auto", enable_prefix_caching=False
    )
    costs = StepCosts(prompt_token_s=1e-3, swapped_block_s=block_s)
    driven.scheduler._admission._costs = costs
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    step_until_preempted(driven)

    assert (driven.scheduler.load().num_swapped_blocks > 0) == swaps


def test_what_beams_have_reported_is_kept_over_a_swap() -> None:
    """The third is preempted; its fenced blocks delay one beam of the second, which is preempted
    too when the first needs a block, though its other beams have reported.
    """
    driven = DrivenScheduler(num_blocks=14, num_host_blocks=50, max_num_seqs=8, **SWAP)
    driven.add(
        request("first", 5, max_tokens=15, beam_width=3),
        request("second", 6, max_tokens=12, beam_width=3),
        request("third", 2, max_tokens=16),
    )
    driven.run()

    assert driven.scheduler.load().num_preemptions >= 2


def test_nobody_new_comes_in_the_step_in_which_somebody_gives_way() -> None:
    driven = DrivenScheduler(num_blocks=5, **RECOMPUTE)
    driven.add(request("a", 7, max_tokens=9), request("b", 8, max_tokens=9))
    driven.step()
    driven.add(request("small", 1, max_tokens=1))

    assert step_until_preempted(driven) == ["a"]


def test_one_that_runs_alone_never_gives_way() -> None:
    driven = DrivenScheduler(num_blocks=4, **RECOMPUTE)
    driven.add(request("a", 4, max_tokens=13))
    driven.run()

    assert driven.scheduler.load().num_preemptions == 0
