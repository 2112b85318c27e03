"""`ReadCloser`: closes reads at their peers in batches, on a thread of its own."""

import threading
from contextlib import contextmanager

import pytest

from kvstore.peer.address import PeerAddress
from kvstore.peer.open_reads import ReadCloser
from kvstore.store import StoreUnavailableError

TIMEOUT_S = 10.0
ADDRESSES = [PeerAddress(f"127.0.0.1:{port}", bytes([port] * 16)) for port in (1, 2)]


class FakePeers:
    """Peers that record their calls; each call waits for `may_continue`."""

    def __init__(self):
        self.stub = self
        self.calls = []
        self.called = threading.Semaphore(0)
        self.may_continue = threading.Event()
        self.failure = None

    @contextmanager
    def use(self, address):
        if self.failure:
            raise self.failure
        yield self

    def CloseBlocks(self, request, timeout):
        self.calls.append((request.generation, list(request.read_ids)))
        self.called.release()
        assert self.may_continue.wait(timeout=timeout)

    def wait(self, count):
        for _ in range(count):
            assert self.called.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def peers():
    return FakePeers()


@pytest.fixture
def closer(peers):
    closer = ReadCloser(peers)
    yield closer
    peers.may_continue.set()
    closer.close()


def test_reads_that_end_during_a_call_are_closed_in_one_call_per_peer(closer, peers):
    first, second = ADDRESSES
    closer.add(first, 1)
    peers.wait(1)
    for read_id in (2, 3):
        closer.add(first, read_id)
        closer.add(second, 10 * read_id)
    peers.may_continue.set()
    peers.wait(2)
    assert peers.calls == [
        (first.generation, [1]),
        (first.generation, [2, 3]),
        (second.generation, [20, 30]),
    ]


@pytest.mark.parametrize("failure", [StoreUnavailableError("closed"), ValueError("closed channel")])
def test_a_failed_call_does_not_prevent_calls_to_other_peers(closer, peers, failure):
    peers.failure = failure
    closer.add(ADDRESSES[0], 1)
    closer._thread.submit(lambda: None).result(TIMEOUT_S)
    peers.failure = None
    peers.may_continue.set()
    closer.add(ADDRESSES[1], 2)
    peers.wait(1)
    assert peers.calls == [(ADDRESSES[1].generation, [2])]


def test_reads_that_end_after_close_are_ignored(closer, peers):
    closer.close()
    closer.add(ADDRESSES[0], 1)
    closer.close()
    assert not peers.calls
