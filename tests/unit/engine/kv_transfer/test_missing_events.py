"""Events of transfer blocks that an engine has looked for in a store in vain."""

import pytest

from engine.kv_cache.events import BlocksMissing
from engine.request import EngineRequest
from kvstore.block_key import BlockKeyChain
from kvstore.jobs import MISSING, LookupResult, TransferResults
from tests.support.driven_scheduler import NAMESPACE, DrivenScheduler, handed_over, request


class Follower(DrivenScheduler):
    """An engine with a connector, whose events somebody follows."""

    def __init__(self, **options: object) -> None:
        super().__init__(with_connector=True, **options)
        self.scheduler.kv.events.start_recording()

    def missing(self) -> list[bytes]:
        """The keys that new events name as missing."""
        events = self.scheduler.kv.events.take_events()
        return [key for event in events if isinstance(event, BlocksMissing) for key in event.keys]

    def end_first_load(self, submitted: EngineRequest, num_blocks: int, error: str) -> None:
        (load,) = self.work().loads
        self.end_load(load, submitted.spec.prompt_token_ids, num_blocks, error)
        self.step()


def keys_of(submitted: EngineRequest) -> tuple[bytes, ...]:
    return tuple(BlockKeyChain(NAMESPACE, 4).extend(submitted.spec.prompt_token_ids))


@pytest.mark.parametrize("num_found", [0, 1, 2])
def test_a_look_up_names_the_first_block_that_is_not_there(num_found: int) -> None:
    engine = Follower()
    submitted = request("a", 11)  # two full blocks, and a token to compute
    engine.add(submitted)
    engine.step()
    assert engine.missing() == []
    engine.answer(num_found)
    assert engine.missing() == list(keys_of(submitted)[num_found : num_found + 1])


def test_a_store_that_does_not_answer_may_have_the_blocks() -> None:
    engine = Follower()
    engine.add(request("a", 11))
    engine.step()
    (lookup,) = engine.work().lookups
    result = LookupResult(lookup.job_id, 0, "unavailable")
    engine.scheduler.apply(TransferResults(lookups=(result,)))
    assert engine.missing() == []
    engine.step()
    assert engine.shares == {"a": 11}


@pytest.mark.parametrize(("error", "is_named"), [(MISSING, True), ("corrupt", False)])
def test_a_load_names_the_block_that_has_gone_since(error: str, is_named: bool) -> None:
    engine = Follower()
    submitted = request("a", 11)
    engine.add(submitted)
    engine.step()
    engine.answer(num_found=2)
    engine.step()
    engine.end_first_load(submitted, 1, error)
    assert engine.missing() == list(keys_of(submitted)[1:2]) * is_named
    assert engine.shares == {"a": 11 - 4}


def test_the_partial_block_of_a_handoff_is_nobody_elses_to_look_for() -> None:
    engine = Follower(role="decode")
    submitted = handed_over("a", 10)  # two full blocks and two tokens
    engine.add(submitted)
    engine.step()
    engine.end_first_load(submitted, 2, MISSING)
    assert engine.missing() == []
    assert engine.shares == {"a": 3}


def test_blocks_that_a_peer_no_longer_lends_are_not_missing_in_a_store() -> None:
    engine = Follower(role="decode", finds_by_key=False)
    submitted = handed_over("a", 10)
    engine.add(submitted)
    engine.step()
    engine.end_first_load(submitted, 1, MISSING)
    assert engine.missing() == []
