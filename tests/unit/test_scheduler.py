"""The scheduler by example: order, budgets, look-ups that block nobody, failed loads."""

from dataclasses import replace

import pytest

from baton.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from engine.batch import DrawParams, StepOutput
from engine.config import EngineConfig
from engine.request import EngineRequest, FinishReason, RequestOutput
from engine.scheduler import Scheduler
from engine.validation import check_request
from kvstore.block_key import BlockKeyChain
from kvstore.connector import LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.handoff import KvHandoff
from kvstore.store_connector import StoreConnectorScheduler
from tests.support.fake_runner import fake_config, fake_info

GREEDY = DrawParams(temperature=0, top_k=0, top_p=1, seed=0)
INFO = fake_info(block_size=4, max_model_len=64)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_scheduler(
    clock: Clock, num_blocks: int = 32, *, with_connector: bool = False, **config: object
) -> Scheduler:
    return Scheduler(
        make_config(with_connector, **config),
        INFO,
        num_blocks=num_blocks,
        namespace=b"namespace",
        connector=StoreConnectorScheduler("fake", ttl_s=60) if with_connector else None,
        clock=clock,
    )


def make_config(with_connector: bool = False, **config: object) -> EngineConfig:
    return fake_config(kv_connector="fake://" if with_connector else None, **config)


def request(request_id: str, num_tokens: int = 6, **fields: object) -> EngineRequest:
    defaults = {"prompt_token_ids": (1,) * num_tokens, "draw": GREEDY, "max_tokens": 4}
    return EngineRequest(request_id=request_id, **(defaults | fields))


def step(scheduler: Scheduler) -> tuple[dict[str, int], list[RequestOutput]]:
    """Runs a step in which every draw is a 0; returns each request's share and the outputs."""
    batch = scheduler.schedule()
    if batch is None:
        return {}, []
    tokens = tuple(None if share.draw is None else 0 for share in batch.sequences)
    outputs = scheduler.commit(batch, StepOutput(batch.step, tokens))
    return {share.request_id: share.num_tokens for share in batch.sequences}, outputs


def test_prompts_are_chunked_under_the_budget_beside_decodes(clock: Clock) -> None:
    scheduler = make_scheduler(clock, max_num_batched_tokens=8)
    scheduler.add(request("a", 6))
    scheduler.add(request("b", 11))

    assert step(scheduler)[0] == {"a": 6, "b": 2}
    assert step(scheduler)[0] == {"a": 1, "b": 7}
    assert step(scheduler)[0] == {"a": 1, "b": 2}
    assert step(scheduler)[0] == {"a": 1, "b": 1}


def test_higher_priority_and_earlier_arrival_come_first(clock: Clock) -> None:
    scheduler = make_scheduler(clock, max_num_seqs=2)
    for request_id, priority in (("a", 0), ("b", 0), ("c", 5)):
        scheduler.add(request(request_id, priority=priority))

    assert list(step(scheduler)[0]) == ["c", "a"]


def test_the_least_important_is_preempted_and_comes_back(clock: Clock) -> None:
    scheduler = make_scheduler(clock, num_blocks=5)
    scheduler.add(request("a", 7, max_tokens=9))
    scheduler.add(request("b", 8, max_tokens=9))
    shares = [step(scheduler)[0] for _ in range(20)]

    assert shares[0] == {"a": 7, "b": 8}
    assert any("b" not in share and share for share in shares), "nobody was preempted"
    restart = next(share["b"] for share in shares[1:] if share.get("b", 0) > 1)
    assert restart <= 16
    assert scheduler.num_unfinished == 0
    scheduler.check()


def test_an_open_lookup_does_not_block_those_behind(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True)
    scheduler.add(request("a", 9))
    scheduler.add(request("b", 3))  # no full block: nothing to look up

    assert step(scheduler)[0] == {"b": 3}
    (lookup,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 0),)))

    assert len(lookup.keys) == 2
    assert step(scheduler)[0]["a"] == 9


