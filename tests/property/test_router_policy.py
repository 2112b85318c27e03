"""Properties of the routing policy that hold for any fleet."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.policy import (
    ReplicaState,
    pick_decode,
    pick_prefill,
    wants_remote_prefill,
)

BLOCK_SIZE = 16


@st.composite
def replica_states(draw, replica_id: str = "r"):
    num_blocks = draw(st.integers(1, 100))
    return ReplicaState(
        replica_id=replica_id,
        num_requests=draw(st.integers(0, 8)),
        num_queued_tokens=draw(st.integers(0, 500)),
        num_free_blocks=draw(st.integers(0, num_blocks)),
        num_blocks=num_blocks,
        overlap_blocks=draw(st.integers(0, 12)),
        weight=draw(st.sampled_from((0.1, 0.5, 1.0))),
    )


@st.composite
def fleets(draw):
    states = draw(st.lists(replica_states(), min_size=1, max_size=5))
    return [replace(state, replica_id=f"r{i}") for i, state in enumerate(states)]


def chosen(fleet, replica_id):
    return next(state for state in fleet if state.replica_id == replica_id)


def test_an_empty_fleet_gives_no_replica():
    assert pick_decode([], 3) is None
    assert pick_prefill([], 30, BLOCK_SIZE) is None


@given(fleets(), st.integers(1, 12), st.integers(0, 1000))
def test_choices_do_not_depend_on_the_order_of_candidates(fleet, num_blocks, seed):
    shuffled = random.Random(seed).sample(fleet, len(fleet))
    num_tokens = num_blocks * BLOCK_SIZE
    assert pick_decode(fleet, num_blocks) == pick_decode(shuffled, num_blocks)
    assert pick_prefill(fleet, num_tokens, BLOCK_SIZE) == pick_prefill(
        shuffled, num_tokens, BLOCK_SIZE
    )


@given(fleets(), st.integers(1, 12))
def test_a_decode_replica_with_room_is_preferred(fleet, num_blocks):
    def has_room(state):
        return max(num_blocks - state.overlap_blocks, 0) <= state.num_free_blocks

    best = chosen(fleet, pick_decode(fleet, num_blocks))
    assert has_room(best) or not any(has_room(state) for state in fleet)


@given(fleets(), st.integers(1, 12))
def test_no_decode_replica_is_better_in_every_respect(fleet, num_blocks):
    best = chosen(fleet, pick_decode(fleet, num_blocks))
    for state in fleet:
        held = state.num_blocks - state.num_free_blocks
        best_held = best.num_blocks - best.num_free_blocks
        assert not (
            state.overlap_blocks > best.overlap_blocks
            and best.overlap_blocks < num_blocks
            and held < best_held
            and state.weight >= best.weight
            and state.num_free_blocks > best.num_free_blocks
        )


@given(fleets(), st.integers(1, 200))
def test_a_chosen_prefill_replica_stays_chosen_with_more_overlap_or_less_queue(fleet, num_tokens):
    winner = pick_prefill(fleet, num_tokens, BLOCK_SIZE)
    for better in (
        {"overlap_blocks": chosen(fleet, winner).overlap_blocks + 1},
        {"num_queued_tokens": 0},
        {"num_requests": 0},
    ):
        improved = [
            replace(state, **better) if state.replica_id == winner else state for state in fleet
        ]
        assert pick_prefill(improved, num_tokens, BLOCK_SIZE) == winner


def test_costs_are_the_documented_ones():
    idle = ReplicaState("idle", 0, 0, 100, 100, overlap_blocks=0)
    warm = ReplicaState("warm", 1, 40, 95, 100, overlap_blocks=6)
    assert pick_decode([idle, warm], 8) == "warm"  # 2 missing + 5 held < 8 missing
    assert pick_decode([idle, warm], 4) == "idle"  # 0 missing + 5 held > 4 missing
    assert pick_prefill([idle, warm], 128, 16) == "warm"  # 32 + 40 queued < 128
    assert pick_prefill([idle, warm], 40, 16) == "idle"  # 1 + 40 queued > 40


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 100))
def test_remote_prefill_is_for_long_uncached_remainders(num_tokens, cached, threshold):
    wants = wants_remote_prefill(num_tokens, cached, threshold)
    # At least the last token is computed, whatever is cached.
    assert wants == (max(num_tokens - cached, 1) > threshold)
    if wants:
        assert wants_remote_prefill(num_tokens + 1, cached, threshold)
        assert wants_remote_prefill(num_tokens, 0, threshold)


# Slow start.


@given(fleets(), st.integers(1, 12), st.integers(1, 10))
def test_replicas_that_start_together_are_chosen_as_if_none_did(fleet, num_blocks, tenths):
    starting = [replace(state, weight=tenths / 10) for state in fleet]
    settled = [replace(state, weight=1.0) for state in fleet]
    num_tokens = num_blocks * BLOCK_SIZE
    assert pick_decode(starting, num_blocks) == pick_decode(settled, num_blocks)
    assert pick_prefill(starting, num_tokens, BLOCK_SIZE) == pick_prefill(
        settled, num_tokens, BLOCK_SIZE
    )


@given(replica_states(), st.integers(1, 12))
def test_the_only_replica_is_chosen_however_new_it_is(state, num_blocks):
    assert pick_decode([state], num_blocks) == state.replica_id
    assert pick_prefill([state], num_blocks * BLOCK_SIZE, BLOCK_SIZE) == state.replica_id


@given(fleets(), st.integers(1, 12))
def test_a_chosen_replica_stays_chosen_with_more_weight(fleet, num_blocks):
    num_tokens = num_blocks * BLOCK_SIZE
    for pick in (
        lambda states: pick_decode(states, num_blocks),
        lambda states: pick_prefill(states, num_tokens, BLOCK_SIZE),
    ):
        winner = pick(fleet)
        heavier = [
            replace(state, weight=1.0) if state.replica_id == winner else state for state in fleet
        ]
        assert pick(heavier) == winner


def share_of_new(weight, num_prompts=550):
    """Sends equal prompts, none of which ends, to an old replica and one of this weight."""
    fleet = {
        "new": ReplicaState("new", 0, 0, 10_000, 10_000, 0, weight=weight),
        "old": ReplicaState("old", 0, 0, 10_000, 10_000, 0),
    }
    prefilled = dict.fromkeys(fleet, 0)
    for _ in range(num_prompts):
        best = pick_decode(list(fleet.values()), 4)
        fleet[best] = replace(fleet[best], num_free_blocks=fleet[best].num_free_blocks - 4)
        first = pick_prefill(list(fleet.values()), 64, BLOCK_SIZE)
        tokens = fleet[first].num_queued_tokens + 64
        fleet[first] = replace(fleet[first], num_queued_tokens=tokens)
        prefilled[first] += 1
    num_decoded = (10_000 - fleet["new"].num_free_blocks) // 4
    return num_decoded / num_prompts, prefilled["new"] / num_prompts


def test_the_share_of_a_new_replica_follows_its_weight():
    for weight in (0.1, 0.3, 0.5, 1.0):
        for share in share_of_new(weight):
            assert abs(share - weight / (1 + weight)) < 0.01
