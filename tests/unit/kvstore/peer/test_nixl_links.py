"""`NixlTransport`: which link a failed read closes."""

import pytest

from kvstore.peer.nixl import transport as nixl_transport
from kvstore.peer.nixl.transport import NixlTransport
from kvstore.peer.transport import TransferError, make_ranges

RANGES = make_ranges([1], 1)


class FakeHome:
    def register_memory(self, runs, kind):
        return runs

    def deregister_memory(self, registered):
        pass


class FakeLink:
    """A link whose reads fail once `during_read` has returned."""

    def __init__(self, *arguments):
        self.during_read = lambda: None
        self.is_lost = False

    def connect(self, timeout_s):
        pass

    def read(self, sources, targets, timeout_s):
        self.is_lost = True
        self.during_read()
        raise TransferError("injected by the test", is_settled=True)

    def close(self):
        self.is_lost = True


@pytest.fixture
def transport(monkeypatch):
    monkeypatch.setattr(nixl_transport, "load_nixl", lambda: None)
    monkeypatch.setattr(nixl_transport, "new_agent", lambda *args, **options: FakeHome())
    monkeypatch.setattr(nixl_transport, "NixlLink", FakeLink)
    monkeypatch.setattr(nixl_transport.AgentMetadata, "from_bytes", lambda metadata: metadata)
    transport = NixlTransport()
    transport.add_peer("peer", b"", 1.0)
    yield transport
    transport.close()


def test_a_read_that_fails_removes_its_peer(transport):
    with pytest.raises(TransferError):
        transport.read("peer", RANGES, RANGES, 1.0)
    with pytest.raises(TransferError, match="no peer"):
        transport.read("peer", RANGES, RANGES, 1.0)


def test_a_read_that_fails_does_not_close_the_link_of_a_peer_that_was_added_again(transport):
    transport._links["peer"].during_read = lambda: transport.add_peer("peer", b"", 1.0)
    with pytest.raises(TransferError):
        transport.read("peer", RANGES, RANGES, 1.0)
    assert not transport._links["peer"].is_lost
