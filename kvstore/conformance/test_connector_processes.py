"""Two processes: one loads what the other saved, and survives its death."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from kvstore.conformance.engines import DEADLINE_S, TinyEngine, publish_and_wait, random_prompt
from kvstore.connector import ConnectorCapabilities
from kvstore.handoff import KvHandoff

_SPAWN = multiprocessing.get_context("spawn")
_NUM_BLOCKS = 20


@pytest.fixture(autouse=True)
def _shared(capabilities: ConnectorCapabilities) -> None:
    if not capabilities.shared_between_processes:
        pytest.skip("the connector is not shared between processes")


@contextmanager
def _publishing(url: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """Runs a process that hands a prompt over, until the end of the block."""
    ours, theirs = _SPAWN.Pipe()
    arguments = (url, random_prompt(_NUM_BLOCKS), theirs)
    process = _SPAWN.Process(target=publish_and_wait, args=arguments)
    process.start()
    theirs.close()
    try:
        assert ours.poll(2 * DEADLINE_S), "the other process does not publish"
        yield process, ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _receive(pipe: Connection) -> tuple[KvHandoff, torch.Tensor]:
    handoff, blocks = pipe.recv()
    return handoff, torch.frombuffer(bytearray(blocks), dtype=torch.uint8).view(_NUM_BLOCKS, -1)


def test_another_process_loads_what_was_saved(kv_connector_url: str, reader: TinyEngine) -> None:
    with _publishing(kv_connector_url) as (_, pipe):
        handoff, expected = _receive(pipe)
        assert reader.load(handoff, range(_NUM_BLOCKS)).num_blocks == _NUM_BLOCKS
        assert torch.equal(reader.block_bytes[:_NUM_BLOCKS], expected)


def test_a_killed_publisher_leaves_good_blocks_or_none(
    kv_connector_url: str, reader: TinyEngine, capabilities: ConnectorCapabilities
) -> None:
    with _publishing(kv_connector_url) as (process, pipe):
        handoff, expected = _receive(pipe)
        assert reader.load(handoff, range(2)).num_blocks == 2
        process.kill()
        process.join(DEADLINE_S)
        result = reader.load(handoff, range(2, 2 + _NUM_BLOCKS))

    num_good = result.num_blocks
    assert torch.equal(reader.block_bytes[2 : 2 + num_good], expected[:num_good])
    if capabilities.lends_blocks:  # one of several connectors may have copies elsewhere
        assert num_good == _NUM_BLOCKS or result.error, "lent blocks end with their process"
    elif capabilities.finds_by_key:
        assert num_good == _NUM_BLOCKS, "copies outlive the process that saved them"
