"""`multi://` over real members: one that fails, one that hangs, one that lends."""

import socket
import time
from contextlib import contextmanager

import pytest
import torch

from baton.common.errors import ConfigurationError, FailedPreconditionError
from kvstore.conformance.engines import TinyEngine, random_prompt
from kvstore.registry import connector_capabilities, open_connector

_TIMEOUT_S = 0.5


@pytest.fixture
def open_engine():
    engines = []

    def open_one(url):
        engines.append(TinyEngine(url))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


@contextmanager
def server_that_never_answers():
    """Yields the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}?timeout_s={_TIMEOUT_S}"


def test_blocks_that_one_member_cannot_load_come_from_the_other(open_engine, tmp_path):
    name = tmp_path.name
    faults = "faults=fail_load:0.2,corrupt:0.2,drop:0.2"
    url = f"multi://faulty+memory://{name}?{faults},memory://{name}-whole"
    publisher, reader = open_engine(url), open_engine(url)
    for index in range(10):
        keys, blocks = random_prompt(20), range(20 * (index % 4), 20 * (index % 4) + 20)
        result = reader.load(publisher.hand_over(keys, blocks), blocks)
        assert (result.num_blocks, result.error) == (20, "")
        assert torch.equal(reader.block_bytes[blocks], publisher.block_bytes[blocks])


def test_a_member_that_hangs_delays_calls_only_until_its_breakers_open(open_engine, tmp_path):
    with server_that_never_answers() as hanging:
        url = f"multi://{hanging},file://{tmp_path}/store"
        publisher, reader = open_engine(url), open_engine(url)
        keys = random_prompt(8)
        began_at = time.monotonic()
        handoff = publisher.hand_over(keys, range(8))
        assert reader.load(handoff, range(8)).num_blocks == 8
        assert reader.find(keys) == 8
        assert time.monotonic() - began_at < 20 * _TIMEOUT_S

        # The breakers of the hanging member are open, so no call waits for it.
        slowest_s = max(_seconds_of(publisher, reader) for _ in range(3))
        assert slowest_s < 10 * _TIMEOUT_S
        assert torch.equal(reader.block_bytes[:8], publisher.block_bytes[:8])


def _seconds_of(publisher, reader):
    began_at = time.monotonic()
    assert reader.load(publisher.hand_over(random_prompt(8), range(8)), range(8)).num_blocks == 8
    return time.monotonic() - began_at


def test_while_the_shared_member_is_down_nothing_is_committed(open_engine, tmp_path):
    """Blocks that only this process can load do not count for a handoff."""
    with server_that_never_answers() as hanging:
        publisher = open_engine(f"multi://memory://{tmp_path.name},{hanging}")
        assert not publisher.save(random_prompt(2), range(2)).committed


def test_blocks_that_a_lending_member_released_are_loaded_from_the_other(open_engine, tmp_path):
    url = f"multi://grpc://,memory://{tmp_path.name}"
    publisher, reader = open_engine(url), open_engine(url)
    keys = random_prompt(6)
    handoff = publisher.hand_over(keys, range(6))
    assert handoff.connector == "multi(grpc,memory)"
    expected = publisher.block_bytes[:6].clone()
    publisher.scheduler.end_lease(handoff.handoff_id)
    publisher.run_until(lambda: bool(publisher.released), "release of the lent blocks")
    publisher.block_bytes[:6] = 0

    assert reader.load(handoff, range(6)).num_blocks == 6
    assert torch.equal(reader.block_bytes[:6], expected)


def test_capabilities_are_those_of_any_member():
    both = connector_capabilities("multi://memory://a,grpc://")
    assert (both.shared_between_hosts, both.finds_by_key, both.lends_blocks) == (True, True, True)
    alone = connector_capabilities("multi://memory://a,memory://b")
    assert (alone.shared_between_processes, alone.lends_blocks) == (False, False)


def test_tiers_with_other_members_refuse_each_others_handoffs(open_engine, tmp_path):
    engine = open_engine(f"multi://memory://{tmp_path.name},memory://{tmp_path.name}2")
    handoff = engine.make_handoff(random_prompt(1), "h")
    with pytest.raises(FailedPreconditionError, match=r"memory.*multi\(memory,memory\)"):
        handoff.check_compatible(namespace=handoff.namespace, connector="memory")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("multi://", "two connectors or more"),
        ("multi://memory://a", "two connectors or more"),
        ("multi://memory://a,multi://memory://b,memory://c", "no member of another"),
        ("multi://memory://a,floppy://b", "'floppy'"),
        ("multi://memory://a,memory://b?no_such_option=1", "no_such_option"),
    ],
)
def test_a_bad_url_says_why(url, message):
    with pytest.raises(ConfigurationError) as caught:
        open_connector(url)
    assert message in caught.value.message


def test_opened_members_are_closed_if_another_cannot_be_opened(tmp_path):
    with pytest.raises(ConfigurationError):
        open_connector(f"multi://memory://{tmp_path.name}?ttl_s=5,memory://x?bad=1")
    _, worker = open_connector(
        f"memory://{tmp_path.name}?ttl_s=6"
    )  # it was closed, so another ttl_s is fine
    worker.close()
