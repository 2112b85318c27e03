"""Scheduler half of `multi://`: order of members, failures of members, handoff parameters."""

from dataclasses import replace

import pytest

from kvstore.jobs import LoadJob, LoadResult, LookupResult, SaveJob, SaveResult, TransferResults
from kvstore.multi.jobs import pack_params, unpack_params
from tests.support.fake_members import FakeMember, Members

KEYS = tuple(bytes([number]) * 32 for number in range(5))
BLOCKS = (10, 11, 12, 13, 14)


@pytest.fixture
def peer():
    return FakeMember("peer", finds_by_key=False, lease_s=30)


@pytest.fixture
def store():
    return FakeMember("store", lease_s=600)


@pytest.fixture
def other():
    return FakeMember("other", lease_s=3600)


def test_a_lookup_continues_in_the_next_member_at_the_first_missing_key(peer, store, other):
    store.objects, other.objects = {KEYS[0], KEYS[1], KEYS[3]}, {KEYS[2], KEYS[3]}
    both = Members(peer, store, other)
    job = both.scheduler.lookup(KEYS)
    both.start()
    assert [lookup.keys for lookup in store.pending] == [KEYS]
    assert peer.pending == other.pending == []

    store.answer(store.pending[0])
    assert not both.step().lookups
    assert [lookup.keys for lookup in other.pending] == [KEYS[2:]]
    assert both.scheduler.num_found(job) is None

    other.answer(other.pending[0])
    assert both.step().lookups == (LookupResult(job, 4),)
    assert both.scheduler.num_found(job) == 4


def test_a_lookup_says_that_a_member_has_not_answered(peer, store, other):
    other.objects = {KEYS[0]}
    both = Members(peer, store, other)
    job = both.scheduler.lookup(KEYS)
    both.start()
    asked = store.pending.pop()
    store.results.append(LookupResult(asked.job_id, 0, "unavailable"))
    assert not both.step().lookups
    other.answer(other.pending[0])
    assert both.step().lookups == (LookupResult(job, 1, "unavailable"),)


def test_a_lookup_ends_with_the_first_member_that_has_every_key(store, other):
    store.objects = set(KEYS)
    both = Members(store, other)
    job = both.scheduler.lookup(KEYS)
    both.start()
    store.answer(store.pending[0])

    assert both.step().lookups == (LookupResult(job, 5),)
    assert not other.pending


def test_a_lookup_among_peers_ends_at_once_without_keys(peer):
    both = Members(peer, FakeMember("another", finds_by_key=False))
    assert both.scheduler.finds_by_key is False
    assert both.scheduler.num_found(both.scheduler.lookup(KEYS)) == 0


def test_a_forgotten_lookup_is_cancelled_in_the_member_where_it_is_open(store, other):
    both = Members(store, other)
    job = both.scheduler.lookup(KEYS)
    both.start()
    store.answer(store.pending[0])
    both.step()
    both.scheduler.forget_lookup(job)
    both.start()

    assert not other.pending
    assert [what for what, _ in other.received] == ["cancelled_lookups"]
    assert not both.step().lookups


@pytest.mark.parametrize("error", ["missing", "corrupt", "unavailable", "timed out", "failed"])
def test_the_next_member_loads_the_blocks_that_the_first_could_not(peer, store, error):
    both = Members(peer, store)
    handoff = both.scheduler.make_handoff("h", b"n", KEYS, 20)
    job = both.scheduler.load(KEYS, BLOCKS, handoff)
    both.start()
    peer.end_load(peer.pending[0], 2, error)

    assert not both.step().loads
    (rest,) = store.pending
    assert (rest.keys, rest.block_ids) == (KEYS[2:], BLOCKS[2:])
    store.end_load(rest, 3, "")
    assert both.step().loads == (LoadResult(job, 5),)


