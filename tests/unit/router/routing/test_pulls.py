"""Which replica lends a prompt's beginning, and whether that is quicker than to compute it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.pulls import AnswerTime, PrefixHolder, Pull, PullCosts, choose_pull

COSTS = PullCosts(compute_s=1e-3, load_s=1e-5, ask_s=0.01)
BLOCK_SIZE = 16


def holder(name: str, num_blocks: int, num_requests: int) -> PrefixHolder:
    return PrefixHolder(name, "host:1", num_blocks, num_requests)


def choose(
    *holders: PrefixHolder,
    costs: PullCosts = COSTS,
    num_prompt_tokens: int = 1000,
    cached_blocks: int = 0,
) -> Pull | None:
    return choose_pull(
        holders,
        costs,
        num_prompt_tokens=num_prompt_tokens,
        cached_blocks=cached_blocks,
        block_size=BLOCK_SIZE,
    )


def test_the_longest_prefix_is_pulled_from_the_least_busy_of_its_holders() -> None:
    pull = choose(
        holder("short", 20, 0),
        holder("busy", 40, 3),
        holder("idle", 40, 1),
        holder("idle too", 40, 1),
    )
    assert pull is not None
    assert (pull.holder.replica_id, pull.num_blocks, pull.num_tokens) == ("idle", 40, 640)


def test_only_what_the_replica_lacks_counts() -> None:
    pull = choose(holder("a", 40, 0), cached_blocks=38)
    assert pull is not None
    assert (pull.num_blocks, pull.num_tokens) == (40, 32)
    assert choose(holder("a", 40, 0), cached_blocks=39) is None, "too few to be worth it"
    assert choose(holder("a", 40, 0), cached_blocks=40) is None


def test_the_last_token_of_the_prompt_is_computed_in_any_case() -> None:
    pull = choose(holder("a", 4, 0), num_prompt_tokens=64)
    assert pull is not None
    assert pull.num_blocks == 3


@pytest.mark.parametrize(
    ("costs", "is_pulled"),
    [
        (COSTS, True),
        (replace(COSTS, load_s=0.9e-3), False),  # hardly faster than computing
        (replace(COSTS, ask_s=0.5), False),
        (replace(COSTS, compute_s=1e-6), False),
        (replace(COSTS, compute_s=0.0), False),  # not known yet
    ],
)
def test_a_prefix_is_pulled_if_that_clearly_saves_time(costs: PullCosts, is_pulled: bool) -> None:
    assert (choose(holder("a", 40, 0), costs=costs) is not None) == is_pulled


@given(
    holders=st.lists(
        st.builds(holder, st.text(max_size=2), st.integers(0, 200), st.integers(0, 9)),
        max_size=6,
    ),
    compute_s=st.floats(0, 1e-2),
    load_s=st.floats(0, 1e-2),
    ask_s=st.floats(0, 1),
    num_prompt_tokens=st.integers(1, 2000),
    cached_blocks=st.integers(0, 200),
)
def test_a_pull_saves_time_and_is_bounded(
    holders: list[PrefixHolder],
    compute_s: float,
    load_s: float,
    ask_s: float,
    num_prompt_tokens: int,
    cached_blocks: int,
) -> None:
    costs = PullCosts(compute_s, load_s, ask_s)
    pull = choose(
        *holders, costs=costs, num_prompt_tokens=num_prompt_tokens, cached_blocks=cached_blocks
    )
    if pull is None:
        return
    assert cached_blocks < pull.num_blocks <= (num_prompt_tokens - 1) // BLOCK_SIZE
    assert pull.holder in holders
    assert pull.holder.num_blocks >= pull.num_blocks
    assert pull.num_tokens == (pull.num_blocks - cached_blocks) * BLOCK_SIZE
    assert 0 <= pull.wait_s <= min(pull.gain_s, 2.0)
    assert ask_s + pull.num_tokens * load_s <= pull.num_tokens * compute_s


def test_answers_that_do_not_come_make_pulls_dearer_for_a_while() -> None:
    now = [0.0]
    answers = AnswerTime(lambda: now[0])
    assert answers.expected_s == pytest.approx(0.01)
    answers.add_failed(0.001)
    assert answers.expected_s == pytest.approx(0.01), "a refusal comes at once"
    for _ in range(20):
        answers.add_failed(2.0)
    costs = replace(COSTS, ask_s=answers.expected_s)
    assert answers.expected_s > 1.5
    assert choose(holder("a", 40, 0), costs=costs) is None
    answers.add(0.5)
    assert answers.expected_s < 1.8, "an answer that was quicker counts"
    now[0] = 300.0
    costs = replace(COSTS, ask_s=answers.expected_s)
    assert choose(holder("a", 40, 0), costs=costs) is not None
