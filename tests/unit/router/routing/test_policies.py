"""The routing policies, one by one, and how they are named."""

from collections import Counter
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags import plugins
from router.routing.candidate import Candidate, Prompt, beginning_key
from router.routing.policies import POLICIES, make_policy
from router.routing.policy import PolicySettings
from tests.support.routing import cached_blocks

BLOCK = 10


def policy(name, **settings):
    return make_policy(name, PolicySettings(**settings))


def candidate(replica_id, **facts):
    speeds = {"prompt_token_s": 0.001, "decode_step_s": 0.05, "num_seats": 64}
    room = {"num_free_blocks": 10_000, "num_blocks": 10_000}
    return Candidate(replica_id=replica_id, **(speeds | room | facts))


def prompt(cached=None, num_tokens=1000, **facts):
    return Prompt(
        num_tokens=num_tokens, block_size=BLOCK, match=cached_blocks(cached or {}), **facts
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_the_same_form(name):
    chooser = policy(name)
    assert chooser.pick_prefill([], prompt()) is None
    assert chooser.pick_decode([], prompt()) is None
    only = chooser.pick_decode([candidate("a", weight=0.1, num_free_blocks=0)], prompt())
    assert (only.replica_id, only.num_candidates, only.tier) == ("a", 1, "decode")
    several = chooser.pick_prefill([candidate(each) for each in "abcde"], prompt())
    assert (several.policy, several.num_candidates, len(several.costs)) == (name, 5, 3)
    assert several.replica_id == several.costs[0].replica_id == several.cost.replica_id
    assert len({cost.replica_id for cost in several.costs}) == 3
    assert several.reason


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_decode_replicas_with_room(name):
    full = [candidate(each, num_free_blocks=99) for each in "abd"]
    chooser = policy(name)
    for number in range(20):
        request = prompt(key=bytes([number]))
        assert chooser.pick_decode([*full, candidate("c")], request).replica_id == "c"


# Prefix.


def test_prefix_stays_with_the_warmest_replica_up_to_the_tolerated_delay():
    chooser = policy("prefix", max_affinity_delay_s=0.5)
    request = prompt({"warm": 80, "half": 60})
    cold, half = candidate("cold"), candidate("half")
    # The cold replica starts after 1 s, the half warm one after 0.4 s, the warm one 0.2 s after
    # its queue.
    for queue_s, chosen in ((0.0, "warm"), (0.6, "warm"), (0.8, "half"), (30.0, "half")):
        warm = candidate("warm", queue_s=queue_s)
        assert chooser.pick_prefill([cold, half, warm], request).replica_id == chosen
    late = chooser.pick_prefill([cold, half, candidate("warm", queue_s=5.2)], request)
    assert late.reason == "the warmest replica is later by 5.000 s"
    strict = policy("prefix", max_affinity_delay_s=0.0)
    assert strict.pick_prefill([half, candidate("warm", queue_s=0.3)], request).replica_id == "half"


@pytest.mark.parametrize(("num_cold_blocks", "max_queue_s"), [(0, 4.0), (60, 1.0)])
def test_affinity_waits_for_a_multiple_of_the_time_that_it_saves(num_cold_blocks, max_queue_s):
    """Replicas that cache a part of the prompt save less by another's cache."""
    chooser = policy("prefix", max_affinity_delay_s=100.0)
    request = prompt({"warm": 80, "cold": num_cold_blocks})
    for queue_s, chosen in ((max_queue_s - 0.05, "warm"), (max_queue_s + 0.05, "cold")):
        pair = [candidate("cold"), candidate("warm", queue_s=queue_s)]
        assert chooser.pick_prefill(pair, request).replica_id == chosen


def test_a_slow_replica_with_a_warm_cache_attracts_nothing_that_it_does_not_save():
    slow = candidate("slow", prompt_token_s=0.01)
    chosen = policy("prefix").pick_prefill([candidate("fast"), slow], prompt({"slow": 60}))
    assert chosen.replica_id == "fast"


def test_a_short_common_beginning_makes_no_replica_warm():
    chooser = policy("prefix", max_affinity_delay_s=10.0)
    busy, idle = candidate("busy", queue_s=0.6), candidate("idle")
    assert chooser.pick_prefill([busy, idle], prompt({"busy": 49})).replica_id == "idle"
    assert chooser.pick_prefill([busy, idle], prompt({"busy": 50})).replica_id == "busy"


def test_of_equally_warm_replicas_the_idle_one_is_chosen():
    both = [candidate("a", queue_s=0.5), candidate("b")]
    assert policy("prefix").pick_prefill(both, prompt({"a": 90, "b": 90})).replica_id == "b"


def test_nearly_equal_costs_are_decided_by_blocks():
    """A measured speed that is a little better must not attract all conversations."""
    chooser = policy("prefix")
    full = candidate("full", prompt_token_s=0.00098, cached_share=0.9)
    assert chooser.pick_prefill([full, candidate("empty")], prompt()).replica_id == "empty"
    quick = replace(full, prompt_token_s=0.0009)
    assert chooser.pick_prefill([quick, candidate("empty")], prompt()).replica_id == "full"


def test_of_nearly_equal_costs_that_of_the_sessions_home_is_chosen():
    chooser, homes = policy("prefix"), {"prefill": "p home", "decode": "d home"}
    request = prompt(homes=homes)
    for pick, home in ((chooser.pick_prefill, "p home"), (chooser.pick_decode, "d home")):
        at_home = candidate(home, cached_share=0.9)
        assert pick([at_home, candidate("other")], prompt()).replica_id == "other"
        assert pick([at_home, candidate("other")], request).replica_id == home
        busy = replace(at_home, queue_s=0.5, num_requests=9)
        assert pick([busy, candidate("other")], request).replica_id == "other"


def test_a_warmer_replica_than_the_home_is_chosen():
    request = prompt({"warm": 90}, homes={"prefill": "home"})
    chosen = policy("prefix").pick_prefill([candidate("home"), candidate("warm")], request)
    assert chosen.replica_id == "warm"


def test_decode_counts_streams_first_and_blocks_second():
    chooser = policy("prefix")
    free, used = candidate("free"), candidate("used", num_free_blocks=5_000)
    assert chooser.pick_decode([used, free], prompt()).replica_id == "free"
    assert chooser.pick_decode([used, replace(free, num_requests=1)], prompt()).replica_id == "used"


def test_decode_goes_where_its_prompt_is_if_few_more_streams_run_there():
    chooser = policy("prefix")
    request = prompt({"warm": 99}, num_output_tokens=100)
    cold = candidate("cold", load_token_s=0.001)  # 1 s to move the prompt
    for num_more, chosen in ((12, "warm"), (13, "cold")):  # 0.078 s each
        warm = candidate("warm", load_token_s=0.001, num_requests=num_more)
        assert chooser.pick_decode([cold, warm], request).replica_id == chosen


def test_a_new_replica_gets_its_share():
    chooser, queues = policy("prefix"), {"new": 0.0, "old": 0.0}
    for _ in range(550):
        pair = [
            candidate(name, queue_s=queue_s, weight=0.1 if name == "new" else 1.0)
            for name, queue_s in queues.items()
        ]
        queues[chooser.pick_prefill(pair, prompt()).replica_id] += 1.0
    assert queues["new"] / 550 == pytest.approx(0.1 / 1.1, abs=0.01)


# The others.


def test_least_load_does_not_look_at_caches():
    chooser = policy("least-load")
    pair = [candidate("warm", queue_s=0.01), candidate("idle")]
    assert chooser.pick_prefill(pair, prompt({"warm": 100})).replica_id == "idle"
    pair = [candidate("slow", decode_step_s=0.2), candidate("fast", num_requests=2)]
    assert chooser.pick_decode(pair, prompt()).replica_id == "fast"


def test_round_robin_takes_turns_on_each_tier():
    chooser, names = policy("round-robin"), "bca"
    replicas = [candidate(each, queue_s=ord(each)) for each in names]
    turns = [chooser.pick_prefill(replicas, prompt()).replica_id for _ in range(4)]
    assert turns == ["a", "b", "c", "a"]
    assert chooser.pick_decode(replicas, prompt()).replica_id == "a"
    assert chooser.pick_prefill(replicas[:1], prompt()).replica_id == "b"


def test_power_of_two_avoids_the_busiest():
    chooser = policy("power-of-two")
    replicas = [candidate(each, num_requests=index) for index, each in enumerate("abcd")]
    counts = Counter(chooser.pick_decode(replicas, prompt()).replica_id for _ in range(2000))
    assert counts["d"] == 0
    assert counts["a"] == pytest.approx(1000, abs=150)  # in half of all pairs
    assert counts["c"] == pytest.approx(333, abs=100)


def homes(chooser, names, num_keys=600, **facts):
    replicas = [candidate(each, **facts.get(each, {})) for each in names]
    keys = [bytes([number % 256, number // 256]) for number in range(num_keys)]
    return {key: chooser.pick_prefill(replicas, prompt(key=key)).replica_id for key in keys}


def test_consistent_hash_has_homes_that_most_keys_keep():
    before = homes(policy("consistent-hash"), "abcd")
    assert homes(policy("consistent-hash"), "dcab") == before
    assert all(count > 100 for count in Counter(before.values()).values())
    without = homes(policy("consistent-hash"), "abc")
    moved = [key for key, home in before.items() if without[key] != home]
    assert all(before[key] == "d" for key in moved)


def test_consistent_hash_bounds_the_load_of_a_home():
    before = homes(policy("consistent-hash"), "abcd")
    busy = {name: {"queue_s": 1.3 if name == "a" else 0.9} for name in "abcd"}
    assert "a" not in homes(policy("consistent-hash"), "abcd", **busy).values()
    fine = {name: {"queue_s": 1.2 if name == "a" else 0.95} for name in "abcd"}
    assert homes(policy("consistent-hash"), "abcd", **fine) == before


def test_prompts_with_equal_first_tokens_have_one_key():
    """However long a system prompt of all prompts is, up to 1,024 tokens, it is no key."""
    talk = [b"%d" % number for number in range(100)]
    for block_size, num_blocks in ((16, 64), (512, 2), (2048, 1)):
        key = beginning_key(talk, block_size)
        assert key == beginning_key([*talk[:num_blocks], b"x"], block_size)
        assert key != beginning_key([*talk[: num_blocks - 1], b"x", b"y"], block_size)
    assert beginning_key(talk[:1], 16) == talk[0]


# Names.


def test_other_packages_offer_policies(monkeypatch):
    point = EntryPoint(
        "last", "tests.unit.router.routing.test_policies:_", "baton.routing_policies"
    )

    class LastPolicy(POLICIES["least-load"]):
        name = "last"

        def choose(self, tier, scores, prompt):
            return scores[-1], "the last"

    monkeypatch.setattr(EntryPoint, "load", lambda _: LastPolicy)
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group, name="last": [point] if name == "last" else [],
    )
    pair = [candidate("a"), candidate("b")]
    assert policy("last").pick_prefill(pair, prompt()).replica_id == "b"
    with pytest.raises(ConfigurationError) as caught:
        policy("lust")
    assert "--routing-policy: unknown name 'lust'" in caught.value.message
    assert "consistent-hash, last, least-load, power-of-two, prefix" in caught.value.message


def test_a_name_of_something_else_is_refused():
    with pytest.raises(ConfigurationError, match="is no RoutingPolicy class"):
        policy("collections:Counter")
