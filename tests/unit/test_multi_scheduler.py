"""`multi://`, the scheduler half: order of members, members that fail, terms of handoffs."""

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


def test_a_look_up_asks_each_for_what_those_before_it_lack(peer, store, other):
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


def test_a_look_up_ends_with_the_first_that_has_all(store, other):
    store.objects = set(KEYS)
    both = Members(store, other)
    job = both.scheduler.lookup(KEYS)
    both.start()
    store.answer(store.pending[0])

    assert both.step().lookups == (LookupResult(job, 5),)
    assert not other.pending


def test_among_peers_a_look_up_finds_nothing_at_once(peer):
    both = Members(peer, FakeMember("another", finds_by_key=False))
    assert both.scheduler.finds_by_key is False
    assert both.scheduler.num_found(both.scheduler.lookup(KEYS)) == 0


def test_a_look_up_that_is_forgotten_is_taken_back_where_it_is_open(store, other):
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
def test_what_the_first_cannot_give_the_next_is_asked_for(peer, store, error):
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


def test_who_lacked_one_block_is_asked_for_the_next_and_who_did_not_answer_is_not(store, other):
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


def test_who_did_not_answer_is_not_asked_for_what_comes_later(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    store.end_load(store.pending[0], 0, "timed out")
    both.step()
    other.end_load(other.pending[0], 3, "missing")

    assert both.step().loads == (LoadResult(job, 3, "timed out"),)
    assert not store.pending


def test_a_load_that_nobody_can_end_says_the_worst_that_it_heard(peer, store):
    both = Members(peer, store)
    job = both.scheduler.load(KEYS, BLOCKS, both.scheduler.make_handoff("h", b"n", KEYS, 20))
    both.start()
    peer.end_load(peer.pending[0], 0, "timed out")
    both.step()
    store.end_load(store.pending[0], 0, "missing")
    assert both.step().loads == (LoadResult(job, 0, "timed out"),)


def test_what_a_look_up_found_is_not_asked_of_peers(peer, store):
    both = Members(peer, store)
    both.scheduler.load(KEYS, BLOCKS)
    both.start()
    assert not peer.pending
    assert len(store.pending) == 1


def test_a_cancelled_load_goes_to_nobody_else(peer, store):
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


def test_a_cancelled_load_that_came_whole_is_whole(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    both.scheduler.cancel_load(job)
    store.end_load(store.pending[0], 5, "")
    assert both.step().loads == (LoadResult(job, 5),)


def test_a_cancel_that_comes_too_late_is_nothing(store, other):
    both = Members(store, other)
    job = both.scheduler.load(KEYS, BLOCKS)
    both.start()
    store.end_load(store.pending[0], 5, "")
    both.step()
    both.scheduler.cancel_load(job)
    assert not both.scheduler.build_work()


def test_a_save_goes_to_all_and_ends_with_the_last(peer, store):
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


def test_what_no_handoff_leads_to_is_not_lent(peer, store):
    both = Members(peer, store)
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    assert not peer.pending
    store.end_save(store.pending[0])
    assert both.step().saves == (SaveResult(job, committed=True),)


def test_peers_alone_are_told_of_every_save(peer):
    both = Members(peer, FakeMember("another", finds_by_key=False))
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    for member in both.members:
        member.end_save(member.pending[0], committed=False)
    assert both.step().saves == (SaveResult(job, committed=False),)


@pytest.mark.parametrize(("carried", "committed"), [(True, True), (False, False)])
def test_only_who_carries_handoffs_commits(carried, committed):
    near, far = FakeMember("near", carries_handoffs=False), FakeMember("far")
    both = Members(near, far)
    job = both.scheduler.save(KEYS, BLOCKS)
    both.start()
    near.end_save(near.pending[0])
    far.end_save(far.pending[0], committed=carried)
    assert both.step().saves == (SaveResult(job, committed),)


def test_results_say_why_and_how_long(store, other):
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


def test_blocks_that_peers_hold_are_given_back_once_when_none_does(peer):
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


def test_a_lease_that_ended_before_the_other_members_answered_does_not_commit(peer, store):
    both = Members(peer, store)
    job = both.scheduler.save(KEYS, BLOCKS, lease_id="h")
    both.start()
    peer.end_save(peer.pending[0], is_held=True)
    both.step()
    peer.release(peer.held[0])
    both.step()
    store.end_save(store.pending[0], committed=False)
    assert both.step() == TransferResults(saves=(SaveResult(job, committed=False),))


def test_a_handoff_carries_each_members_own_terms(peer, store):
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
def test_a_handoff_without_terms_is_tried_with_none(peer, store, params):
    both = Members(peer, store)
    handoff = both.scheduler.make_handoff("h", b"n", KEYS, 20)
    both.scheduler.load(KEYS, BLOCKS, replace(handoff, connector_params=params))
    both.start()
    assert peer.pending[0].handoff.connector_params == b""


def test_leases_and_deletions_go_to_all(peer, store):
    both = Members(peer, store)
    both.scheduler.end_lease("h")
    both.scheduler.delete(KEYS[:1])
    both.start()
    assert sorted(peer.received) == sorted(store.received) == [("deletes", KEYS[0]), ("ended", "h")]


def test_params_come_back_and_nothing_else_passes():
    members = [(0, b""), (1 << 40, b"abc"), (7, bytes(300))]
    packed = pack_params(members)
    assert unpack_params(packed, 3) == members
    for wrong in (packed[:-1], packed + b"x", packed[:11]):
        assert unpack_params(wrong, 3) is None
    assert unpack_params(packed, 2) is None
    assert unpack_params(packed, 4) is None


def test_a_load_in_doubt_goes_to_no_other_member(peer, store):
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
