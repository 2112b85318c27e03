"""Leases: lent blocks are released once, and not read afterwards."""

import time

import pytest

from kvstore.conformance.conftest import EngineOpener
from kvstore.conformance.engines import DEADLINE_S, TinyEngine, random_prompt
from kvstore.connector import ConnectorCapabilities

_AWHILE_S = 0.3


@pytest.fixture
def lends(capabilities: ConnectorCapabilities) -> None:
    if not capabilities.lends_blocks:
        pytest.skip("the connector copies blocks")


@pytest.fixture
def only_lends(capabilities: ConnectorCapabilities) -> None:
    if not capabilities.lends_blocks or capabilities.finds_by_key:
        pytest.skip("copies of the saved blocks exist elsewhere")


def test_what_is_lent_is_declared(
    publisher: TinyEngine, capabilities: ConnectorCapabilities
) -> None:
    result = publisher.save(random_prompt(2), range(2), lease_id="l")
    assert result.is_held == capabilities.lends_blocks


@pytest.mark.usefixtures("lends")
def test_what_is_lent_is_given_back_when_its_lease_is_ended(publisher: TinyEngine) -> None:
    keys = random_prompt(6)
    jobs = [
        publisher.start_save(keys[:4], range(4), lease_id="l"),
        publisher.start_save(keys[4:], range(4, 6), lease_id="l"),
    ]
    publisher.run_until(lambda: all(job in publisher.saves for job in jobs), "two saves")
    publisher.run_for(_AWHILE_S)
    assert not publisher.released, "the lease has not ended"

    publisher.scheduler.end_lease("l")
    publisher.scheduler.end_lease("l")
    publisher.run_until(lambda: len(publisher.released) == 2, "the release")
    publisher.run_for(_AWHILE_S)
    assert sorted(publisher.released) == sorted(jobs)


@pytest.mark.usefixtures("only_lends")
def test_nothing_is_read_after_the_end_of_a_lease(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    keys = random_prompt(4)
    handoff = publisher.hand_over(keys, range(4))
    assert reader.load(handoff, range(4)).num_blocks == 4
    publisher.scheduler.end_lease(handoff.handoff_id)
    publisher.run_until(lambda: bool(publisher.released), "the release")
    publisher.block_bytes[:] = 7
    before = reader.block_bytes.clone()

    result = reader.load(handoff, range(10, 14))
    assert result.num_blocks == 0
    assert result.error
    assert reader.has_nothing_new(before)


@pytest.mark.usefixtures("only_lends")
def test_one_leases_end_leaves_another_on_the_same_blocks(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    keys = random_prompt(4)
    first, second = publisher.hand_over(keys, range(4)), publisher.hand_over(keys, range(4))
    publisher.scheduler.end_lease(first.handoff_id)
    publisher.run_until(lambda: bool(publisher.released), "the release")

    assert len(publisher.released) == 1
    assert reader.load(second, range(4)).num_blocks == 4
    assert reader.load(first, range(4)).num_blocks == 0


@pytest.mark.usefixtures("only_lends")
def test_a_lease_without_renewals_runs_out(open_engine: EngineOpener, short_lease_url: str) -> None:
    publisher, reader = open_engine(url=short_lease_url), open_engine(url=short_lease_url)
    handoff = publisher.hand_over(random_prompt(4), range(4))
    assert handoff.lease_ms == 1000, "`lease_s` of the URL is the lease of handoffs"
    publisher.run_until(lambda: bool(publisher.released), "a lease of a second")
    before = reader.block_bytes.clone()

    assert reader.load(handoff, range(4)).num_blocks == 0
    assert reader.has_nothing_new(before)


@pytest.mark.usefixtures("lends")
def test_a_lease_that_was_not_offered_does_not_run_out(
    open_engine: EngineOpener, short_lease_url: str
) -> None:
    """Its time must not begin while the rest of the prompt is computed."""
    publisher, reader = open_engine(url=short_lease_url), open_engine(url=short_lease_url)
    keys = random_prompt(4)
    publisher.save(keys[:2], range(2), lease_id="slow")
    publisher.run_for(1.5)
    publisher.save(keys[2:], range(2, 4), lease_id="slow")
    assert not publisher.released
    assert reader.load(publisher.make_handoff(keys, "slow"), range(4)).num_blocks == 4

    publisher.scheduler.offer("slow")
    publisher.run_until(lambda: len(publisher.released) == 2, "a lease of a second")


@pytest.mark.usefixtures("only_lends")
def test_a_lease_that_has_ended_does_not_begin_again(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    keys = random_prompt(4)
    publisher.save(keys[:2], range(2), lease_id="over")
    publisher.scheduler.end_lease("over")
    publisher.run_until(lambda: bool(publisher.released), "the release")

    result = publisher.save(keys[2:], range(2, 4), lease_id="over")
    assert not result.committed
    assert not result.is_held
    assert reader.load(publisher.make_handoff(keys, "over"), range(4)).num_blocks == 0


@pytest.mark.usefixtures("only_lends")
def test_a_lease_that_is_kept_lasts_until_it_is_dropped(
    open_engine: EngineOpener, short_lease_url: str
) -> None:
    publisher, reader = open_engine(url=short_lease_url), open_engine(url=short_lease_url)
    handoff = publisher.hand_over(random_prompt(4), range(4))
    reader.scheduler.keep(handoff)
    give_up_at = time.monotonic() + 3.0
    while time.monotonic() < give_up_at:
        publisher.run_for(0.02)
        reader.run_for(0.02)
    assert not publisher.released, "the lease was renewed"
    assert reader.load(handoff, range(4)).num_blocks == 4

    reader.scheduler.drop(handoff.handoff_id)
    reader.step()
    publisher.run_until(lambda: bool(publisher.released), "a lease that was dropped")


def test_ending_and_dropping_unknown_leases_has_no_effect(
    publisher: TinyEngine, reader: TinyEngine
) -> None:
    publisher.scheduler.end_lease("unknown")
    reader.scheduler.drop("unknown")
    assert reader.load(publisher.hand_over(random_prompt(2), range(2)), range(2)).num_blocks == 2


def test_the_end_of_a_lease_leaves_copies(
    publisher: TinyEngine, reader: TinyEngine, capabilities: ConnectorCapabilities
) -> None:
    """Blocks that are found by key serve other requests when their handoff is over."""
    if not capabilities.finds_by_key:
        pytest.skip("the connector does not find blocks by key")
    keys = random_prompt(3)
    handoff = publisher.hand_over(keys, range(3))
    publisher.scheduler.end_lease(handoff.handoff_id)
    publisher.run_for(_AWHILE_S)

    assert reader.find(keys) == 3


@pytest.mark.usefixtures("only_lends")
def test_a_closed_publisher_costs_a_bounded_time(publisher: TinyEngine, reader: TinyEngine) -> None:
    handoff = publisher.hand_over(random_prompt(3), range(3))
    publisher.close()
    publisher.block_bytes[:] = 7
    before = reader.block_bytes.clone()
    began_at = time.monotonic()

    assert reader.load(handoff, range(3)).num_blocks == 0
    assert time.monotonic() - began_at < DEADLINE_S
    assert reader.has_nothing_new(before)
