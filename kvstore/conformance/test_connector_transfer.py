"""Transfers between two engines' pools, and the capabilities and options that connectors state."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from baton.common.errors import ConfigurationError
from kvstore.conformance.conftest import EngineOpener, joined, members_of, with_option
from kvstore.conformance.engines import LAYOUTS, NUM_BLOCKS, TinyEngine, random_prompt
from kvstore.connector import ConnectorCapabilities
from kvstore.handoff import connector_name
from kvstore.layout import KvLayout, StateLayout, StatePart
from kvstore.mover.pool_objects import view_blocks
from kvstore.registry import open_connector
from kvstore.transfer_form import PoolShare, TransferForm

_COUNTS = (1, 7, NUM_BLOCKS)
_MAX_NAP_S = 10.0


def _blocks(count: int, seed: int) -> list[int]:
    """Returns ids of blocks in random order."""
    return random.Random(seed).sample(range(NUM_BLOCKS), count)


@pytest.mark.parametrize("num_blocks", _COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_arrive_as_they_were_and_nothing_else_changes(
    open_engine: EngineOpener, layout: KvLayout, num_blocks: int
) -> None:
    publisher, reader = open_engine(layout), open_engine(layout)
    sources, targets = _blocks(num_blocks, 1), _blocks(num_blocks, 2)
    expected = reader.block_bytes.clone()
    expected[targets] = publisher.block_bytes[sources]
    published = publisher.block_bytes.clone()

    handoff = publisher.hand_over(random_prompt(num_blocks), sources)
    result = reader.load(handoff, targets)

    assert (result.num_blocks, result.error) == (num_blocks, "")
    assert torch.equal(reader.block_bytes, expected)
    assert torch.equal(publisher.block_bytes, published), "a save changed the pool"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_tail_tokens", [1, 15])
def test_what_lies_behind_a_tail_stays_where_it_is(
    open_engine: EngineOpener, layout: KvLayout, num_tail_tokens: int
) -> None:
    publisher, reader = open_engine(layout), open_engine(layout)
    handoff = publisher.hand_over(random_prompt(3), [4, 5, 6], num_tail_tokens)

    assert reader.load(handoff, [7, 8, 9]).num_blocks == 3
    assert torch.equal(reader.block_bytes[[7, 8]], publisher.block_bytes[[4, 5]])
    sent, arrived = (view_blocks(each.pool, layout) for each in (publisher, reader))
    pairs = [(sent.states, arrived.states), (sent.scales, arrived.scales)]
    for ours, theirs in ((a[6], b[9]) for a, b in pairs if a is not None and b is not None):
        first, behind = slice(0, num_tail_tokens), slice(num_tail_tokens, None)
        assert torch.equal(_tokens(ours, first), _tokens(theirs, first))
        share = (_tokens(ours, behind) == _tokens(theirs, behind)).float().mean()
        assert share < 1 / 2, "KV of an earlier request has left the engine"


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=str)
def test_slots_for_states_arrive_as_they_were(open_engine: EngineOpener, layout: KvLayout) -> None:
    """A slot is moved as further blocks, which lie behind those for tokens."""
    num_bytes = 3 * layout.block_bytes - 100
    states = StateLayout(1, (StatePart("state", 1, num_bytes // 4, "float32"),))
    form, share = replace(TransferForm.of(layout), states=states), PoolShare(num_blocks=80)
    publisher, reader = (open_engine(layout, form=form, share=share) for _ in range(2))
    sources, targets = [7, 83, 84, 85, 2, 89, 90, 91], [3, 80, 81, 82, 4, 92, 93, 94]
    expected = reader.block_bytes.clone()
    expected[targets] = publisher.block_bytes[sources]

    handoff = publisher.hand_over(random_prompt(len(sources)), sources)
    assert reader.load(handoff, targets).num_blocks == len(sources)
    assert torch.equal(reader.block_bytes, expected)


def _tokens(block: torch.Tensor, tokens: slice) -> torch.Tensor:
    """Returns the bytes of some tokens of a block `[layers, 2, heads, tokens, ...]`."""
    return block[:, :, :, tokens].contiguous().view(torch.uint8)


def test_a_prompt_may_come_in_pieces(publisher: TinyEngine, reader: TinyEngine) -> None:
    keys = random_prompt(12)
    for first, end in pairwise((0, 5, 6, 12)):
        result = publisher.save(keys[first:end], range(first, end), lease_id="pieces")
        assert result.committed
    handoff = publisher.make_handoff(keys, "pieces")

    jobs = [
        reader.scheduler.load(keys[first:end], range(20 + first, 20 + end), handoff)
        for first, end in pairwise((0, 4, 12))
    ]
    reader.run_until(lambda: all(job in reader.loads for job in jobs), "loads in pieces")
    assert [reader.loads[job].num_blocks for job in jobs] == [4, 8]
    assert torch.equal(reader.block_bytes[20:32], publisher.block_bytes[:12])


def test_blocks_may_be_saved_again_for_another_handoff(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    keys = random_prompt(6)
    publisher.hand_over(keys, range(6))
    job = publisher.scheduler.save(keys, range(6), num_found=4, lease_id="again")
    publisher.run_until(lambda: job in publisher.saves, "a save of known blocks")

    assert publisher.saves[job].committed
    assert reader.load(publisher.make_handoff(keys, "again"), range(6)).num_blocks == 6
    assert torch.equal(reader.block_bytes[:6], publisher.block_bytes[:6])


def test_many_jobs_at_once_each_end_once(publisher: TinyEngine, reader: TinyEngine) -> None:
    prompts = [random_prompt(3) for _ in range(30)]
    saves = [
        publisher.start_save(keys, range(3 * index, 3 * index + 3), lease_id=str(index))
        for index, keys in enumerate(prompts)
    ]
    publisher.run_until(lambda: all(job in publisher.saves for job in saves), "30 saves")
    assert all(publisher.saves[job].committed for job in saves)

    handoffs = [publisher.make_handoff(keys, str(index)) for index, keys in enumerate(prompts)]
    loads = [
        reader.start_load(handoff, range(3 * index, 3 * index + 3))
        for index, handoff in enumerate(handoffs)
    ]
    reader.run_until(lambda: all(job in reader.loads for job in loads), "30 loads")
    assert {reader.loads[job].num_blocks for job in loads} == {3}
    assert torch.equal(reader.block_bytes[:90], publisher.block_bytes[:90])


def test_one_engine_saves_and_loads(publisher: TinyEngine) -> None:
    handoff = publisher.hand_over(random_prompt(5), range(5))
    assert publisher.load(handoff, range(50, 55)).num_blocks == 5
    assert torch.equal(publisher.block_bytes[50:55], publisher.block_bytes[:5])


def test_what_is_not_held_may_be_overwritten(publisher: TinyEngine, reader: TinyEngine) -> None:
    """Without `is_held`, the blocks are free once the result is in."""
    keys = random_prompt(8)
    saved = publisher.save(keys, range(8), lease_id="l")
    before = publisher.block_bytes[:8].clone()
    if not saved.is_held:
        publisher.block_bytes[:8] = 0

    assert reader.load(publisher.make_handoff(keys, "l"), range(8)).num_blocks == 8
    assert torch.equal(reader.block_bytes[:8], before)


def test_the_engine_is_woken_for_each_result(publisher: TinyEngine, reader: TinyEngine) -> None:
    """An engine that sleeps would otherwise never process the result."""
    keys = random_prompt(2)
    save = publisher.start_save(keys, [0, 1], lease_id="wake")
    _wait_for_news(publisher, lambda: save in publisher.saves)
    load = reader.start_load(publisher.make_handoff(keys, "wake"), [0, 1])
    _wait_for_news(reader, lambda: load in reader.loads)


def _wait_for_news(engine: TinyEngine, is_over: Callable[[], bool]) -> None:
    """Steps only when woken, like an engine without requests to compute."""
    engine.step()
    while not is_over():
        assert engine.woken.wait(_MAX_NAP_S), "the engine was not woken for a result"
        engine.woken.clear()
        engine.step()


def test_look_ups_find_what_was_saved_and_stop_at_a_hole(
    publisher: TinyEngine, reader: TinyEngine, capabilities: ConnectorCapabilities
) -> None:
    assert publisher.scheduler.finds_by_key == capabilities.finds_by_key
    keys = random_prompt(6)
    publisher.hand_over(keys[:3], range(3))
    publisher.hand_over(keys[4:], range(4, 6))

    expected = 3 if capabilities.finds_by_key else 0
    assert (reader.find(keys) if expected else reader.look_up(keys)) == expected
    assert reader.look_up(random_prompt(2)) == 0
    if expected:
        job = reader.scheduler.load(keys[:3], range(3))
        reader.run_until(lambda: job in reader.loads, "a load of what was looked up")
        assert reader.loads[job].num_blocks == 3
        assert torch.equal(reader.block_bytes[:3], publisher.block_bytes[:3])


def test_deleted_blocks_are_not_found(
    publisher: TinyEngine, reader: TinyEngine, capabilities: ConnectorCapabilities
) -> None:
    if not capabilities.finds_by_key:
        pytest.skip("the connector does not find blocks by key")
    keys = random_prompt(4)
    publisher.hand_over(keys, range(4))
    publisher.scheduler.delete(keys[1:2])
    publisher.run_until(lambda: reader.look_up(keys) == 1, "a deletion")


def test_capabilities_agree_with_each_other(capabilities: ConnectorCapabilities) -> None:
    if capabilities.shared_between_hosts:
        assert capabilities.shared_between_processes
    if capabilities.lends_blocks:
        assert capabilities.keeps_leases, "lent blocks have a lease"


def test_handoffs_bear_the_connectors_name(kv_connector_url: str, publisher: TinyEngine) -> None:
    keys = random_prompt(2)
    handoff = publisher.scheduler.make_handoff("h", b"namespace", keys, 7)
    assert handoff.connector == publisher.scheduler.scheme == connector_name(kv_connector_url)
    assert (handoff.handoff_id, handoff.namespace) == ("h", b"namespace")
    assert (handoff.block_keys, handoff.num_tokens) == (keys, 7)
    assert handoff.lease_ms > 0


def test_an_unknown_option_is_an_error_that_names_it(kv_connector_url: str) -> None:
    *others, last = members_of(kv_connector_url)
    url = joined([*others, with_option(last, "no_such_option=1")])
    with pytest.raises(ConfigurationError, match="no_such_option"):
        open_connector(url)
