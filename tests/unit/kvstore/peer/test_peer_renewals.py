"""Renewals of leases, in batches until leases are lost or dropped; and `Peers`."""

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.v1 import kv_peer_pb2 as pb
from kvstore.connector import SavedSlices
from kvstore.guard.breaker import BreakerCounts
from kvstore.handoff import KvHandoff
from kvstore.peer import peers as peers_module
from kvstore.peer.address import PeerAddress, join_params
from kvstore.peer.peers import GenerationGoneError, PeerRefusedError, Peers
from kvstore.peer.renewals import Renewals
from kvstore.store import StoreUnavailableError

LEASE_S = 30.0
ADDRESSES = [PeerAddress(f"127.0.0.1:{port}", bytes([port] * 16)) for port in (1, 2)]


class FakePeer:
    """Answers RenewLeases with `gone`, or raises `failure`."""

    def __init__(self):
        self.stub = self
        self.calls = []
        self.gone = []
        self.failure = None
        self.may_continue = threading.Event()
        self.may_continue.set()

    def ask_anyway(self, call):
        return call()

    def RenewLeases(self, request, timeout):
        self.calls.append(sorted(request.lease_ids))
        self.may_continue.wait(10)
        if self.failure:
            raise self.failure
        return pb.RenewLeasesResponse(gone=self.gone)


class FakePeers:
    def __init__(self):
        self.peers = {address: FakePeer() for address in ADDRESSES}

    @contextmanager
    def use(self, address):
        yield self.peers[address]


@pytest.fixture
def peers():
    return FakePeers()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def renewals(peers, clock, monkeypatch):
    """Renewals without a thread; the test calls `run_due` instead."""
    monkeypatch.setattr(Renewals, "_start", lambda self: None)
    return Renewals(peers, 1.0, lambda: clock[0])


def handoff(name, address=ADDRESSES[0]):
    return KvHandoff(
        name, b"n", (), 0, "grpc", "xxh3-128", int(LEASE_S * 1000), address.to_params("grpc")
    )


def run_due(renewals):
    """Renews the leases that the thread would renew now."""
    if any(lease.renew_at <= renewals._clock() for *_, lease in renewals._waiting()):
        for address, lease_ids in renewals._wait_for_due().items():
            renewals._ask(address, lease_ids)


def test_the_leases_of_a_peer_are_renewed_in_one_call(renewals, peers, clock):
    for name in "abc":
        renewals.keep(handoff(name))
    renewals.keep(handoff("d", ADDRESSES[1]))
    run_due(renewals)
    assert peers.peers[ADDRESSES[0]].calls == [], (
        "a handoff that is loaded at once needs no renewal"
    )

    clock[0] += 1
    run_due(renewals)
    clock[0] += LEASE_S / 3
    run_due(renewals)
    assert peers.peers[ADDRESSES[0]].calls == [["a", "b", "c"]] * 2
    assert peers.peers[ADDRESSES[1]].calls == [["d"]] * 2


def test_a_lease_kept_twice_is_renewed_until_it_is_dropped_twice(renewals, peers, clock):
    renewals.keep(handoff("a"))
    renewals.keep(handoff("a"))
    renewals.drop("a")
    clock[0] += 1
    run_due(renewals)
    assert peers.peers[ADDRESSES[0]].calls == [["a"]]
    renewals.drop("a")
    renewals.drop("a")
    assert renewals._kept == {}


def test_each_rank_that_lends_has_a_lease_of_its_own(renewals, peers, clock):
    ranks = [SavedSlices(address.to_params("grpc"), (n,)) for n, address in enumerate(ADDRESSES)]
    renewals.slices = (0, 1)
    renewals.keep(replace(handoff("a"), connector_params=join_params(ranks)))
    peers.peers[ADDRESSES[1]].gone = ["a"]
    clock[0] += 1
    run_due(renewals)
    assert [peers.peers[address].calls for address in ADDRESSES] == [[["a"]], [["a"]]]
    assert [renewals.is_lost("a", address) for address in ADDRESSES] == [False, True]

    renewals.slices = (0,)
    renewals.keep(replace(handoff("b"), connector_params=join_params(ranks)))
    clock[0] += 1
    run_due(renewals)
    assert peers.peers[ADDRESSES[1]].calls == [["a"]], "this process reads nothing of rank 1"
    renewals.drop("a")
    renewals.drop("b")
    assert renewals._kept == {}


