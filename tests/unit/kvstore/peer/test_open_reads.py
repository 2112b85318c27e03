"""`OpenReads`: the calls of OpenBlocks that find the blocks of a load."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.v1 import kv_peer_pb2 as pb
from kvstore.codec import HEADER_BYTES
from kvstore.peer.address import PeerAddress
from kvstore.peer.open_reads import BlockRequest, OpenReads
from kvstore.store import StoreUnavailableError

TIMEOUT_S = 10.0
ADDRESS = PeerAddress("127.0.0.1:1", bytes(16))
KEYS = tuple(bytes([i // 256, i % 256]) for i in range(3000))


def header(key):
    return key.ljust(HEADER_BYTES, b"-")


class FakePeer:
    """Lends the first `num_lent` blocks for `granted_ms`, and records the requested keys."""

    def __init__(self):
        self.address = ADDRESS
        self.stub = self
        self.requested_keys = []
        self.num_lent = len(KEYS)
        self.ranges_per_block = 0  # unknown until a response names it
        self.granted_ms = int(TIMEOUT_S * 1000)
        self.failures = []
        self.is_called, self.may_continue = threading.Event(), threading.Event()
        self.may_continue.set()

    def OpenBlocks(self, request, timeout):
        self.is_called.set()
        assert self.may_continue.wait(TIMEOUT_S)
        if self.failures:
            raise self.failures.pop()
        self.requested_keys.append(tuple(request.blocks.keys))
        lent = [key for key in request.blocks.keys if key in KEYS[: self.num_lent]]
        return pb.OpenBlocksResponse(
            read_id=len(self.requested_keys),
            locations=pb.KvBlockLocations(
                headers=b"".join(map(header, lent)), num_ranges=[0] * len(lent)
            ),
            timeout_ms=min(self.granted_ms, request.timeout_ms),
        )


class FakeCloser:
    def __init__(self):
        self.closed = []

    def add(self, address, read_id):
        self.closed.append((address, read_id))


@pytest.fixture
def peer():
    return FakePeer()


@pytest.fixture
def closer():
    return FakeCloser()


@pytest.fixture
def reads(closer):
    reads = OpenReads(closer)
    reads.ranges_per_block = 32  # so that a call is for 512 blocks
    return reads


def piece(first, count, *, load_id=1, num_blocks=100, timeout_s=TIMEOUT_S):
    return BlockRequest("lease", load_id, KEYS[:num_blocks], KEYS[first:][:count], "", timeout_s)


def headers(reads, peer, request):
    found = reads.find(peer, request).leading(request.keys).headers
    return [found[start:][:2] for start in range(0, len(found), HEADER_BYTES)]


def test_the_pieces_of_a_load_share_one_call(reads, peer):
    for first in range(0, 100, 20):
        assert headers(reads, peer, piece(first, 20)) == list(KEYS[first : first + 20])
    assert peer.requested_keys == [KEYS[:100]]


def test_concurrent_pieces_in_any_order_share_one_call(reads, peer):
    peer.may_continue.clear()
    with ThreadPoolExecutor(4) as pool:
        found = {3: pool.submit(headers, reads, peer, piece(60, 20))}
        assert peer.is_called.wait(TIMEOUT_S)
        found |= {i: pool.submit(headers, reads, peer, piece(20 * i, 20)) for i in (1, 0, 2)}
        peer.may_continue.set()
        for i, each in found.items():
            assert each.result(TIMEOUT_S) == list(KEYS[20 * i :][:20])
    assert len(peer.requested_keys) == 1


def test_the_list_ends_at_the_first_missing_block(reads, peer):
    peer.num_lent = 30
    assert headers(reads, peer, piece(20, 20)) == list(KEYS[20:30])
    assert headers(reads, peer, piece(40, 20)) == []
    assert len(peer.requested_keys) == 1


def test_blocks_that_exceed_a_message_are_requested_in_parts(reads, peer):
    for first in range(0, 3000, 300):
        assert headers(reads, peer, piece(first, 300, num_blocks=3000)) == list(KEYS[first:][:300])
    assert [(KEYS.index(keys[0]), KEYS.index(keys[-1])) for keys in peer.requested_keys] == [
        (0, 511),
        (0, 1023),
        (512, 1535),
        (1024, 2047),
        (1536, 2559),
        (2048, 2999),
    ]


def test_a_piece_may_skip_blocks(reads, peer):
    keys = KEYS[500:530:7]
    request = replace(piece(500, 30, num_blocks=3000), keys=keys)
    assert headers(reads, peer, request) == list(keys)


def test_a_piece_larger_than_the_bound_is_requested_in_one_call(reads, peer):
    assert len(headers(reads, peer, piece(0, 2000, num_blocks=3000))) == 2000


@pytest.mark.parametrize(("ranges_per_block", "num_blocks"), [(1280, 12), (20_000, 1)])
def test_blocks_of_many_ranges_are_requested_in_smaller_parts(
    reads, peer, ranges_per_block, num_blocks
):
    reads.ranges_per_block = ranges_per_block
    for first in range(24):
        assert headers(reads, peer, piece(first, 1)) == [KEYS[first]]
    assert peer.requested_keys == [KEYS[i:][:num_blocks] for i in range(0, 24, num_blocks)]


def test_a_lender_that_grants_less_time_needs_no_more_calls(reads, peer):
    peer.granted_ms = int(TIMEOUT_S * 1000 * 0.4)
    found = [reads.find(peer, piece(first, 20)) for first in range(0, 100, 20)]
    assert len(peer.requested_keys) == 1
    assert found[-1].remaining_s <= TIMEOUT_S * 0.4


def test_blocks_whose_read_ends_too_soon_are_requested_again(reads, peer, closer, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reads.find(peer, piece(0, 20))
    now += TIMEOUT_S * 0.2
    reads.find(peer, piece(20, 20))
    assert len(peer.requested_keys) == 1
    now += TIMEOUT_S * 0.1
    reads.find(peer, piece(40, 20))
    assert len(peer.requested_keys) == 2
    now += TIMEOUT_S * 0.75  # the first read has ended by now
    reads.find(peer, piece(60, 20))
    assert peer.requested_keys == [KEYS[:100]] * 3
    assert closer.closed == []  # a thread may still use one of the reads
    reads.end(1)
    assert closer.closed == [(ADDRESS, 2), (ADDRESS, 3)]


def test_a_load_that_ends_closes_its_reads_and_no_others(reads, peer, closer):
    reads.find(peer, piece(0, 20, load_id=1))
    reads.find(peer, piece(0, 20, load_id=2))
    reads.end(1)
    assert closer.closed == [(ADDRESS, 1)]
    reads.end(1)
    reads.end(3)
    assert closer.closed == [(ADDRESS, 1)]


def test_a_failed_call_is_repeated_for_the_next_piece(reads, peer):
    peer.failures = [ValueError("closed channel")]
    with pytest.raises(ValueError, match="closed channel"):
        reads.find(peer, piece(0, 20))
    assert headers(reads, peer, piece(0, 20)) == list(KEYS[:20])


def test_a_piece_waits_for_the_call_of_another_no_longer_than_its_timeout(reads, peer):
    peer.may_continue.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(headers, reads, peer, piece(0, 20))
        assert peer.is_called.wait(TIMEOUT_S)
        with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
            reads.find(peer, piece(20, 20, timeout_s=0.01))
        peer.may_continue.set()
        assert first.result(TIMEOUT_S) == list(KEYS[:20])


def test_a_peer_that_does_not_answer_delays_no_other_one_of_the_same_load(reads, peer):
    other = FakePeer()
    other.address = PeerAddress("127.0.0.1:2", bytes(16))
    peer.may_continue.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(headers, reads, peer, piece(0, 20))
        assert peer.is_called.wait(TIMEOUT_S)
        assert headers(reads, other, piece(0, 20)) == list(KEYS[:20])
        peer.may_continue.set()
        assert first.result(TIMEOUT_S) == list(KEYS[:20])


def test_the_reads_of_a_load_at_all_its_peers_are_closed(reads, peer, closer):
    other = FakePeer()
    other.address = PeerAddress("127.0.0.1:2", bytes(16))
    for each in (peer, other):
        headers(reads, each, piece(0, 20))
    reads.end(1)
    assert closer.closed == [(ADDRESS, 1), (other.address, 1)]
