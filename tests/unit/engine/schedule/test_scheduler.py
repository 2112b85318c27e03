"""The scheduler: order, budgets, chunks, priorities, the prefix cache."""

from engine.request import FinishReason
from engine.validation import num_blocks_needed
from tests.support.driven_scheduler import DrivenScheduler, request
from tests.support.fake_model import expected_tokens, fake_config, fake_info


def test_prompts_are_chunked_to_the_budget_that_decodes_leave() -> None:
    driven = DrivenScheduler(max_num_batched_tokens=8)
    driven.add(request("a", 6), request("b", 11, first_token=2))
    shares = []
    for _ in range(4):
        driven.step()
        shares.append(driven.shares)

    assert shares == [{"a": 6, "b": 2}, {"a": 1, "b": 7}, {"a": 1, "b": 2}, {"a": 1, "b": 1}]


def test_lower_priority_values_and_earlier_arrivals_come_first() -> None:
    driven = DrivenScheduler(max_num_seqs=2)
    driven.add(request("a"), request("b", first_token=2), request("c", priority=-5, first_token=3))
    driven.step()

    assert list(driven.shares) == ["c", "a"]


def test_a_level_of_priority_counts_as_priority_ageing_s_of_waiting() -> None:
    driven = DrivenScheduler(max_num_seqs=1, priority_ageing_s=10.0)
    driven.add(request("old", max_tokens=1))
    driven.now = 19.0
    driven.add(request("urgent", priority=-2, max_tokens=1))
    driven.now = 21.0
    driven.add(request("as urgent, but late", priority=-2, max_tokens=1))
    order = []
    for _ in range(3):
        driven.step()
        order += driven.shares

    assert order == ["urgent", "old", "as urgent, but late"]


def test_a_request_does_not_starve_behind_more_urgent_requests() -> None:
    """Its wait is the difference of priorities times `priority_ageing_s`."""
    driven = DrivenScheduler(max_num_seqs=1, priority_ageing_s=5.0)
    driven.add(request("patient"))
    for index in range(100):
        driven.add(request(f"urgent {index}", priority=-3, max_tokens=1))
        driven.step()
        if "patient" in driven.shares:
            break
        driven.now += 1.0

    assert driven.now == 3 * 5.0


def test_a_request_that_waits_for_blocks_is_not_overtaken() -> None:
    driven = DrivenScheduler(num_blocks=6)
    driven.add(request("a", 12), request("large", 14, first_token=0), request("small", 2))
    driven.step()

    assert driven.shares == {"a": 12}
    assert driven.scheduler.load().num_waiting == 2
    while driven.shares.keys() <= {"a"}:
        driven.step()
    assert list(driven.shares) == ["large", "small"]
    driven.run()


