"""Requests that a step cannot compute: what is done for them meanwhile, and at what cost."""

import pytest

from tests.support.driven_scheduler import DrivenScheduler, request


def test_prompts_whose_beginning_was_loaded_count_as_computed_in_part() -> None:
    driven = DrivenScheduler(with_connector=True, long_prefill_token_threshold=4)
    asked = [request(name, 24, first_token=token) for name, token in (("a", 0), ("b", 1))]
    driven.add(*asked)
    driven.step()
    driven.answer(num_found=2)
    driven.step()
    for job, each in zip(driven.work().loads, asked, strict=True):
        driven.end_load(job, each.spec.prompt_token_ids)

    for _ in range(3):
        driven.step()
        assert driven.shares == {"a": 4}
    driven.step()
    assert driven.shares == {"a": 4, "b": 4}, "the last chunk of a prompt leaves nothing in part"


def test_what_waits_is_looked_up_and_loaded_while_a_prompt_takes_the_whole_budget() -> None:
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
    assert driven.shares == {"long": 8}, "its budget is not touched"
    while driven.shares == {"long": 8}:
        driven.step()
    assert driven.shares == {"long": 1, "short": 1}


def test_who_waits_for_a_place_among_prompts_in_part_is_not_matched_in_every_step(
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

    def counted(keys: list[bytes], num_tokens: int) -> object:
        num_matched.append(num_tokens)
        return match_prefix(keys, num_tokens)

    monkeypatch.setattr(kv, "match_prefix", counted)
    for _ in range(4):
        driven.step()
        assert driven.shares == {"long": 4}
    assert num_matched == []

    driven.add(request("is nearly cached", 15))
    driven.step()
    assert driven.shares == {"long": 4, "is nearly cached": 3}
    assert num_matched == [15]
