"""`NixlLink` with an agent whose reads never end."""

import ctypes
import os
import weakref
from types import SimpleNamespace

import pytest

from kvstore.peer.nixl import link as nixl_link
from kvstore.peer.nixl.memory import AgentMetadata, MemoryMap, MemoryProbe, Region
from kvstore.peer.transport import UnreadablePeerError


class _Native:
    """The native object that an agent of nixl owns."""


class _StuckAgent:
    """An agent whose requests stay in progress."""

    def __init__(self):
        self.agent = _Native()

    def register_memory(self, runs, kind):
        return runs

    def deregister_memory(self, registered):
        pass

    def add_remote_agent(self, metadata):
        return "peer"

    def remove_remote_agent(self, name):
        pass

    def get_xfer_descs(self, table, kind):
        return table

    def initialize_xfer(self, operation, own, theirs, peer):
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle):
        return "PROC"

    def check_xfer_state(self, handle):
        return "PROC"


def test_memory_that_a_failed_probe_may_still_write_to_is_not_freed(monkeypatch):
    """A GPU continues a copy after nixl has given it up and the agent has ended."""
    landings = []
    create = ctypes.create_string_buffer

    def recorded(*args):
        landings.append(create(*args))
        return landings[-1]

    probe = MemoryProbe()
    regions = (Region(probe.address, 16, "cpu"), Region(1 << 40, 1 << 20, "cuda:0"))
    peer = AgentMetadata(os.getpid(), "", probe.address, probe.token, "", regions, b"")
    monkeypatch.setattr(nixl_link, "new_agent", lambda *args, **kwargs: _StuckAgent())
    link = nixl_link.NixlLink(SimpleNamespace(), peer, MemoryMap())
    with monkeypatch.context() as patch:
        patch.setattr(nixl_link.ctypes, "create_string_buffer", recorded)
        with pytest.raises(UnreadablePeerError, match="the time is up"):
            link.connect(0.01)
    landing = weakref.ref(landings[0])
    landings.clear()
    del link
    assert landing() is not None