def test_a_load_brings_what_is_found_and_the_rest_is_computed(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True)
    scheduler.add(request("a", 11))
    step(scheduler)
    (lookup,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 2),)))
    assert step(scheduler)[0] == {}
    (load,) = scheduler.build_work().loads
    assert len(load.block_ids) == 2

    scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 2),)))
    shares, outputs = step(scheduler)

    assert shares == {"a": 3}
    assert outputs[0].cached_tokens == 8


def handed_over(num_tokens: int = 10, first_token: int = 1) -> EngineRequest:
    prompt = (first_token,) + (1,) * (num_tokens - 1)
    handoff = KvHandoff(
        handoff_id="h",
        namespace=b"namespace",
        block_keys=BlockKeyChain(b"namespace", 4).of_prompt(prompt, "h"),
        num_tokens=num_tokens,
        connector="fake",
        digest_scheme="xxh3-128",
        lease_ms=1000,
    )
    return request("a", prompt_token_ids=prompt, output_token_ids=(0,), handoff=handoff)


def test_nothing_of_a_handed_over_prompt_is_computed_again(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, role="decode")
    scheduler.add(handed_over())
    assert step(scheduler)[0] == {}
    (load,) = scheduler.build_work().loads

    scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 3),)))

    assert step(scheduler)[0] == {"a": 1}


def test_a_failed_load_is_computed_from_the_last_good_block(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, role="decode")
    scheduler.add(handed_over())
    step(scheduler)
    (load,) = scheduler.build_work().loads

    scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 1, "corrupt"),)))

    assert step(scheduler)[0] == {"a": 11 - 4}
    assert not scheduler.build_work().lookups, "the store is not asked again"


def test_a_failed_load_ends_the_request_by_policy(clock: Clock) -> None:
    scheduler = make_scheduler(
        clock, with_connector=True, role="decode", kv_load_failure_policy="fail"
    )
    scheduler.add(handed_over())
    step(scheduler)
    (load,) = scheduler.build_work().loads

    (output,) = scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 1, "corrupt"),)))

    assert isinstance(output.error, AbortedError)
    assert "corrupt" in output.error.message
    assert scheduler.load().num_free_blocks == 32
    scheduler.check()


def test_blocks_of_an_aborted_load_stay_held_until_its_result(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, role="decode")
    scheduler.add(handed_over())
    step(scheduler)
    (load,) = scheduler.build_work().loads

    scheduler.abort(["a"])
    assert scheduler.build_work().cancelled_loads == (load.job_id,)
    assert scheduler.load().num_free_blocks == 32 - 3
    assert scheduler.num_unfinished == 0

    assert scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 0, "cancelled"),))) == []
    assert scheduler.load().num_free_blocks == 32


def test_prefill_hands_over_when_every_block_is_committed(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, role="prefill")
    scheduler.add(request("a", 10))
    step(scheduler)
    (lookup,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 0),)))
    assert step(scheduler) == ({"a": 10}, [])
    full, tail = scheduler.build_work().saves
    assert (len(full.keys), full.num_tail_tokens) == (2, 0)
    assert (len(tail.keys), tail.num_tail_tokens) == (1, 2)

    assert scheduler.apply(TransferResults(saves=(SaveResult(full.job_id, True),))) == []
    (output,) = scheduler.apply(TransferResults(saves=(SaveResult(tail.job_id, True),)))

    assert output.finish_reason is FinishReason.HANDOFF
    assert output.token_ids == (0,)
    assert output.handoff is not None
    assert output.handoff.block_keys == (*full.keys, *tail.keys)
    scheduler.release_handoff(output.handoff.handoff_id)
    assert scheduler.build_work().deletes == tail.keys


def test_without_its_save_a_prompt_is_handed_over_without_kv(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, role="prefill")
    scheduler.add(request("a", 3))
    step(scheduler)
    (tail,) = scheduler.build_work().saves

    (output,) = scheduler.apply(TransferResults(saves=(SaveResult(tail.job_id, False),)))

    assert output.finish_reason is FinishReason.HANDOFF
    assert output.handoff is None


def test_deadlines_end_requests_in_any_state(clock: Clock) -> None:
    scheduler = make_scheduler(clock, max_num_seqs=1)
    scheduler.add(request("running", deadline=5.0))
    scheduler.add(request("waiting", deadline=6.0))
    step(scheduler)
    assert scheduler.next_deadline == 5.0
    clock.now = 7.0

    outputs = scheduler.expire()

    assert [output.request_id for output in outputs] == ["running", "waiting"]
    assert all(isinstance(output.error, DeadlineExceededError) for output in outputs)
    assert scheduler.load().num_free_blocks == 32


