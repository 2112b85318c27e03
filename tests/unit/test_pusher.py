"""`Pusher`: what it remembers of pushes, and for how long."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer import pushes
from kvstore.peer.leases import LentBlock
from kvstore.peer.locations import BlockRanges, ranges_to_proto
from kvstore.peer.pushes import Pusher
from kvstore.peer.transport import TransferError, make_ranges
from tests.support.peer_rig import MemoryTransport

NUM_BYTES = 8


class Rig:
    """A pusher of one block, and where readers want it."""

    def __init__(self):
        self.transport = MemoryTransport()
        self.pusher = Pusher(self.transport)
        self._source, self.target = (ctypes.create_string_buffer(NUM_BYTES) for _ in range(2))
        self._source.raw = b"12345678"
        for buffer in (self._source, self.target):
            self.transport.register(ctypes.addressof(buffer), NUM_BYTES, device="cpu")

    def push(self, push_id):
        request = pb.PushBlocksRequest(
            push_id=push_id,
            reader_generation=b"reader",
            reader_metadata=b"[]",
            targets=ranges_to_proto(make_ranges([ctypes.addressof(self.target)], NUM_BYTES)),
        )
        source = make_ranges([ctypes.addressof(self._source)], NUM_BYTES)
        ranges = SimpleNamespace(of_blocks=lambda blocks: BlockRanges(source, np.array([1])))
        read = SimpleNamespace(blocks=[LentBlock(b"k", b"header", 0)])
        return self.pusher.push(request, read, ranges, 1.0)

    def push_in_doubt(self, push_id):
        def fail():
            raise TransferError("the time is up", is_settled=False)

        self.transport.fault, self.transport.settled = fail, False
        assert not self.push(push_id).is_settled
        self.transport.fault = lambda: None


@pytest.fixture
def rig():
    return Rig()


def test_pushes_that_are_over_are_not_remembered(rig):
    for index in range(3):
        assert rig.push(bytes([index])).headers == b"header"
    assert rig.target.raw == b"12345678"
    assert not rig.pusher._pushes
    assert rig.pusher.settle(b"\0")


def test_a_push_that_failed_for_sure_is_not_remembered(rig):
    def fail():
        raise TransferError("refused", is_settled=True)

    rig.transport.fault = fail
    answer = rig.push(b"p")
    assert (answer.error, answer.is_settled) == ("refused", True)
    assert not rig.pusher._pushes


def test_a_push_in_doubt_is_remembered_until_it_has_settled(rig, monkeypatch):
    monkeypatch.setattr(pushes, "_MAX_REMEMBERED", 2)
    rig.push_in_doubt(b"doubt")
    for index in range(5):
        assert rig.pusher.settle(bytes([index])), "it never begins"
    assert not rig.pusher.settle(b"doubt")
    assert rig.push(b"\4").error, "given up before it began"

    rig.transport.settled = True
    assert rig.pusher.settle(b"doubt")
    for index in range(5, 10):
        rig.pusher.settle(bytes([index]))
    assert len(rig.pusher._pushes) <= 2
    assert b"doubt" not in rig.pusher._pushes
