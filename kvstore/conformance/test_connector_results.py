"""Loads and saves that fail: results count the good blocks, and no other block is touched."""

import threading
from dataclasses import replace

import pytest
import torch

from kvstore.conformance.conftest import EngineOpener
from kvstore.conformance.engines import (
    DEADLINE_S,
    LAYOUTS,
    NUM_BLOCKS,
    TinyEngine,
    random_prompt,
)

# A job that still writes after its end would be seen within this time.
_AFTERWARDS_S = 0.3


def test_a_prefix_is_good_where_the_rest_is_missing(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    keys = random_prompt(5)
    assert publisher.save(keys[:3], range(3), lease_id="part").committed
    others = reader.block_bytes[10:].clone()

    result = reader.load(publisher.make_handoff(keys, "part"), range(5))

    assert result.num_blocks == 3
    assert result.error
    assert torch.equal(reader.block_bytes[:3], publisher.block_bytes[:3])
    assert torch.equal(reader.block_bytes[10:], others)


def test_only_an_unbroken_prefix_counts(publisher: TinyEngine, reader: TinyEngine) -> None:
    keys = random_prompt(5)
    for index in (0, 2, 3, 4):
        assert publisher.save(keys[index : index + 1], [index], lease_id="hole").committed

    result = reader.load(publisher.make_handoff(keys, "hole"), range(5))
    assert (result.num_blocks, bool(result.error)) == (1, True)
    assert torch.equal(reader.block_bytes[:1], publisher.block_bytes[:1])


@pytest.mark.parametrize("params", [None, b"", b"\xff" * 40])
def test_an_unknown_handoff_brings_nothing(
    publisher: TinyEngine, reader: TinyEngine, params: bytes | None
) -> None:
    handoff = publisher.make_handoff(random_prompt(3), "never saved")
    if params is not None:
        handoff = replace(handoff, connector_params=params)
    before = reader.block_bytes.clone()

    result = reader.load(handoff, range(3))
    assert result.num_blocks == 0
    assert result.error
    assert reader.has_nothing_new(before)


def test_blocks_of_another_shape_are_refused(open_engine: EngineOpener) -> None:
    publisher, reader = open_engine(LAYOUTS[0]), open_engine(LAYOUTS[2])
    before = reader.block_bytes.clone()

    result = reader.load(publisher.hand_over(random_prompt(3), range(3)), range(3))
    assert result.num_blocks == 0
    assert result.error
    assert reader.has_nothing_new(before)


def test_a_cancelled_load_ends_once_and_writes_nothing_afterwards(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    handoff = publisher.hand_over(random_prompt(NUM_BLOCKS), range(NUM_BLOCKS))
    for num_steps in range(4):
        job = reader.start_load(handoff, range(NUM_BLOCKS))
        for _ in range(num_steps):
            reader.step()
        reader.scheduler.cancel_load(job)
        reader.scheduler.cancel_load(job)
        reader.run_until(lambda job=job: job in reader.loads, "a cancelled load")  # type: ignore[misc]
        result = reader.loads[job]
        assert (result.num_blocks < NUM_BLOCKS) == bool(result.error)
        num_good = result.num_blocks
        assert torch.equal(reader.block_bytes[:num_good], publisher.block_bytes[:num_good])
        reader.block_bytes[:] = num_steps
        reader.run_for(_AFTERWARDS_S)
        assert reader.block_bytes.eq(num_steps).all(), "a load wrote after its result"


def test_cancelling_a_finished_load_has_no_effect(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    handoff = publisher.hand_over(random_prompt(2), range(2))
    job = reader.start_load(handoff, range(2))
    reader.run_until(lambda: job in reader.loads, "a load")
    reader.scheduler.cancel_load(job)
    assert reader.load(handoff, range(2, 4)).num_blocks == 2


def test_forgetting_a_look_up_has_no_effect_on_others(reader: TinyEngine) -> None:
    for num_steps in range(3):
        job = reader.scheduler.lookup(random_prompt(2))
        for _ in range(num_steps):
            reader.step()
        reader.scheduler.forget_lookup(job)
    assert reader.look_up(random_prompt(2)) == 0


def test_others_see_blocks_whole_or_not_at_all(publisher: TinyEngine, reader: TinyEngine) -> None:
    """A reader that does not wait for the save loads a good prefix or nothing."""
    keys = random_prompt(60)
    handoff = publisher.make_handoff(keys, "early")
    save = publisher.start_save(keys, range(60), lease_id="early")
    for _ in range(10):
        publisher.step()
        result = reader.load(handoff, range(60))
        num_good = result.num_blocks
        assert torch.equal(reader.block_bytes[:num_good], publisher.block_bytes[:num_good])
    publisher.run_until(lambda: save in publisher.saves, "a save that others watch")
    assert reader.load(handoff, range(60)).num_blocks == 60


def test_closing_ends_unfinished_jobs(open_engine: EngineOpener) -> None:
    publisher, reader = open_engine(), open_engine()
    handoff = publisher.hand_over(random_prompt(NUM_BLOCKS), range(NUM_BLOCKS))
    reader.start_load(handoff, range(NUM_BLOCKS))
    publisher.start_save(random_prompt(NUM_BLOCKS), range(NUM_BLOCKS), lease_id="late")
    for engine in (reader, publisher):
        engine.step()
        _close_in_time(engine)
        engine.block_bytes[:] = 7
    threading.Event().wait(_AFTERWARDS_S)
    for engine in (reader, publisher):
        assert engine.block_bytes.eq(7).all(), "the pool was written to after the close"


def test_closing_twice_is_fine(open_engine: EngineOpener) -> None:
    engine = open_engine()
    engine.close()
    engine.close()


def _close_in_time(engine: TinyEngine) -> None:
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive(), f"close takes longer than {DEADLINE_S:g} s"
