"""Lookups, loads and saves of the scheduler: waiting requests, held blocks, timeouts, failures."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from baton.common.errors import (
    AbortedError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from engine.request import EngineRequest, FinishReason
from engine.validation import check_request
from kvstore.jobs import LoadResult, LookupResult, TransferResults
from tests.support.driven_scheduler import NAMESPACE, DrivenScheduler, handed_over, request
from tests.support.fake_model import expected_tokens, fake_config, fake_info
from tests.support.reference_decoding import first_beams
from tests.support.requests import changed


def decode_engine(**config: object) -> DrivenScheduler:
    return DrivenScheduler(with_connector=True, role="decode", **config)


def test_an_open_lookup_does_not_block_later_requests() -> None:
    driven = DrivenScheduler(with_connector=True)
    driven.add(request("a", 9), request("b", 3))  # b has no full block to look up
    driven.step()
    assert driven.shares == {"b": 3}

    (lookup,) = driven.work().lookups
    assert len(lookup.keys) == 2
    driven.scheduler.apply(TransferResults(lookups=(LookupResult(lookup.job_id, 0),)))
    driven.step()

    assert driven.shares["a"] == 9


def test_a_request_that_has_waited_for_a_store_in_vain_is_not_looked_up() -> None:
    driven = decode_engine()
    driven.add(replace(request("a", 9), skips_lookup=True))
    driven.step()
    assert driven.shares == {"a": 9}
    assert not driven.work().lookups


def test_a_lookup_that_does_not_report_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    driven = decode_engine(kv_transfer_timeout_s=5.0)
    driven.add(request("a", 9))
    driven.step()
    (lookup,) = driven.work().lookups
    assert driven.scheduler.next_deadline == 5.0
    driven.now = 5.0
    driven.scheduler.expire()
    driven.step()

    assert "a: a KV look-up has not reported" in caplog.text
    assert driven.shares == {"a": 9}
    work = driven.work()
    assert work.cancelled_lookups == [lookup.job_id]
    driven.end_saves(job.job_id for job in work.saves)
    assert driven.scheduler.next_deadline is None


def test_blocks_found_are_loaded_and_the_rest_is_computed() -> None:
    driven = DrivenScheduler(with_connector=True)
    submitted = request("a", 11)
    driven.add(submitted)
    driven.step()
    driven.answer(num_found=2)
    driven.step()
    assert driven.shares == {}
    (load,) = driven.work().loads
    assert len(load.block_ids) == 2

    driven.end_load(load, submitted.spec.prompt_token_ids)
    (output,) = driven.step()

    assert driven.shares == {"a": 3}
    assert output.cached_tokens == 8
    assert not driven.work().saves, "loaded blocks are not saved again"


def test_a_handed_over_prompt_is_not_recomputed() -> None:
    driven = decode_engine()
    submitted = handed_over("a")
    driven.add(submitted)
    driven.step()
    assert driven.shares == {}
    (load,) = driven.work().loads

    driven.end_load(load, submitted.spec.prompt_token_ids)
    driven.step()

    assert driven.shares == {"a": 1}


def test_decode_computes_the_tail_that_a_handoff_lacks() -> None:
    driven = decode_engine()
    whole = handed_over("a", n=2)
    handoff = replace(whole.handoff, block_keys=whole.handoff.block_keys[:2], num_tokens=8)
    driven.add(replace(whole, handoff=handoff))
    driven.step()
    (load,) = driven.work().loads
    assert load.keys == handoff.block_keys

    driven.end_load(load, whole.spec.prompt_token_ids[:8])
    driven.step()
    assert driven.shares == {"a": 2}
    prompt = whole.spec.prompt_token_ids
    assert driven.run()["a"] == expected_tokens((*prompt, 0), 3)


def test_candidates_share_a_handed_over_prompt_and_copy_its_tail() -> None:
    driven = decode_engine()
    submitted = handed_over("a", n=3)
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads
    assert len(load.block_ids) == 3

    driven.end_load(load, submitted.spec.prompt_token_ids)
    batch = driven.begin()

    assert driven.shares == {"a": 3}
    assert len(batch.block_copies) == 2, "the last candidate may keep the tail"
    driven.end(batch)
    assert driven.num_free == 32 - 2 - 3


def test_beams_start_from_the_first_beams_of_prefill() -> None:
    driven = decode_engine()
    submitted = handed_over("a", beam_width=2)
    submitted = replace(submitted, progress=(), first_beams=first_beams(submitted))
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    driven.end_load(load, submitted.spec.prompt_token_ids)
    driven.step()

    assert driven.shares == {"a": 2}


def test_a_failed_load_is_computed_from_the_last_good_block() -> None:
    driven = decode_engine()
    submitted = handed_over("a")
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    driven.end_load(load, submitted.spec.prompt_token_ids, 1, "corrupt")
    driven.step()

    assert driven.shares == {"a": 11 - 4}
    assert not driven.work().lookups, "there is no second lookup"


def test_a_failed_load_ends_the_request_by_policy() -> None:
    driven = decode_engine(kv_load_failure_policy="fail")
    submitted = handed_over("a")
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    (output,) = driven.end_load(load, submitted.spec.prompt_token_ids, 1, "corrupt")

    assert isinstance(output.error, AbortedError)
    assert "corrupt" in output.error.message
    assert driven.num_free == 32
    driven.scheduler.check()


def test_blocks_of_an_aborted_load_stay_held_until_its_result() -> None:
    driven = decode_engine()
    submitted = handed_over("a")
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    driven.scheduler.abort(["a"])
    assert driven.work().cancelled_loads == [load.job_id]
    assert driven.num_free == 32 - 3
    assert driven.scheduler.num_unfinished == 0

    assert driven.end_load(load, submitted.spec.prompt_token_ids, 0, "cancelled") == []
    assert driven.num_free == 32


def test_an_overdue_load_is_computed_and_its_blocks_stay_fenced() -> None:
    driven = decode_engine(kv_transfer_timeout_s=0.2)
    submitted = handed_over("a", max_tokens=3)
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads
    driven.now = 0.19
    assert driven.scheduler.expire() == []
    driven.step()
    assert driven.shares == {}

    driven.now = 0.2
    driven.scheduler.expire()
    driven.step()
    assert driven.shares == {"a": 11}
    driven.run()
    driven.end_all_saves()
    assert (driven.num_free, driven.scheduler.num_transfers) == (32 - 3, 1)

    driven.end_load(load, submitted.spec.prompt_token_ids)
    driven.scheduler.check()
    assert (driven.num_free, driven.scheduler.num_transfers) == (32, 0)


def test_prefill_hands_over_when_every_block_is_committed() -> None:
    driven = DrivenScheduler(with_connector=True, role="prefill")
    driven.add(request("a", 10))
    driven.step()
    driven.answer()
    (first,) = driven.step()
    assert driven.shares == {"a": 10}
    assert first.token_ids == tuple(expected_tokens((1,) * 10, 1)), (
        "the first token waits for no save"
    )
    assert not first.is_last
    full, tail = driven.work().saves
    assert (len(full.keys), full.num_tail_tokens) == (2, 0)
    assert (len(tail.keys), tail.num_tail_tokens) == (1, 2)

    (saved_output,) = driven.end_saves([full.job_id])
    assert (saved_output.saved.block_keys, saved_output.saved.num_tokens) == (full.keys, 8)
    (output,) = driven.end_saves([tail.job_id])

    assert output.finish_reason is FinishReason.HANDOFF
    assert output.token_ids == ()
    assert output.handoff.handoff_id == saved_output.saved.handoff_id
    assert output.handoff.block_keys == (*full.keys, *tail.keys)
    driven.scheduler.release_handoff(output.handoff.handoff_id)
    assert driven.work().deletes == list(tail.keys)


def test_prefill_hands_over_the_first_token_of_every_candidate() -> None:
    driven = DrivenScheduler(with_connector=True, role="prefill")
    submitted = request("a", 3, n=2, best_of=3)
    driven.add(submitted)
    (first,) = driven.step()
    (output,) = driven.end_saves(job.job_id for job in driven.work().saves)

    assert len(first.token_ids) == len(first.first_logprobs) == 3
    assert output.is_last


def test_a_prompt_whose_save_failed_is_handed_over_without_kv() -> None:
    driven = DrivenScheduler(with_connector=True, role="prefill")
    driven.add(request("a", 3))
    driven.step()
    (tail,) = driven.work().saves

    (output,) = driven.end_saves([tail.job_id], committed=False)

    assert output.finish_reason is FinishReason.HANDOFF
    assert output.handoff is None


def test_a_prompt_whose_save_is_overdue_is_handed_over_without_kv() -> None:
    driven = DrivenScheduler(with_connector=True, role="prefill", kv_transfer_timeout_s=5.0)
    driven.add(request("a", 3))
    driven.step()
    (tail,) = driven.work().saves
    driven.now = 5.0

    (output,) = driven.scheduler.expire()

    assert output.finish_reason is FinishReason.HANDOFF
    assert output.handoff is None
    assert driven.num_free == 31
    assert driven.end_saves([tail.job_id]) == []
    assert driven.num_free == 32


def test_a_late_lookup_result_does_not_reach_a_request_of_the_same_id() -> None:
    driven = DrivenScheduler(with_connector=True)
    driven.add(request("a", 13))
    driven.step()
    (old,) = driven.work().lookups
    driven.scheduler.abort(["a"])
    assert driven.work().cancelled_lookups == [old.job_id]

    driven.add(request("a", 6))
    driven.step()
    (new,) = driven.work().lookups
    driven.scheduler.apply(TransferResults(lookups=(LookupResult(old.job_id, 3),)))
    driven.step()
    assert driven.shares == {}, "its own lookup is still open"
    driven.scheduler.apply(TransferResults(lookups=(LookupResult(new.job_id, 0),)))
    driven.step()

    assert driven.shares == {"a": 6}


def test_kv_of_a_request_with_invalid_logits_is_deleted() -> None:
    driven = DrivenScheduler(with_connector=True, max_num_batched_tokens=8)
    driven.add(request("a", 11))
    driven.step()
    driven.answer()
    driven.step()
    (save,) = driven.work().saves

    driven.runner.fault = "not finite"
    (output,) = driven.step()
    assert isinstance(output.error, InternalError)
    assert not driven.work().deletes, "the save is still in progress"
    driven.end_saves([save.job_id])
    assert driven.work().deletes == list(save.keys)

    driven.add(request("b", 11))
    driven.step()
    driven.answer()
    driven.step()
    assert driven.shares == {"b": 8}, "no block of the failed request is cached"


def test_a_preempted_prompt_is_loaded_from_the_store() -> None:
    driven = DrivenScheduler(
        num_blocks=8,
        with_connector=True,
        preemption_mode="recompute",
        enable_prefix_caching=False,
    )
    first, second = request("first", 11, max_tokens=9), request("second", 12, max_tokens=9)
    driven.add(first, second)
    driven.step()
    driven.answer()
    driven.step()
    driven.end_saves(job.job_id for job in driven.work().saves)
    while driven.scheduler.load().num_preemptions == 0:
        driven.step()

    while not (loads := driven.answer(num_found=3).loads):
        driven.step()
    (load,) = loads
    assert len(load.block_ids) == 3
    driven.end_load(load, second.spec.prompt_token_ids)
    driven.step()

    assert driven.shares["second"] < 8, "only generated tokens are recomputed"
    rest = driven.run()["second"]
    assert rest == expected_tokens(second.spec.prompt_token_ids, 9)[-len(rest) :]


def test_a_handoff_names_a_prompt_with_or_without_its_tail() -> None:
    whole = handed_over("a", 9)
    keys = whole.handoff.block_keys
    _check(whole)
    _check(replace(whole, handoff=replace(whole.handoff, block_keys=keys[:2], num_tokens=8)))

    fewer = replace(whole.handoff, block_keys=keys[:1], num_tokens=4)
    with pytest.raises(InvalidArgumentError, match="the prompt's 9, or the 8 in its full blocks"):
        _check(replace(whole, handoff=fewer))


def test_a_handoff_of_another_prompt_is_refused() -> None:
    ours, foreign = handed_over("a", 5), handed_over("a", 5, first_token=0)
    _check(ours)

    for handoff in (
        foreign.handoff,
        replace(ours.handoff, handoff_id="other"),
        replace(ours.handoff, namespace=b"other"),
        replace(ours.handoff, connector="other"),
        replace(ours.handoff, digest_scheme="other"),
        replace(ours.handoff, block_keys=ours.handoff.block_keys[:1]),
    ):
        with pytest.raises(FailedPreconditionError):
            _check(replace(ours, handoff=handoff))
    with pytest.raises(FailedPreconditionError):
        _check(changed(ours, cache_salt="tenant"))


def test_a_salt_that_is_not_valid_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cache_salt"):
        _check(request("a", 3, cache_salt="\ud800"))


def test_states_may_be_handed_over_from_the_end_of_any_full_block() -> None:
    """They are those that the engine had kept from which the request moved."""
    whole = handed_over("a", max_tokens=2)
    for num_blocks in (0, 1, 2):
        keys = whole.handoff.block_keys[:num_blocks]
        handoff = replace(whole.handoff, block_keys=keys, num_tokens=4 * num_blocks)
        for has_states in (False, True):
            may_come = num_blocks == 2 or (num_blocks == 1 and has_states)
            refused = pytest.raises(InvalidArgumentError, match=r"handoff.num_tokens")
            with nullcontext() if may_come else refused:
                _check(replace(whole, handoff=handoff), has_states=has_states)


def _check(submitted: EngineRequest, *, has_states: bool = False) -> None:
    check_request(
        submitted,
        config=fake_config(kv_connector="fake://"),
        info=fake_info(4, 64, has_states=has_states),
        num_blocks=3,
        num_slots=1,
        namespace=NAMESPACE,
    )


def test_only_blocks_of_committed_steps_are_saved() -> None:
    """Saves run beside steps in flight and do not wait for them."""
    driven = DrivenScheduler(with_connector=True, role="prefill", max_num_batched_tokens=4)
    driven.add(request("a", 12))
    driven.step()
    driven.answer()
    first = driven.begin()
    second = driven.begin()
    assert [batch.chunks[0].start_position for batch in (first, second)] == [0, 4]
    assert not driven.work().saves
    driven.end(first)

    (save,) = driven.work().saves
    assert save.block_ids == first.table_updates[0].block_ids[:1]
    driven.end(second)
    (save,) = driven.work().saves
    assert len(save.block_ids) == 1


def test_no_load_uses_blocks_of_a_step_in_flight() -> None:
    """Loads run beside steps in flight and do not wait for them."""
    driven = decode_engine(num_blocks=4)
    driven.add(request("a", 12, max_tokens=2))
    driven.step()
    driven.answer()
    batch = driven.begin()
    assert driven.shares == {"a": 12}
    driven.scheduler.abort(["a"])
    driven.add(handed_over("b"))
    assert driven.begin() is None
    assert not driven.work().loads, "three blocks are fenced"

    driven.end(batch)
    assert driven.begin() is None
    (load,) = driven.work().loads
    assert len(load.block_ids) == 3


def test_no_load_takes_blocks_that_a_running_group_waits_for() -> None:
    driven = decode_engine(num_blocks=8)
    driven.add(handed_over("gone"))
    driven.step()
    (load,) = driven.work().loads
    driven.scheduler.abort(["gone"])  # three blocks are held until its load ends
    driven.add(replace(request("a", 8, n=2, max_tokens=16), skips_lookup=True))
    driven.step()
    while driven.shares:
        driven.step()
    driven.add(handed_over("b", 6))
    driven.end_load(load, (1,) * 10)
    driven.scheduler.start_loads()
    assert not driven.work().loads
    driven.step()
    assert driven.shares == {"a": 2}


def test_a_load_in_doubt_is_computed_at_once_and_its_blocks_stay_held() -> None:
    driven = decode_engine()
    driven.add(handed_over("a", max_tokens=3))
    driven.step()
    (load,) = driven.work().loads

    driven.scheduler.apply(TransferResults(doubted=(load.job_id,)))
    driven.step()
    assert driven.shares == {"a": 11}
    driven.run()
    driven.end_all_saves()
    assert (driven.num_free, driven.scheduler.num_transfers) == (32 - 3, 1)

    driven.scheduler.apply(TransferResults(loads=(LoadResult(load.job_id, 0, "unavailable"),)))
    driven.scheduler.check()
    assert driven.num_free == 32


def test_a_load_in_doubt_ends_the_request_by_policy() -> None:
    driven = decode_engine(kv_load_failure_policy="fail")
    driven.add(handed_over("a"))
    driven.step()
    (load,) = driven.work().loads

    (output,) = driven.scheduler.apply(TransferResults(doubted=(load.job_id,)))

    assert isinstance(output.error, AbortedError)
    assert "unavailable" in output.error.message
    assert driven.num_free == 32 - 3