def check(asked: EngineRequest, **config: object) -> None:
    check_request(
        asked,
        config=make_config(with_connector=True, **config),
        info=INFO,
        num_blocks=3,
        namespace=b"namespace",
    )


def test_a_handoff_of_another_prompt_is_refused() -> None:
    ours, foreign = handed_over(5), handed_over(5, first_token=0)
    assert ours.handoff is not None
    assert foreign.handoff is not None
    check(ours)

    for handoff in (
        foreign.handoff,
        replace(ours.handoff, handoff_id="other"),
        replace(ours.handoff, namespace=b"other"),
        replace(ours.handoff, connector="other"),
        replace(ours.handoff, digest_scheme="other"),
        replace(ours.handoff, block_keys=ours.handoff.block_keys[:1]),
    ):
        with pytest.raises(FailedPreconditionError):
            check(replace(ours, handoff=handoff))
    with pytest.raises(FailedPreconditionError):
        check(replace(ours, cache_salt="tenant"))


def test_a_salt_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cache_salt"):
        check(request("a", 3, cache_salt="\ud800"))


def test_a_late_answer_does_not_reach_a_request_of_the_same_id(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True)
    scheduler.add(request("a", 13))
    step(scheduler)
    (old,) = scheduler.build_work().lookups
    scheduler.abort(["a"])
    assert scheduler.build_work().cancelled_lookups == (old.job_id,)

    scheduler.add(request("a", 6))
    step(scheduler)
    (new,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(old.job_id, 3),)))
    assert step(scheduler)[0] == {}, "its own answer is still to come"
    scheduler.apply(TransferResults(lookups=(LookupResult(new.job_id, 0),)))

    assert step(scheduler)[0] == {"a": 6}


def test_kv_of_a_poisoned_request_is_found_by_nobody(clock: Clock) -> None:
    scheduler = make_scheduler(clock, with_connector=True, max_num_batched_tokens=8)
    scheduler.add(request("a", 11))
    step(scheduler)
    (lookup,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 0),)))
    step(scheduler)
    (save,) = scheduler.build_work().saves

    batch = scheduler.schedule()
    assert batch is not None
    (output,) = scheduler.commit(batch, StepOutput(batch.step, (None,)))
    assert isinstance(output.error, InternalError)
    assert not scheduler.build_work().deletes, "the save is still under way"
    scheduler.apply(TransferResults(saves=(SaveResult(save.job_id, True),)))
    assert scheduler.build_work().deletes == save.keys

    scheduler.add(request("b", 11))
    step(scheduler)
    (lookup,) = scheduler.build_work().lookups
    scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 0),)))
    assert step(scheduler)[0] == {"b": 8}, "nothing of it is cached"


def test_deadlines_of_ended_requests_do_not_pile_up(clock: Clock) -> None:
    scheduler = make_scheduler(clock)
    for index in range(1000):
        scheduler.add(request(str(index), deadline=1e9))
        scheduler.abort([str(index)])

    assert len(scheduler._deadlines) < 100


def test_what_can_never_fit_is_refused() -> None:
    check(request("a", 9, max_tokens=4))  # 12 tokens need KV, the 13th never does
    with pytest.raises(ResourceExhaustedError, match="needs 4 KV blocks"):
        check(request("a", 9, max_tokens=5))
    check(request("a", 12, max_tokens=50), role="prefill")
    with pytest.raises(ResourceExhaustedError, match="needs 4 KV blocks"):
        check(request("a", 13), role="prefill")


def test_a_finished_request_frees_its_id_and_stops_at_stop_tokens(clock: Clock) -> None:
    scheduler = make_scheduler(clock)
    asked = request("a", stop_token_ids=frozenset({0}))
    for _ in range(2):
        scheduler.add(replace(asked))
        _, (output,) = step(scheduler)
        assert output.finish_reason is FinishReason.STOP
        assert output.token_ids == (0,)
