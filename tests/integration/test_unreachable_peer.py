"""A peer whose advertised address drops packets is named before loads from it are called slow."""

import socket
from contextlib import ExitStack

import pytest

from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.address import PeerAddress
from kvstore.peer.peers import Peers
from kvstore.store import StoreUnavailableError


@pytest.fixture
def dropped():
    """Yields an address that drops what comes: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def fail(peers, endpoint):
    address = PeerAddress(endpoint, bytes(16))
    with peers.use(address) as peer, pytest.raises(StoreUnavailableError, match=endpoint):
        peer.ask(lambda: peer.stub.OpenBlocks(pb.OpenBlocksRequest(), timeout=0.6))


def test_it_is_named_once_before_the_call_ends(dropped, caplog):
    peers = Peers()
    fail(peers, dropped)
    unreachable, failed = (record.message for record in caplog.records)
    assert f"{dropped} cannot be reached so far" in unreachable
    assert dropped in failed
    caplog.clear()
    fail(peers, dropped)
    assert not caplog.records
    peers.close()


def test_a_closed_port_is_named_by_the_call_alone(caplog):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{unused.getsockname()[1]}"
        peers = Peers()
        fail(peers, endpoint)
        peers.close()
    (failed,) = (record.message for record in caplog.records)
    assert endpoint in failed
    assert "so far" not in failed