def test_a_request_runs_in_a_pool_that_it_just_fits() -> None:
    submitted = request("a", 9, max_tokens=20, n=3)
    num_blocks = num_blocks_needed(submitted, fake_config(), fake_info(4, 64))
    driven = DrivenScheduler(num_blocks)
    driven.add(submitted)

    assert driven.run()["a"] == expected_tokens(submitted.spec.prompt_token_ids, 20)
    assert driven.scheduler.load().num_preemptions == 0


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    driven = DrivenScheduler(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    driven.add(request("long", 20), request("long too", 18), request("short", 3))
    driven.step()

    assert driven.shares == {"long": 4, "short": 3}, "only one prompt at a time is chunked"


def test_at_most_max_num_partial_prefills_prompts_are_chunked_at_a_time() -> None:
    driven = DrivenScheduler(
        max_num_batched_tokens=16, long_prefill_token_threshold=4, max_num_partial_prefills=2
    )
    for number, (name, length) in enumerate({"a": 20, "b": 18, "c": 18, "d": 2}.items()):
        driven.add(request(name, length, first_token=number))
    driven.step()

    assert driven.shares == {"a": 4, "b": 4, "d": 2}


def test_blocks_computed_while_decoding_are_hit_by_the_next_turn() -> None:
    driven = DrivenScheduler()
    driven.add(request("first", 6, max_tokens=7))
    answer = driven.run()["first"]
    history = (*(1,) * 6, *answer, 0, 1, 1)
    driven.add(request("second", prompt_token_ids=history, max_tokens=1))
    (output,) = driven.step()

    # 13 tokens are known and all but the last have KV, in three full blocks.
    assert driven.shares == {"second": len(history) - 12}
    assert output.cached_tokens == 12
    load = driven.scheduler.load()
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (6 + len(history), 12)


def test_prefixes_with_different_salts_are_not_shared() -> None:
    driven = DrivenScheduler()
    for salt in ("", "tenant", "tenant"):
        driven.add(request("a", 9, max_tokens=1, cache_salt=salt))
        driven.step()
        if salt == "":
            assert driven.shares == {"a": 9}

    assert driven.shares == {"a": 1}


def test_a_reset_empties_the_prefix_cache_and_running_requests_continue() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", 9, max_tokens=6))
    driven.step()
    assert driven.scheduler.kv.reset_prefix_cache() == 2
    driven.add(request("b", 9, max_tokens=6))
    driven.step()

    assert driven.shares == {"a": 1, "b": 9}
    assert driven.run()["b"] == expected_tokens((1,) * 9, 6)[1:]


def test_a_request_ends_at_a_stop_token_and_frees_its_id() -> None:
    (token,) = expected_tokens((1,) * 6, 1)
    driven = DrivenScheduler()
    for _ in range(2):
        driven.add(request("a", stop_token_ids=frozenset({token})))
        (output,) = driven.step()

        assert (output.finish_reason, output.token_ids) == (FinishReason.STOP, (token,))
    assert driven.num_free == 32


def test_load_counts_running_waiting_and_queued_tokens() -> None:
    driven = DrivenScheduler(num_blocks=32, max_num_seqs=3, max_num_batched_tokens=8)
    driven.add(request("a", 6, n=2))
    driven.add(request("b", 11, first_token=2), request("c", 5, first_token=3))
    driven.step()
    load = driven.scheduler.load()

    assert (load.num_running, load.num_waiting) == (2 + 1, 1)
    assert load.num_queued_tokens == (11 - 2) + 5
    assert load.num_free_blocks == 32 - 2 - 3
    driven.run()
    load = driven.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (0, 0, 0)
    assert load.num_free_blocks == 32


def test_each_token_has_an_output_and_the_first_and_last_have_timings() -> None:
    driven = DrivenScheduler()
    driven.add(request("a", max_tokens=3))
    driven.now = 2.0
    outputs = driven.steps(3)

    assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
    assert [output.timings is not None for output in outputs] == [True, False, True]
    assert outputs[0].timings.queue_ms == 2000.0
    assert [output.is_last for output in outputs] == [False, False, True]


def test_an_id_that_is_aborted_twice_at_once_ends_once() -> None:
    driven = DrivenScheduler()
    driven.add(request("a"), request("b"))
    driven.step()
    outputs = driven.scheduler.abort(["a", "unknown", "a"])

    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", FinishReason.ABORTED)]
    assert driven.scheduler.num_unfinished == 1


def test_requests_wait_for_a_common_prefix_that_is_being_computed() -> None:
    """Three prompts have eight tokens in common, which are two blocks."""
    driven = DrivenScheduler(max_num_batched_tokens=64)
    common = list(range(1, 9))
    driven.add(
        *(request(name, prompt_token_ids=(*common, 20 + i, 30)) for i, name in enumerate("abc"))
    )
    driven.add(request("other", 6, first_token=9))
    driven.step()
    assert driven.shares == {"a": 10, "other": 6}

    driven.step()
    assert driven.shares == {"a": 1, "other": 1, "b": 2, "c": 2}


def test_a_request_does_not_wait_for_a_prefix_of_a_less_urgent_request() -> None:
    driven = DrivenScheduler(
        max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_partial_prefills=2
    )
    common = list(range(1, 13))
    driven.add(request("late", prompt_token_ids=(*common, 20)))
    driven.step()
    driven.add(request("urgent", prompt_token_ids=(*common, 21), priority=-9))
    driven.step()

    assert "urgent" in driven.shares
