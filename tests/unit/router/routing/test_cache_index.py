"""`CacheIndex`: prefixes, expected blocks, forms of caches, shared stores."""

import pytest

from kvstore.block_key import BlockKeyChain
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex, LastMatch

FORM = CacheForm(tokens_per_block=4, max_blocks=(100,))
KEYS = [bytes([i]) for i in range(12)]
MANY = 1000
"""More tokens than `KEYS` stand for, so that all of them count."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def index(clock):
    return CacheIndex(clock=clock)


def followed(index, replica_id, form=FORM):
    """Returns the cache of a replica whose events are followed."""
    cache = index.join(replica_id, form)
    cache.has_events = True
    return cache


def blocks(index, *replica_ids, keys=KEYS, num_tokens=MANY):
    match = index.match(keys, num_tokens)
    return [match.blocks(replica_id) for replica_id in replica_ids]


def test_one_look_up_answers_for_all_replicas(index):
    followed(index, "a").store(0, KEYS[:3], None)
    followed(index, "b").store(0, KEYS[:7], None)
    followed(index, "c")
    assert blocks(index, "a", "b", "c", "unknown") == [3, 7, 0, 0]
    assert blocks(index, "a", "b", keys=KEYS[:5]) == [3, 5]
    assert blocks(index, "a", "b", keys=[]) == [0, 0]


def test_at_least_one_token_is_left_to_compute(index):
    followed(index, "a").store(0, KEYS[:3], None)
    assert blocks(index, "a", keys=KEYS[:3], num_tokens=13) == [3]
    assert blocks(index, "a", keys=KEYS[:3], num_tokens=12) == [2]


def test_a_handoff_brings_the_states_that_a_replica_lacks(index):
    """Its KV counts then, up to its end; without one, the replica goes on where it has states."""
    form = CacheForm(tokens_per_block=4, windows=(None, 1), state_group=1, max_blocks=(100, 10))
    hybrid = followed(index, "hybrid", form)
    hybrid.store(0, KEYS[:6], None)
    hybrid.store(1, KEYS[2:3], None)
    followed(index, "none", form).store(0, KEYS[:5], None)
    followed(index, "plain").store(0, KEYS[:7], None)
    match = index.match(KEYS, MANY)
    names = ("hybrid", "none", "plain", "unknown")
    assert [match.blocks(name) for name in names] == [3, 0, 7, 0]
    assert [match.kv_blocks(name) for name in names] == [6, 5, 7, 0]


def test_blocks_after_a_hole_do_not_count_until_it_is_filled(index):
    cache = followed(index, "a")
    cache.store(0, KEYS[:8], None)
    followed(index, "b").store(0, KEYS[:8], None)
    cache.remove(0, KEYS[3:4])
    assert blocks(index, "a", "b") == [3, 8]
    cache.store(0, KEYS[3:4], KEYS[2])
    assert blocks(index, "a", "b") == [8, 8]


def test_a_snapshot_may_name_the_end_before_the_beginning(index):
    cache = followed(index, "a")
    cache.store(0, KEYS[4:8], KEYS[3])
    assert blocks(index, "a") == [0]
    cache.store(0, KEYS[:4], None)
    assert blocks(index, "a") == [8]
    cache.remove(0, KEYS[5:6])
    assert blocks(index, "a") == [5]


def test_expected_blocks_count_at_once_and_expire(index, clock):
    cache = followed(index, "a")
    index.expect("a", KEYS[:6])
    assert blocks(index, "a", "b") == [6, 0]
    cache.store(0, KEYS[:2], None)
    clock.now = 4.9
    assert blocks(index, "a") == [6]
    clock.now = 5.1
    assert blocks(index, "a") == [2], "the events have confirmed two blocks"
    assert len(index) == 2


def test_siblings_renew_what_is_expected(index, clock):
    followed(index, "a")
    index.expect("a", KEYS[:6])
    clock.now = 3.0
    index.expect("a", KEYS[:4])
    clock.now = 5.1
    assert blocks(index, "a") == [4]
    clock.now = 8.1
    assert blocks(index, "a") == [0]
    assert len(index) == 0


def test_expected_blocks_last_longer_without_events_and_are_bounded(index, clock):
    index.join("a", CacheForm(tokens_per_block=4, max_blocks=(8,)))
    index.expect("a", KEYS[:6])
    clock.now = 60.0
    assert blocks(index, "a") == [6]
    other = [bytes([100 + i]) for i in range(4)]
    index.expect("a", other)
    assert blocks(index, "a") == [4], "the end of the oldest prompt made room"
    assert blocks(index, "a", keys=other) == [4]
    clock.now = 121.0
    assert blocks(index, "a") == [0]


def test_prompts_sent_to_a_lost_replica_are_not_expected(index):
    followed(index, "a")
    index.forget("a")
    index.expect("a", KEYS)
    assert len(index) == 0


def test_a_cleared_or_forgotten_replica_has_nothing(index):
    for replica_id in ("a", "b", "c"):
        followed(index, replica_id).store(0, KEYS, None)
    index.expect("a", [*KEYS, b"x"])
    index.join("a", FORM).clear()
    index.forget("b")
    assert blocks(index, "a", "b", "c") == [0, 0, 12]
    followed(index, "a").store(0, KEYS[:1], None)
    assert blocks(index, "a", "b", "c") == [1, 0, 12]
    index.forget("a")
    index.forget("c")
    assert len(index) == 0


def test_large_caches_are_removed_bit_by_bit():
    deferred = []
    index = CacheIndex(deferred.append)
    many = [i.to_bytes(4, "big") for i in range(5000)]
    form = CacheForm(tokens_per_block=4, max_blocks=(5000,))
    followed(index, "a", form).store(0, many, None)
    index.forget("a")
    assert 0 < len(index) < 5000
    assert blocks(index, "a", keys=many, num_tokens=10**6) == [0]
    followed(index, "b", form).store(0, many[:7], None)
    assert blocks(index, "a", "b", keys=many, num_tokens=10**6) == [0, 7]
    while deferred:
        deferred.pop()()
    assert len(index) == 7
    assert blocks(index, "a", "b", keys=many, num_tokens=10**6) == [0, 7]


def test_slots_are_used_again(index):
    followed(index, "first").store(0, KEYS, None)
    for number in range(50):
        followed(index, f"r{number}").store(0, KEYS, None)
        index.forget(f"r{number}")
    (shared,) = index._shared.values()
    assert shared.num_slots == 2


def test_pools_with_longer_blocks_count_in_blocks_of_keys(index):
    followed(index, "a").store(0, KEYS[:5], None)
    long = CacheForm(tokens_per_block=12, keys_per_block=3, max_blocks=(100,))
    followed(index, "b", long).store(0, KEYS[2:9:3], None)
    index.expect("b", KEYS)
    assert blocks(index, "a", "b") == [5, 12]
    followed(index, "b", long).remove(0, KEYS[11:12])
    assert blocks(index, "a", "b") == [5, 9]
    assert blocks(index, "b", keys=KEYS[:8], num_tokens=33) == [6]


def test_a_window_needs_only_the_blocks_that_the_next_token_sees(index):
    form = CacheForm(tokens_per_block=4, windows=(None, 2), max_blocks=(100, 100))
    cache = followed(index, "a", form)
    cache.store(0, KEYS[:8], None)
    assert blocks(index, "a") == [0]
    cache.store(1, KEYS[6:8], None)
    assert blocks(index, "a") == [8]
    cache.store(1, KEYS[3:5], None)
    cache.remove(1, KEYS[6:7])
    assert blocks(index, "a") == [5]


def test_states_count_only_where_they_are_kept(index):
    form = CacheForm(tokens_per_block=4, windows=(None, 1), state_group=1, max_blocks=(100, 100))
    cache = followed(index, "a", form)
    cache.store(0, KEYS[:8], None)
    cache.store(1, [KEYS[2], KEYS[6]], None)
    assert blocks(index, "a") == [7]
    assert blocks(index, "a", keys=KEYS[:6]) == [3]
    assert blocks(index, "a", keys=KEYS[:2]) == [0]
    index.expect("a", KEYS)
    assert blocks(index, "a") == [12], "the state at the end of a prompt is kept"
    assert cache.num_stored == 8


def test_decisions_on_a_request_share_a_look_up_for_a_moment(index, clock):
    cache, last = followed(index, "a"), LastMatch()
    first = index.match(KEYS, MANY, last)
    cache.store(0, KEYS[:3], None)
    assert index.match(KEYS, MANY, last) is first
    clock.now = 0.06
    assert index.match(KEYS, MANY, last).blocks("a") == 3
    assert last.match.blocks("a") == 3
    assert index.match(KEYS, MANY, LastMatch()).blocks("a") == 3


def test_a_prompt_that_is_sent_makes_others_look_again(index):
    """They may begin alike: each of a burst must see where those before it went."""
    followed(index, "a")
    last = LastMatch()
    assert index.match(KEYS, MANY, last).blocks("a") == 0
    index.expect("unknown", KEYS)
    index.expect("a", KEYS[:5])
    assert index.match(KEYS, MANY, last).blocks("a") == 5


def test_salts_separate_prompts(index):
    tokens = list(range(40))
    chains = [BlockKeyChain(b"n", 4, cache_salt=salt) for salt in ("", "x")]
    plain, salted = (list(chain.extend(tokens)) for chain in chains)
    followed(index, "a").store(0, plain, None)
    assert blocks(index, "a", keys=plain) == [10]
    assert blocks(index, "a", keys=salted) == [0]


def test_stores_are_told_apart_and_corrected(index, clock):
    index.stored.save(["s"], KEYS[:6], 10.0)
    index.stored.save(["t"], KEYS[:8], 10.0)
    match = index.match(KEYS, MANY)
    stores = (("s",), ("s", "t"), ("u",), ())
    assert [match.stored_blocks(ids) for ids in stores] == [6, 8, 0, 0]
    index.stored.remove(["t", "u"], KEYS[2:3])
    assert match.stored_blocks(("s", "t")) == 8, "decisions on a request agree"
    assert index.match(KEYS, MANY).stored_blocks(("t",)) == 2
    clock.now = 11.0
    assert index.match(KEYS, MANY).stored_blocks(("s",)) == 0


def test_a_block_that_a_store_lacked_for_a_moment_counts_again(index, clock):
    """Nobody saves it again, as it is there."""
    index.stored.save(["s"], KEYS[:6], 100.0)
    index.stored.save(["t"], KEYS[:6], 20.0)
    index.stored.remove(["s", "t"], KEYS[2:3])
    stores = (("s",), ("t",))
    assert [index.match(KEYS, MANY).stored_blocks(ids) for ids in stores] == [2, 2]
    clock.now = 29.0
    assert [index.match(KEYS, MANY).stored_blocks(ids) for ids in stores] == [2, 0]
    clock.now = 30.0
    assert [index.match(KEYS, MANY).stored_blocks(ids) for ids in stores] == [6, 0]


def test_a_store_is_remembered_within_bounds(clock):
    index = CacheIndex(clock=clock)
    index.stored._max_keys = 4
    index.stored.save(["s"], KEYS[:6], 10.0)
    assert index.match(KEYS, MANY).stored_blocks(("s",)) == 4
    for number in range(100):
        index.stored.save([str(number)], KEYS[:1], 10.0)
    assert len(index.stored) == 16
