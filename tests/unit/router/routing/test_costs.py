"""Costs in seconds, part by part."""

from dataclasses import replace

import pytest

from router.routing.candidate import Candidate, Prompt, with_speeds
from router.routing.costs import (
    PrefillPlaces,
    compare_places,
    decode_cost,
    prefill_cost,
    wants_remote_prefill,
)
from tests.support.routing import cached_blocks

FAST = Candidate(
    replica_id="fast",
    num_seats=10,
    prompt_token_s=0.001,
    decode_step_s=0.05,
    num_free_blocks=100,
    num_blocks=100,
    load_token_s=0.0001,
    store_ids=("store",),
)


def candidate(**facts):
    return replace(FAST, **facts)


def prompt(num_tokens=1000, cached=0, stored=0, kv=None, **facts):
    match = cached_blocks({"fast": cached}, stored, None if kv is None else {"fast": kv})
    return Prompt(num_tokens=num_tokens, block_size=10, match=match, **facts)


def test_a_prompt_costs_its_uncached_tokens_and_the_queue():
    cost = prefill_cost(candidate(queue_s=0.3), prompt(cached=60))
    assert (cost.cached_tokens, cost.uncached_tokens) == (600, 400)
    assert (cost.compute_s, cost.queue_s, cost.load_s) == (pytest.approx(0.4), 0.3, 0.0)
    assert cost.seconds == pytest.approx(0.7)
    assert cost.backlog_s == 0.3


def test_half_the_speed_is_twice_the_cost():
    slow = candidate(prompt_token_s=0.002, decode_step_s=0.1)
    assert prefill_cost(slow, prompt()).seconds == 2 * prefill_cost(FAST, prompt()).seconds
    assert decode_cost(slow, prompt()).decode_s == 2 * decode_cost(FAST, prompt()).decode_s


def test_stored_tokens_are_loaded_if_that_is_quicker():
    cost = prefill_cost(FAST, prompt(cached=10, stored=60))
    assert (cost.uncached_tokens, cost.load_s) == (400, pytest.approx(0.05))
    assert cost.compute_s == pytest.approx(0.4)
    computed = prefill_cost(candidate(load_token_s=0.01), prompt(cached=10, stored=60))
    assert (computed.uncached_tokens, computed.load_s) == (900, 0.0)
    no_store = prefill_cost(candidate(store_ids=()), prompt(stored=60))
    assert no_store.uncached_tokens == 1000
    assert prefill_cost(FAST, prompt(cached=80, stored=60)).load_s == 0.0


@pytest.mark.parametrize("cached", [100, 200])
def test_a_token_is_always_computed(cached):
    assert prefill_cost(FAST, prompt(cached=cached)).uncached_tokens == 1
    assert prefill_cost(FAST, prompt(stored=cached)).uncached_tokens == 1


def test_prompts_whose_log_probabilities_are_wanted_reuse_nothing():
    assert prefill_cost(FAST, prompt(cached=60, reuses_kv=False)).uncached_tokens == 1000


def test_decode_costs_its_streams_per_seat_and_what_has_to_be_moved():
    cost = decode_cost(candidate(num_requests=4), prompt(cached=60, num_output_tokens=100))
    assert cost.decode_s == pytest.approx(100 * 0.05 * 5 / 10)
    assert cost.load_s == pytest.approx(400 * 0.0001)
    assert (cost.compute_s, cost.queue_s) == (0.0, 0.0)
    assert cost.seconds == pytest.approx(2.54)


def test_decode_without_a_prefill_tier_pays_for_the_prompt():
    cost = decode_cost(candidate(queue_s=0.5), prompt(cached=60, has_prefill_tier=False))
    assert (cost.compute_s, cost.queue_s, cost.load_s) == (pytest.approx(0.4), 0.5, 0.0)


def test_decode_lacks_room_for_blocks_that_are_not_there():
    few = candidate(num_free_blocks=39)
    assert decode_cost(few, prompt(cached=60)).lacks_room
    assert not decode_cost(few, prompt(cached=61)).lacks_room


def test_a_replica_that_starts_is_as_costly_as_its_weight_says():
    starting = candidate(weight=0.1, queue_s=1.0)
    cost = prefill_cost(starting, prompt())
    assert (cost.seconds, cost.backlog_s) == (pytest.approx(20.0), pytest.approx(10.0))


# Speeds that are not known.