def test_a_load_returns_to_a_member_that_lacked_a_block_and_not_to_one_that_failed(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    store.end_load(store.pending[0], 1, "missing")
    both.step()
    other.end_load(other.pending[0], 1, "unavailable")
    both.step()
    assert store.pending[0].keys == KEYS[2:]
    store.end_load(store.pending[0], 0, "missing")

    assert both.step().loads == (LoadResult(job, 2, "unavailable"),)
    assert not other.pending


def test_a_load_does_not_return_to_a_member_that_timed_out(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    store.end_load(store.pending[0], 0, "timed out")
    both.step()
    other.end_load(other.pending[0], 3, "missing")

    assert both.step().loads == (LoadResult(job, 3, "timed out"),)
    assert not store.pending


def test_a_load_that_no_member_can_finish_has_the_worst_error(peer, store):
    both = Members(peer, store)
    job = both.scheduler.load(KEYS, BLOCKS, both.scheduler.make_handoff("h", b"n", KEYS, 20))
    both.start()
    peer.end_load(peer.pending[0], 0, "timed out")
    both.step()
    store.end_load(store.pending[0], 0, "missing")
    assert both.step().loads == (LoadResult(job, 0, "timed out"),)


def test_a_load_without_a_handoff_skips_peers(peer, store):
    both = Members(peer, store)
    both.scheduler.load(KEYS, BLOCKS)
    both.start()
    assert not peer.pending
    assert len(store.pending) == 1


def test_a_cancelled_load_does_not_continue_in_another_member(peer, store):
    both = Members(peer, store)
    job = both.scheduler.load(KEYS, BLOCKS, both.scheduler.make_handoff("h", b"n", KEYS, 20))
    both.start()
    both.scheduler.cancel_load(job)
    both.scheduler.cancel_load(job)
    both.start()
    assert [what for what, _ in peer.received] == ["cancelled_loads"]
    peer.end_load(peer.pending[0], 1, "cancelled")

    assert both.step().loads == (LoadResult(job, 1, "cancelled"),)
    assert not store.pending


def test_a_cancelled_load_that_finished_succeeds(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    both.scheduler.cancel_load(job)
    store.end_load(store.pending[0], 5, "")
    assert both.step().loads == (LoadResult(job, 5),)


def test_a_cancel_after_the_end_of_a_load_is_ignored(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    store.end_load(store.pending[0], 5, "")
    both.step()
    both.scheduler.cancel_load(job)
    assert not both.scheduler.build_work()


def test_a_save_goes_to_every_member_and_ends_with_the_last(peer, store):
    both = Members(peer, store)
    job = both.scheduler.save(KEYS, BLOCKS, 3, num_found=2, lease_id="h")
    both.start()
    for member in (peer, store):
        (saved,) = member.pending
        assert (saved.keys, saved.block_ids) == (KEYS, BLOCKS)
        assert (saved.num_tail_tokens, saved.num_found, saved.lease_id) == (3, 2, "h")
    peer.end_save(peer.pending[0])
    assert not both.step().saves
    store.end_save(store.pending[0], committed=False)
    assert both.step().saves == (SaveResult(job, committed=True),)


def test_a_save_without_a_lease_skips_peers(peer, store):
    both = Members(peer, store)
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    assert not peer.pending
    store.end_save(store.pending[0])
    assert both.step().saves == (SaveResult(job, committed=True),)


def test_every_save_goes_to_peers_if_there_are_only_peers(peer):
    both = Members(peer, FakeMember("another", finds_by_key=False))
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    for member in both.members:
        member.end_save(member.pending[0], committed=False)
    assert both.step().saves == (SaveResult(job, committed=False),)


@pytest.mark.parametrize(("carried", "committed"), [(True, True), (False, False)])
def test_only_members_that_carry_handoffs_commit_a_save(carried, committed):
    near, far = FakeMember("near", carries_handoffs=False), FakeMember("far")
    both = Members(near, far)
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    near.end_save(near.pending[0])
    far.end_save(far.pending[0], committed=carried)
    assert both.step().saves == (SaveResult(job, committed),)


def test_results_have_errors_and_durations(store, other):
    both = Members(store, other)
    load, save = both.scheduler.load(KEYS, BLOCKS), both.scheduler.save(KEYS, BLOCKS)
    both.start()
    for member, seconds in ((store, 1.0), (other, 2.0)):
        loading = next((job for job in member.pending if isinstance(job, LoadJob)), None)
        saving = next(job for job in member.pending if isinstance(job, SaveJob))
        member.pending.clear()
        member.results.append(
            SaveResult(saving.job_id, False, error="unavailable", seconds=seconds)
        )
        member.results.append(LoadResult(loading.job_id, 2, "failed", seconds))
        results = both.step()

    assert results.loads == (LoadResult(load, 4, "failed"),)
    assert results.saves == (SaveResult(save, False, error="unavailable"),)
    assert (results.loads[0].seconds, results.saves[0].seconds) == (3.0, 2.0)


def test_held_blocks_are_released_once_every_peer_has_released_them(peer):
    another = FakeMember("another", finds_by_key=False)
    both = Members(peer, another)
    job = both.scheduler.save(KEYS, BLOCKS, lease_id="h")
    both.start()
    for member in (peer, another):
        member.end_save(member.pending[0], is_held=True)
    assert both.step().saves == (SaveResult(job, committed=True, is_held=True),)
    another.release(another.held[0])
    assert not both.step()
    peer.release(peer.held[0])
    assert both.step() == TransferResults(released=(job,))
    assert not both.step()


def test_a_save_is_not_committed_if_its_lease_ended_and_the_other_member_failed(peer, store):
    both = Members(peer, store)
    job = both.scheduler.save(KEYS, BLOCKS, lease_id="h")
    both.start()
    peer.end_save(peer.pending[0], is_held=True)
    both.step()
    peer.release(peer.held[0])
    both.step()
    store.end_save(store.pending[0], committed=False)
    assert both.step() == TransferResults(saves=(SaveResult(job, committed=False),))


def test_a_handoff_contains_the_parameters_of_each_member(peer, store):
    both = Members(peer, store)
    handoff = both.scheduler.make_handoff("h", b"n", KEYS, 20)
    assert handoff.connector == both.scheduler.scheme == "multi(peer,store)"
    assert handoff.lease_ms == 30_000

    reader = Members(FakeMember("peer", finds_by_key=False), FakeMember("store"))
    reader.scheduler.keep(handoff)
    reader.scheduler.drop("h")
    reader.scheduler.load(KEYS, BLOCKS, handoff)
    reader.start()
    for reading, publishing in zip(reader.members, (peer, store), strict=True):
        own = publishing.scheduler.make_handoff("h", b"n", KEYS, 20)
        assert reading.received == [("kept", own), ("dropped", "h")]
    assert reader.members[0].pending[0].handoff == peer.scheduler.make_handoff("h", b"n", KEYS, 20)


@pytest.mark.parametrize("params", [b"", b"x", pack_params([(1, b"a")])])
def test_a_handoff_with_invalid_parameters_is_loaded_without_them(peer, store, params):
    both = Members(peer, store)
    handoff = both.scheduler.make_handoff("h", b"n", KEYS, 20)
    both.scheduler.load(KEYS, BLOCKS, replace(handoff, connector_params=params))
    both.start()
    assert peer.pending[0].handoff.connector_params == b""


def test_ended_leases_and_deletions_go_to_every_member(peer, store):
    both = Members(peer, store)
    both.scheduler.end_lease("h")
    both.scheduler.delete(KEYS[:1])
    both.start()
    assert sorted(peer.received) == sorted(store.received) == [("deletes", KEYS[0]), ("ended", "h")]


def test_parameters_survive_a_round_trip_and_invalid_ones_are_refused():
    members = [(0, b""), (1 << 40, b"abc"), (7, bytes(300))]
    packed = pack_params(members)
    assert unpack_params(packed, 3) == members
    for wrong in (packed[:-1], packed + b"x", packed[:11]):
        assert unpack_params(wrong, 3) is None
    assert unpack_params(packed, 2) is None
    assert unpack_params(packed, 4) is None


def test_a_load_in_doubt_does_not_continue_in_another_member(peer, store):
    """The first member may still write to the blocks."""
    store.objects = set(KEYS)
    both = Members(peer, store)
    job = both.scheduler.load(KEYS, BLOCKS, both.scheduler.make_handoff("h", b"n", KEYS, 5))
    both.start()
    (load,) = peer.pending
    peer.doubted.append(load.job_id)
    assert both.step() == TransferResults(doubted=(job,))

    both.scheduler.cancel_load(job)
    both.start()
    peer.end_load(load, 0, "unavailable")
    assert [result.job_id for result in both.step().loads] == [job]
    assert store.pending == []
