"""Metadata of NIXL agents, registered memory, and requests for ranges."""

import ctypes
import os
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from kvstore.peer.nixl import link as nixl_link
from kvstore.peer.nixl.memory import AgentMetadata, MemoryMap, MemoryProbe, Region, machine_id
from kvstore.peer.transport import TransferError, make_ranges
from tests.support.nixl_remote import needs_process_vm_readv

HOST = Region(1000, 500, "cpu")
GPU = Region(1 << 40, 1 << 20, "cuda:3")


def metadata(**changes):
    probe = MemoryProbe()
    values = AgentMetadata(
        pid=os.getpid(),
        machine=machine_id(),
        probe_address=probe.address,
        probe_token=probe.token,
        transports="",
        regions=(HOST,),
        agent=b"\0nixl",
    )
    return probe, replace(values, **changes)


def test_metadata_survives_a_round_trip():
    _, values = metadata(transports="tcp", regions=(HOST, GPU))
    assert AgentMetadata.from_bytes(values.to_bytes()) == values


def test_the_memory_of_a_probe_contains_its_token():
    probe = MemoryProbe()
    assert ctypes.string_at(probe.address, len(probe.token)) == probe.token
    assert MemoryProbe().token != probe.token


def test_the_obstacle_to_reading_a_peer_is_named(monkeypatch):
    needs_process_vm_readv()
    monkeypatch.delenv("UCX_TLS", raising=False)
    probe, values = metadata()
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert values.obstacle() == "UCX finds no way to read it"
    for changes, reason in (
        ({"transports": "tcp"}, "its UCX_TLS=tcp"),
        ({"regions": (HOST, GPU)}, "GPU memory"),
        ({"machine": "another"}, "another machine"),
        ({"pid": ended.pid}, "another PID namespace"),
        ({"probe_token": bytes(16)}, "another PID namespace"),
        ({"probe_address": 1}, "another PID namespace"),
    ):
        assert reason in replace(values, **changes).obstacle()
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "own UCX_TLS=tcp" in values.obstacle()
    assert probe.token == values.probe_token


def test_ranges_get_the_device_of_their_region():
    memory = MemoryMap([GPU])
    memory.add(HOST)
    assert memory.regions == (GPU, HOST)
    runs = make_ranges([1499, 1 << 40, 1000], [1, 1 << 20, 500], [0, 7, 7])
    described = memory.describe(runs)
    assert described.table.tolist() == [[1499, 1, 0], [1 << 40, 1 << 20, 3], [1000, 500, 0]]
    assert described.is_on_gpu.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("address", "num_bytes"),
    [(999, 1), (999, 10), (1500, 1), (1499, 2), (0, 5), (1000, 2**64 - 1000), (2**64 - 1, 9)],
)
def test_ranges_outside_registered_memory_are_refused(address, num_bytes):
    with pytest.raises(TransferError, match="not registered") as caught:
        MemoryMap([HOST, GPU]).describe(make_ranges([1000, address], [1, num_bytes]))
    assert caught.value.is_settled
    with pytest.raises(TransferError):
        MemoryMap().describe(make_ranges([address], num_bytes))


def test_each_request_has_ranges_of_one_device_and_a_bounded_size(monkeypatch):
    monkeypatch.setattr(nixl_link, "_PART_BYTES", 100)
    memory = MemoryMap([HOST, GPU])
    own = memory.describe(make_ranges([1000] * 6, [40, 40, 40, 300, 1, 1]))
    theirs = memory.describe(
        make_ranges([1000 if i % 2 else 1 << 40 for i in range(6)], 1)  # every other on the GPU
    )
    parts = list(nixl_link._parts(own, theirs))
    assert sorted(np.concatenate(parts)) == list(range(6))
    assert len(parts) > 2
    for part in parts:
        assert len(set(theirs.is_on_gpu[part].tolist())) == 1
        assert own.table[part[1:], 1].sum() <= 100
