"""Log-probabilities as the scheduler asks for them and returns them."""

import pytest

from engine.batch import NO_LOGPROBS
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request
from tests.support.fake_model import token_logprobs


def of_prompt(prompt, num_top):
    return tuple(
        token_logprobs(prompt[:index], prompt[index], num_top) for index in range(1, len(prompt))
    )


def outputs_by_request(driven):
    outputs = {}
    for _ in range(400):
        if driven.scheduler.num_unfinished == 0:
            return outputs
        for output in driven.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("a request starved")


def test_requests_that_ask_for_nothing_get_nothing():
    driven = DrivenScheduler()
    driven.add(request("a", 10), request("b", 10, n=2, best_of=3, temperature=1.0))
    outputs = outputs_by_request(driven)
    assert not any(o.logprobs or o.prompt_logprobs for each in outputs.values() for o in each)
    chunks = [chunk for batch in driven.runner.batches for chunk in batch.chunks]
    assert {chunk.num_logprobs for chunk in chunks} == {NO_LOGPROBS}
    assert not any(chunk.prompt_targets for chunk in chunks)


def test_a_cached_prompt_is_computed_again_and_cached_still():
    driven = DrivenScheduler()
    asking = request("b", 14, prompt_logprobs=1)
    driven.add(request("a", 14))
    driven.run()
    driven.add(asking)
    first, *rest = outputs_by_request(driven)["b"]
    assert first.prompt_logprobs == of_prompt(asking.spec.prompt_token_ids, 1)
    assert not any(output.prompt_logprobs for output in rest)
    assert first.cached_tokens == 0
    driven.add(request("c", 14))
    first, *_ = outputs_by_request(driven)["c"]
    assert first.cached_tokens == 12


def test_it_does_not_wait_for_another_request_that_computes_the_same_prompt():
    driven = DrivenScheduler(max_num_batched_tokens=8, max_num_partial_prefills=2)
    driven.add(request("a", 20), request("b", 20, prompt_logprobs=0))
    driven.step()
    driven.step()
    driven.step()
    assert driven.shares == {"a": 4, "b": 4}


def test_a_prompt_is_neither_looked_up_nor_loaded_but_saved():
    driven = DrivenScheduler(with_connector=True, role="prefill")
    asking = request("a", 10, prompt_logprobs=2, logprobs=1)
    driven.add(asking)
    outputs = driven.step()
    work = driven.work()
    assert not work.lookups
    assert not work.loads
    assert work.saves
    (first,) = (output for output in outputs if output.token_ids)
    prompt = asking.spec.prompt_token_ids
    assert first.prompt_logprobs == of_prompt(prompt, 2)
    assert first.logprobs == (token_logprobs(prompt, first.token_ids[0], 1),)
    driven.end_saves(save.job_id for save in work.saves)


def test_decode_loads_a_handed_over_prompt_whose_logprobs_prefill_has_returned():
    driven = DrivenScheduler(with_connector=True, role="decode")
    request_ = handed_over("a", prompt_logprobs=2, logprobs=0)
    driven.add(request_)
    driven.begin()
    (job,) = driven.work().loads
    driven.end_load(job, request_.spec.prompt_token_ids)
    outputs = outputs_by_request(driven)["a"]
    assert not any(output.prompt_logprobs for output in outputs)
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("num_old", range(5, 9))
def test_a_prompt_that_is_preempted_is_reported_whole_and_once(mode, num_old):
    driven = DrivenScheduler(
        8, num_host_blocks=64, preemption_mode=mode, max_num_batched_tokens=2, max_num_seqs=2
    )
    asking = request("young", 14, prompt_logprobs=1, logprobs=2, max_tokens=3)
    prompt = asking.spec.prompt_token_ids
    driven.add(request("old", num_old, max_tokens=24 - num_old), asking)
    outputs = []
    while not driven.scheduler.load().num_preemptions:
        outputs += [output for output in driven.step() if output.request_id == "young"]
    assert outputs == []
    while driven.scheduler.num_unfinished:
        outputs += [output for output in driven.step() if output.request_id == "young"]
    assert outputs[0].prompt_logprobs == of_prompt(prompt, 1)
    assert not any(output.prompt_logprobs for output in outputs[1:])
    sequence = list(prompt)
    for output in outputs:
        for token_id, found in zip(output.token_ids, output.logprobs, strict=True):
            assert found == token_logprobs(sequence, token_id, 2)
            sequence.append(token_id)
    assert len(sequence) == 17
