"""Properties of routing policies that hold for any fleet."""

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.routing.candidate import Candidate, Prompt
from router.routing.costs import PrefillPlaces, prefill_scores, wants_remote_prefill
from router.routing.policies import POLICIES, make_policy
from router.routing.policy import PolicySettings
from tests.support.routing import cached_blocks

BLOCK_SIZE = 16
DETERMINISTIC = st.sampled_from([name for name in POLICIES if name != "power-of-two"])
SPEEDS = st.sampled_from((0.0, 0.001, 0.002))


@st.composite
def candidates(draw, replica_id="r"):
    num_blocks = draw(st.integers(0, 100))
    return Candidate(
        replica_id=replica_id,
        num_requests=draw(st.integers(0, 8)),
        num_seats=draw(st.integers(1, 8)),
        num_queued_tokens=draw(st.integers(0, 500)),
        queue_s=draw(st.sampled_from((0.0, 0.1, 5.0))),
        num_free_blocks=draw(st.integers(0, num_blocks)),
        num_blocks=num_blocks,
        prompt_token_s=draw(SPEEDS),
        decode_step_s=draw(SPEEDS),
        load_token_s=draw(SPEEDS),
        store_ids=draw(st.sampled_from(((), ("s",)))),
        weight=draw(st.sampled_from((0.1, 0.5, 1.0))),
    )


@st.composite
def fleets(draw):
    fleet = draw(st.lists(candidates(), min_size=1, max_size=5))
    return [replace(candidate, replica_id=f"r{i}") for i, candidate in enumerate(fleet)]


@st.composite
def prompts(draw):
    num_blocks = draw(st.integers(1, 12))
    cached = {f"r{i}": draw(st.integers(0, num_blocks)) for i in range(5)}
    return Prompt(
        num_tokens=num_blocks * BLOCK_SIZE - draw(st.integers(0, 15)),
        block_size=BLOCK_SIZE,
        match=cached_blocks(cached, draw(st.integers(0, num_blocks))),
        key=draw(st.binary(max_size=4)),
        num_output_tokens=draw(st.sampled_from((1.0, 100.0))),
        has_prefill_tier=draw(st.booleans()),
        reuses_kv=draw(st.booleans()),
    )


def picks(name, fleet, prompt):
    policy = make_policy(name, PolicySettings())
    return policy.pick_prefill(fleet, prompt), policy.pick_decode(fleet, prompt)


@given(DETERMINISTIC, fleets(), prompts(), st.integers(0, 1000))
def test_choices_do_not_depend_on_the_order_of_candidates(name, fleet, prompt, seed):
    shuffled = random.Random(seed).sample(fleet, len(fleet))
    assert picks(name, fleet, prompt) == picks(name, shuffled, prompt)


@given(st.sampled_from(list(POLICIES)), fleets(), prompts())
def test_choices_say_what_they_cost(name, fleet, prompt):
    for choice in picks(name, fleet, prompt):
        assert choice.replica_id in {candidate.replica_id for candidate in fleet}
        assert 1 <= len(choice.costs) <= min(3, choice.num_candidates)
        for cost in choice.costs:
            parts = (cost.compute_s, cost.load_s, cost.queue_s, cost.decode_s)
            assert min(parts) >= 0
            assert math.isclose(cost.seconds * cost.weight, sum(parts), abs_tol=1e-9)
            backlog_s = cost.queue_s + cost.decode_s
            assert math.isclose(cost.backlog_s * cost.weight, backlog_s, abs_tol=1e-9)
            assert 1 <= cost.uncached_tokens <= prompt.num_tokens


@given(fleets(), prompts())
def test_the_chosen_decode_replica_has_the_least_cost_of_those_with_room(fleet, prompt):
    _, choice = picks("prefix", fleet, prompt)
    assert choice.cost.seconds <= 1.05 * min(cost.seconds for cost in choice.costs)


@given(fleets(), prompts(), st.sampled_from((0.0, 0.5, 100.0)))
def test_affinity_costs_no_more_than_the_tolerated_delay(fleet, prompt, delay_s):
    policy = make_policy("prefix", PolicySettings(max_affinity_delay_s=delay_s))
    choice = policy.pick_prefill(fleet, prompt)
    assert choice.cost.seconds <= 1.05 * min(cost.seconds for cost in choice.costs) + delay_s


@given(candidates(), prompts(), st.integers(1, 12))
def test_more_in_the_cache_or_the_store_never_costs_more(candidate, prompt, num_blocks):
    def seconds(cached, stored):
        match = cached_blocks({candidate.replica_id: cached}, stored)
        return prefill_scores([candidate], replace(prompt, match=match))[0].seconds

    assert seconds(num_blocks, 0) <= seconds(0, 0) + 1e-9
    assert seconds(0, num_blocks) <= seconds(0, 0) + 1e-9
    assert seconds(num_blocks, num_blocks) <= seconds(0, num_blocks) + 1e-9


@given(fleets(), prompts())
def test_a_chosen_replica_stays_chosen_with_more_weight_or_less_queue(fleet, prompt):
    fleet = [replace(c, prompt_token_s=0.001, decode_step_s=0.001) for c in fleet]
    for change in ({"weight": 1.0}, {"queue_s": 0.0, "num_queued_tokens": 0}):
        for before, after in zip(
            picks("prefix", fleet, prompt),
            picks_with(fleet, prompt, change),
            strict=True,
        ):
            assert before.replica_id == after.replica_id


def picks_with(fleet, prompt, change):
    """Picks where the chosen replica of each tier is changed."""
    changed = []
    for tier, choice in enumerate(picks("prefix", fleet, prompt)):
        better = [
            replace(candidate, **change) if candidate.replica_id == choice.replica_id else candidate
            for candidate in fleet
        ]
        changed.append(picks("prefix", better, prompt)[tier])
    return changed


@given(st.integers(1, 1000), st.integers(0, 100), st.floats(0, 10), st.floats(0, 10))
def test_a_fixed_number_decides_alone(num_tokens, limit, local_s, remote_s):
    places = PrefillPlaces(local_s, remote_s)
    assert wants_remote_prefill(num_tokens, places, limit) == (num_tokens > limit)
    wants = wants_remote_prefill(num_tokens, places, None)
    assert wants == (num_tokens > 16 and remote_s < local_s)