def test_unknown_speeds_are_those_of_the_others():
    old = candidate(
        replica_id="old", prompt_token_s=0.0, decode_step_s=0.0, num_queued_tokens=50, queue_s=0.0
    )
    slow = candidate(prompt_token_s=0.003, decode_step_s=0.15)
    known = {c.replica_id: c for c in with_speeds([old, FAST])}
    assert known["fast"] == FAST
    assert (known["old"].prompt_token_s, known["old"].decode_step_s) == (0.001, 0.05)
    assert known["old"].queue_s == pytest.approx(0.05)
    filled, *_ = with_speeds([old, FAST, slow])
    assert filled.prompt_token_s == pytest.approx(0.002)


def test_without_any_speed_all_are_equal():
    (one,) = with_speeds([Candidate(replica_id="a")])
    assert one.has_speeds
    assert prefill_cost(one, prompt()).seconds > 0
    assert decode_cost(one, prompt()).seconds > 0


# Prefill here or there.


def place(num_tokens, *, num_requests=0, prefill_queue_s=0.0, cached=0, **facts):
    decode = candidate(num_requests=num_requests, **facts)
    remote = prefill_cost(candidate(replica_id="p", queue_s=prefill_queue_s), prompt(num_tokens))
    return compare_places(decode, prompt(num_tokens, cached=cached), remote)


def test_a_local_prefill_delays_those_that_decode():
    assert place(1000, num_requests=9).local_s == pytest.approx(10 * 1.0)
    assert place(1000).local_s == pytest.approx(2 * 1.0)
    assert place(1000, cached=50, queue_s=0.2).local_s == pytest.approx(2 * 0.5 + 0.2)


def test_a_remote_prefill_has_a_queue_and_moves_bytes():
    assert place(1000, prefill_queue_s=3.0).remote_s == pytest.approx(1.0 + 3.0 + 0.1 + 0.004)
    assert place(1000, load_token_s=0.01).remote_s == pytest.approx(1.0 + 10.0 + 0.004)


def test_the_costs_decide_where_a_prompt_is_computed():
    assert wants_remote_prefill(1000, place(1000), None)
    assert not wants_remote_prefill(1000, place(1000, load_token_s=0.01), None)
    assert wants_remote_prefill(1000, place(1000, num_requests=20, load_token_s=0.01), None)
    assert not wants_remote_prefill(1000, place(1000, prefill_queue_s=30.0), None)
    assert not wants_remote_prefill(500, place(1000, cached=50, prefill_queue_s=1.0), None)


def test_very_short_remainders_stay_and_without_speeds_the_others_go():
    cheap = PrefillPlaces(local_s=1.0, remote_s=0.0)
    assert not wants_remote_prefill(16, cheap, None)
    assert wants_remote_prefill(17, cheap, None)
    assert wants_remote_prefill(17, None, None)
    assert compare_places(FAST, prompt(), None) is None
    unknown = candidate(prompt_token_s=0.0)
    assert compare_places(unknown, prompt(), prefill_cost(FAST, prompt())) is None


@pytest.mark.parametrize(("num_tokens", "is_remote"), [(100, False), (101, True)])
def test_a_number_fixes_the_longest_local_remainder(num_tokens, is_remote):
    assert wants_remote_prefill(num_tokens, PrefillPlaces(1.0, 0.0), 100) == is_remote
    assert wants_remote_prefill(num_tokens, PrefillPlaces(0.0, 1.0), 100) == is_remote


def test_a_handoff_moves_only_the_kv_that_decode_lacks_though_it_lacks_states():
    hybrid = prompt(cached=10, kv=60)
    assert decode_cost(FAST, hybrid).load_s == pytest.approx(400 * 0.0001)
    assert decode_cost(candidate(num_free_blocks=40), hybrid).lacks_room is False
    alone = prompt(cached=10, kv=60, has_prefill_tier=False)
    assert decode_cost(FAST, alone).compute_s == pytest.approx(0.9)
    assert decode_cost(candidate(num_free_blocks=40), alone).lacks_room
    remote = prefill_cost(FAST, hybrid)
    moved_s = compare_places(FAST, prompt(cached=10), remote).remote_s
    assert moved_s - compare_places(FAST, hybrid, remote).remote_s == pytest.approx(0.05)
    whole = prompt(cached=10, kv=60, reuses_kv=False)
    assert decode_cost(FAST, whole).load_s == pytest.approx(0.1)
