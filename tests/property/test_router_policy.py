"""Properties of the routing policy that hold for any fleet."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.policy import ReplicaState, pick_decode, pick_prefill, wants_remote_prefill

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


@given(fleets(), st.integers(1, 12), st.randoms())
def test_choices_do_not_depend_on_the_order_of_candidates(fleet, num_blocks, rng):
    shuffled = rng.sample(fleet, len(fleet))
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
