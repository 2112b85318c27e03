"""Requests for which a step has no budget: their lookups, loads and prefix matches."""

import pytest

from tests.support.driven_scheduler import DrivenScheduler, request


def test_prompts_with_a_loaded_prefix_count_as_partial_prefills() -> None:
    driven = DrivenScheduler(with_connector=True, long_prefill_token_threshold=4)
    submitted = [request(name, 24, first_token=token) for name, token in (("a", 0), ("b", 1))]
    driven.add(*submitted)
    driven.step()
    driven.answer(num_found=2)
    driven.step()
    for job, each in zip(driven.work().loads, submitted, strict=True):
        driven.end_load(job, each.spec.prompt_token_ids)

    for _ in range(3):
        driven.step()
        assert driven.shares == {"a": 4}
    driven.step()
    assert driven.shares == {"a": 4, "b": 4}, "the last chunk ends a partial prefill"


def test_waiting_requests_are_looked_up_and_loaded_while_a_prompt_uses_the_whole_budget() -> None:
    driven = DrivenScheduler(with_connector=True, max_num_batched_tokens=8)
    short = request("short", 9)
    driven.add(request("long", 40, first_token=0))
    driven.step()
    driven.answer()
    driven.step()
    driven.add(short)

    driven.step()
    assert len(driven.answer(num_found=2).lookups) == 1
    driven.step()
    (load,) = driven.work().loads
    driven.end_load(load, short.spec.prompt_token_ids)
    driven.step()
    assert driven.shares == {"long": 8}, "the load uses no budget"
    while driven.shares == {"long": 8}:
        driven.step()
    assert driven.shares == {"long": 1, "short": 1}


def test_requests_that_wait_for_a_partial_prefill_are_not_matched_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driven = DrivenScheduler(max_num_seqs=16, long_prefill_token_threshold=4)
    driven.add(request("warm", 13))
    driven.run()
    driven.add(request("long", 48, first_token=0))
    driven.step()
    driven.add(*(request(f"waits {i}", 30) for i in range(5)))
    kv, num_matched = driven.scheduler.kv, []
    match_prefix = kv.match_prefix

    def counting_match(keys: list[bytes], num_tokens: int) -> object:
        num_matched.append(num_tokens)
        return match_prefix(keys, num_tokens)

    monkeypatch.setattr(kv, "match_prefix", counting_match)
    for _ in range(4):
        driven.step()
        assert driven.shares == {"long": 4}
    assert num_matched == []

    driven.add(request("is nearly cached", 15))
    driven.step()
    assert driven.shares == {"long": 4, "is nearly cached": 3}
    assert num_matched == [15]