def test_a_lease_that_its_peer_reports_as_gone_is_lost(renewals, peers, clock):
    peers.peers[ADDRESSES[0]].gone = ["b"]
    for name in "ab":
        renewals.keep(handoff(name))
    clock[0] += 1
    run_due(renewals)
    assert not renewals.is_lost("a", ADDRESSES[0])
    assert renewals.is_lost("b", ADDRESSES[0])
    clock[0] += LEASE_S / 3
    run_due(renewals)
    assert peers.peers[ADDRESSES[0]].calls[-1] == ["a"], "a lost lease is not renewed"


@pytest.mark.parametrize("refusal", [PeerRefusedError("other KV"), GenerationGoneError("restart")])
def test_leases_of_a_peer_that_refuses_are_lost(renewals, peers, clock, refusal):
    peers.peers[ADDRESSES[0]].failure = refusal
    renewals.keep(handoff("a"))
    clock[0] += 1
    run_due(renewals)
    assert renewals.is_lost("a", ADDRESSES[0])
    assert not renewals.is_lost("unknown", ADDRESSES[0])


def test_a_lease_is_lost_if_its_peer_does_not_answer_for_its_duration(renewals, peers, clock):
    peers.peers[ADDRESSES[0]].failure = StoreUnavailableError("down")
    renewals.keep(handoff("a"))
    clock[0] += 1
    run_due(renewals)
    assert not renewals.is_lost("a", ADDRESSES[0]), "the peer may answer again"
    clock[0] += LEASE_S
    assert renewals.is_lost("a", ADDRESSES[0])


def test_a_lease_with_a_duration_of_zero_is_not_renewed_twice_at_once(renewals, peers, clock):
    renewals.keep(replace(handoff("a"), lease_ms=0))  # as handoffs of multi:// may have
    run_due(renewals)
    run_due(renewals)
    assert peers.peers[ADDRESSES[0]].calls == [["a"]]


def test_the_thread_renews_and_ends():
    peers = FakePeers()
    renewals = Renewals(peers, 1.0)
    short = KvHandoff("a", b"", (), 0, "grpc", "", 30, ADDRESSES[0].to_params("grpc"))
    renewals.keep(short)
    give_up_at = time.monotonic() + 10
    while len(peers.peers[ADDRESSES[0]].calls) < 3:
        assert time.monotonic() < give_up_at
        threading.Event().wait(0.005)
    renewals.close()
    assert not renewals._thread.is_alive()


def test_a_hanging_peer_does_not_delay_renewals_at_other_peers():
    peers = FakePeers()
    hanging, well = (peers.peers[address] for address in ADDRESSES)
    hanging.may_continue.clear()
    renewals = Renewals(peers, 1.0)
    try:
        for name, address in zip("ab", ADDRESSES, strict=True):
            renewals.keep(KvHandoff(name, b"", (), 0, "grpc", "", 30, address.to_params("grpc")))
        give_up_at = time.monotonic() + 10
        while len(well.calls) < 3:
            assert time.monotonic() < give_up_at
            threading.Event().wait(0.005)
        assert hanging.calls == [["a"]], "a peer gets one call at a time"
    finally:
        hanging.may_continue.set()
        renewals.close()


# Peers.


class FakeTransport:
    def __init__(self):
        self.removed = []

    def remove_peer(self, peer_id):
        self.removed.append(peer_id.partition("-")[0])


def address(number):
    return PeerAddress("127.0.0.1:1", number.to_bytes(16, "big"))


def test_the_number_of_remembered_peers_is_bounded(monkeypatch):
    monkeypatch.setattr(peers_module, "_MAX_PEERS", 3)
    transport = FakeTransport()
    peers = Peers(transport)
    with peers.use(address(0)) as in_use:
        for number in range(1, 10):
            with peers.use(address(number)):
                pass
        assert len(peers._peers) <= 5
        with peers.use(address(0)) as same:
            assert same is in_use, "a peer in use is kept"
    assert len(transport.removed) >= 5
    peers.close()
    assert sorted(transport.removed) == sorted(address(n).peer_id for n in range(10))
    with pytest.raises(StoreUnavailableError), peers.use(address(0)):
        pass


def test_idle_peers_are_forgotten(monkeypatch):
    monkeypatch.setattr(peers_module, "_IDLE_S", -1.0)
    transport = FakeTransport()
    peers = Peers(transport)
    for number in range(2):
        with peers.use(address(number)):
            pass
    assert transport.removed == [address(0).peer_id]
    peers.close()


def test_a_peer_whose_generation_is_gone_is_forgotten():
    transport = FakeTransport()
    peers = Peers(transport)
    with pytest.raises(GenerationGoneError), peers.use(address(0)):
        raise GenerationGoneError("restarted")
    assert set(transport.removed) == {address(0).peer_id}
    assert peers._peers == {}
    peers.close()


def test_a_peer_that_is_used_anew_keeps_its_link_while_its_idle_object_ends(monkeypatch):
    """The idle object is taken under the lock and ended outside of it."""
    monkeypatch.setattr(peers_module, "_IDLE_S", -1.0)
    links = set()
    transport = SimpleNamespace(remove_peer=links.discard)
    peers = Peers(transport)
    with peers.use(address(0)) as idle:
        links.add(idle.link_id)
    entered = ExitStack()
    close = idle.close

    def close_after_another_use():
        anew = entered.enter_context(peers.use(address(0)))
        links.add(anew.link_id)
        close()

    monkeypatch.setattr(idle, "close", close_after_another_use)
    with peers.use(address(1)), peers.use(address(0)) as anew:
        assert anew is not idle
        assert links == {anew.link_id}
    entered.close()
    peers.close()
    assert links == set()


def test_each_peer_has_its_own_breaker():
    peers = Peers()

    def fail():
        raise StoreUnavailableError("down")

    with peers.use(address(0)) as dead, peers.use(address(1)) as well:
        with pytest.raises(StoreUnavailableError):
            dead.ask(fail)
        calls = []
        with pytest.raises(StoreUnavailableError):
            dead.ask(lambda: calls.append(0))
        assert calls == [], "the open breaker refuses the call"
        assert well.ask(lambda: 7) == 7
    assert peers.breaker_counts == BreakerCounts(num_open=1, num_opened=1)
    peers.close()
    assert peers.breaker_counts == BreakerCounts(num_open=0, num_opened=1), "openings are a counter"


def test_leases_are_renewed_at_a_peer_whose_reads_fail():
    peers = Peers()

    def fail():
        raise StoreUnavailableError("busy")

    with peers.use(address(0)) as busy:
        with pytest.raises(StoreUnavailableError):
            busy.ask(fail)
        assert busy.ask_anyway(lambda: 7) == 7
        assert busy.breaker.is_open, "a renewal says nothing about reads"
        with pytest.raises(StoreUnavailableError):
            busy.ask_anyway(fail)
    assert peers.breaker_counts == BreakerCounts(num_open=1, num_opened=1)
    peers.close()


def test_a_refusal_does_not_open_the_breaker():
    peers = Peers()

    def refuse():
        raise PeerRefusedError("the lease is over")

    with peers.use(address(0)) as peer:
        with pytest.raises(PeerRefusedError):
            peer.ask(refuse)
        assert peer.ask(lambda: 7) == 7
    peers.close()


@pytest.mark.parametrize(
    "end", [lambda peers: peers.forget(address(0)), lambda peers: peers.close()]
)
def test_a_peer_that_is_added_after_it_was_forgotten_is_removed_by_its_last_user(end):
    links = set()
    peers = Peers(SimpleNamespace(remove_peer=links.discard))
    with peers.use(address(0)) as peer:
        with peers.use(address(0)) as same:
            end(peers)
            links.add(same.link_id)
        assert links == {peer.link_id}, "it may be in use"
    assert links == set()
    peers.close()
