"""Candidates and beams of one request: shared blocks, seeds, ends, continuation."""

from dataclasses import replace

import pytest

from engine.draw_params import DrawParams, candidate_seed
from engine.request import FinishReason
from tests.support.draw_params import draw_params
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request
from tests.support.fake_model import expected_tokens
from tests.support.reference_decoding import expected_results, first_beams, progress_of
from tests.support.requests import changed

DRAWN = {"temperature": 1.0, "seed": 7}
THREE = {"n": 3} | DRAWN


def test_candidates_share_the_prompt_and_its_full_blocks() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    driven.add(request("a", 10, max_tokens=9, **THREE))
    driven.step()
    assert driven.shares == {"a": 10}
    driven.step()

    assert driven.shares == {"a": 3}
    assert driven.num_free == 32 - 2 - 3, "two shared blocks, and a tail per candidate"


def test_candidates_draw_with_seeds_of_their_own() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=9, **THREE)
    driven.add(submitted)
    tokens: dict[int, list[int]] = {}
    for output in driven.steps(9):
        tokens.setdefault(output.index, []).extend(output.token_ids)

    for index in range(3):
        draw = draw_params(1.0, 0, 1.0, candidate_seed(7, index))
        assert tokens[index] == expected_tokens(submitted.spec.prompt_token_ids, 9, draw)
    assert len(set(map(tuple, tokens.values()))) > 1


@pytest.mark.parametrize(
    ("rules", "reads_history"),
    [
        ({"repetition_penalty": 1.5}, True),
        ({"presence_penalty": 1.0}, True),
        ({"frequency_penalty": 1.0}, True),
        ({"bad_words_token_ids": ((0, 0, 0),)}, True),
        ({"bad_words_token_ids": ((0,),)}, False),
        ({"logit_bias": {0: 1.0}}, False),
    ],
)
def test_candidates_share_the_history_if_their_rules_read_it(
    rules: dict[str, object], reads_history: bool
) -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=5, **THREE, **rules)
    driven.add(submitted)
    driven.step()
    batch = driven.begin()

    assert batch is not None
    prompt = submitted.spec.prompt_token_ids if reads_history else ()
    assert [chunk.rules is not None for chunk in batch.chunks] == [True] * 3
    assert all(chunk.history is prompt for chunk in batch.chunks)
    driven.end(batch)


def test_the_best_candidates_are_returned_at_the_end_in_order_of_score() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=5, n=2, best_of=3, **DRAWN)
    driven.add(submitted)
    assert driven.steps(4) == []
    outputs = driven.step()

    assert [output.index for output in outputs] == [0, 1]
    assert [output.is_last for output in outputs] == [False, True]
    assert outputs[0].score >= outputs[1].score
    expected = [result.token_ids for result in expected_results(submitted, 64)]
    assert [output.token_ids for output in outputs] == expected


def test_beams_are_those_of_beam_search() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=7, beam_width=3)
    driven.add(submitted)
    outputs = driven.steps(7)

    (expected,) = expected_results(submitted, 64)
    assert [output.token_ids for output in outputs] == [expected.token_ids]
    assert driven.num_free == 32


def test_candidates_that_stop_early_free_their_sequence_slots() -> None:
    """Candidates 0 and 1 begin with different tokens; one of them is a stop token."""
    driven = DrivenScheduler(max_num_seqs=3)
    seed = next(seed for seed in range(99) if _first_tokens(seed) == [0, 1, 1])
    submitted = request("a", 10, max_tokens=4, n=3, temperature=1.0, seed=seed)
    driven.add(changed(submitted, stop_token_ids=frozenset({0})), request("b", 2))
    first, *others = driven.step()

    assert (first.finish_reason, first.is_last) == (FinishReason.STOP, False)
    assert [output.finish_reason for output in others] == [None, None]
    driven.step()
    assert driven.shares["b"] == 2


def _first_tokens(seed: int) -> list[int]:
    submitted = request("a", 10, max_tokens=1, **(THREE | {"seed": seed}))
    return [result.token_ids[0] for result in expected_results(submitted, 64)]


# `finish_candidate`.


def test_finishing_the_last_waiting_candidate_ends_the_request() -> None:
    driven = DrivenScheduler(max_num_seqs=2)
    submitted = request("a", **(THREE | {"n": 2}))
    begun = tuple(progress_of(submitted, index, (0,)) for index in range(2))
    driven.add(request("runs", n=2), replace(submitted, progress=begun))
    driven.step()

    assert driven.scheduler.finish_candidate("a", 0) == []
    assert driven.scheduler.load().num_waiting == 1
    (output,) = driven.scheduler.finish_candidate("a", 1)
    assert (output.finish_reason, output.is_last) == (FinishReason.ABORTED, True)
    assert driven.scheduler.load().num_waiting == 0
    assert driven.scheduler.num_unfinished == 1
    driven.run()
    assert driven.num_free == 32


def test_finishing_a_loading_candidate_leaves_the_others() -> None:
    driven = DrivenScheduler(with_connector=True, role="decode", max_num_seqs=8)
    submitted = handed_over("a", n=3)
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    driven.scheduler.finish_candidate("a", 0)
    driven.end_load(load, submitted.spec.prompt_token_ids)
    outputs = driven.step()

    assert [output.index for output in outputs] == [1, 2]


def test_finishing_the_last_loading_candidate_ends_the_request() -> None:
    driven = DrivenScheduler(with_connector=True, role="decode")
    submitted = handed_over("a")
    driven.add(submitted)
    driven.step()
    (load,) = driven.work().loads

    (output,) = driven.scheduler.finish_candidate("a", 0)

    assert output.finish_reason is FinishReason.ABORTED
    assert driven.scheduler.num_unfinished == 0
    assert driven.work().cancelled_loads == [load.job_id]
    assert driven.end_load(load, submitted.spec.prompt_token_ids) == []
    assert driven.num_free == 32


def test_finishing_a_running_candidate_frees_its_blocks_and_sequence_slot() -> None:
    driven = DrivenScheduler(max_num_seqs=3)
    driven.add(request("a", 10, max_tokens=9, **THREE), request("b", 2))
    driven.steps(2)
    assert driven.num_free == 32 - 2 - 3
    driven.scheduler.finish_candidate("a", 1)
    driven.scheduler.check()

    assert driven.num_free == 32 - 2 - 2
    outputs = driven.step()
    assert [(output.request_id, output.index) for output in outputs if output.index] == [("a", 2)]
    assert driven.shares["b"] == 2, "the sequence slot of the candidate is free"


def test_finishing_a_swapped_candidate_ends_it_when_it_is_swapped_in() -> None:
    driven = DrivenScheduler(
        num_blocks=10, num_host_blocks=20, max_num_seqs=8, preemption_mode="swap"
    )
    driven.add(request("a", 7, max_tokens=20), request("group", 6, max_tokens=8, **THREE))
    while driven.scheduler.load().num_swapped_blocks == 0:
        driven.step()
    driven.scheduler.finish_candidate("group", 0)
    indices: set[int] = set()
    while driven.scheduler.num_unfinished:
        indices |= {output.index for output in driven.step() if output.request_id == "group"}

    assert indices == {1, 2}
    assert driven.num_free == 10
    assert driven.scheduler.load().num_swapped_blocks == 0


def test_finishing_the_last_swapped_candidate_ends_the_request() -> None:
    driven = DrivenScheduler(
        num_blocks=10, num_host_blocks=20, max_num_seqs=8, preemption_mode="swap"
    )
    driven.add(request("a", 7, max_tokens=20), request("group", 6, max_tokens=8, **THREE))
    while driven.scheduler.load().num_swapped_blocks == 0:
        driven.step()
    ends = [driven.scheduler.finish_candidate("group", index) for index in (2, 0, 1)]

    assert [len(outputs) for outputs in ends] == [0, 0, 1]

    assert driven.scheduler.load().num_swapped_blocks == 0
    assert driven.scheduler.num_unfinished == 1


def test_finishing_a_prompt_leaves_its_saves_their_blocks() -> None:
    driven = DrivenScheduler(with_connector=True, role="prefill")
    driven.add(request("a", 3))
    driven.step()
    (tail,) = driven.work().saves
    driven.scheduler.finish_candidate("a", 0)

    assert driven.scheduler.num_unfinished == 0
    assert driven.num_free == 31
    assert driven.end_saves([tail.job_id]) == []
    assert driven.num_free == 32


@pytest.mark.parametrize(
    ("request_id", "index"), [("a", 3), ("unknown", 0), ("beams", 0), ("ranked", 0)]
)
def test_finishing_unknown_and_ranked_candidates_has_no_effect(request_id: str, index: int) -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    beams = request("beams", first_token=2, beam_width=2)
    driven.add(request("a", **THREE), beams, request("ranked", first_token=3, best_of=2))
    driven.step()

    assert driven.scheduler.finish_candidate(request_id, index) == []
    assert driven.scheduler.load().num_running == 3 + 2 + 2


def test_ranked_candidates_cannot_be_finished_one_by_one() -> None:
    """The best is found among all candidates, including those that have ended."""
    driven = DrivenScheduler(max_num_seqs=8)
    ranked = DRAWN | {"best_of": 3, "stop_token_ids": frozenset({1})}
    submitted = request("a", 5, max_tokens=12, **ranked)
    driven.add(submitted)
    outputs = []
    while driven.scheduler.num_unfinished:
        for index in range(3):
            assert driven.scheduler.finish_candidate("a", index) == []
        outputs += driven.step()

    (best,) = expected_results(submitted, 64)
    assert [output.token_ids for output in outputs] == [best.token_ids]


# Requests that another replica has begun.


def test_candidates_continue_from_the_progress_of_another_replica() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=6, best_of=3, **DRAWN)
    draws = list(DrawParams.of_candidates(submitted.spec, range(3)))
    every = [expected_tokens(submitted.spec.prompt_token_ids, 6, draw) for draw in draws]
    begun = tuple(
        progress_of(submitted, index, tuple(tokens[: index + 1]))
        for index, tokens in enumerate(every)
    )
    driven.add(replace(submitted, progress=begun))
    outputs = driven.steps(7)

    (best,) = expected_results(submitted, 64)
    assert [output.token_ids for output in outputs] == [best.token_ids]
    assert outputs[0].score == pytest.approx(best.score)


def test_a_candidate_whose_progress_ends_in_a_stop_token_ends_at_once() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", n=2, stop_token_ids=frozenset({0}))
    begun = (progress_of(submitted, 0, (0,)), progress_of(submitted, 1, (1,)))
    (output,) = driven.add(replace(submitted, progress=begun))

    assert (output.index, output.token_ids, output.is_last) == (0, (), False)
    assert output.finish_reason is FinishReason.STOP
    assert {each.index for each in driven.steps(4)} == {1}


def test_beams_continue_from_their_first_tokens() -> None:
    driven = DrivenScheduler(max_num_seqs=8)
    submitted = request("a", 10, max_tokens=7, beam_width=2)
    driven.add(replace(submitted, first_beams=first_beams(submitted)))
    outputs = driven.steps(8)

    (expected,) = expected_results(submitted, 64)
    assert [output.token_ids for output in outputs] == [expected.token_ids]


def test_narrow_requests_overtake_one_that_lacks_seats_for_its_candidates() -> None:
    """Four seats: each narrow request ends after two steps, and others come in its place."""
    driven = DrivenScheduler(max_num_seqs=4, max_num_batched_tokens=64)
    driven.add(request("first", 5, first_token=2, max_tokens=30))
    driven.step()
    driven.add(request("wide", 5, first_token=3, max_tokens=3, n=4, **DRAWN))
    for number in range(12):
        driven.add(request(str(number), 5, first_token=4 + number, max_tokens=2))
    seen = [set(driven.shares)]
    while "wide" not in seen[-1]:
        driven.step()
        seen.append(set(driven.shares))

    assert seen[1] == {"first", "0", "1", "2"}, "no seat stays free"
    overtook = set.union(*seen) - {"first", "wide"}
    assert overtook == {"0", "1", "2", "3"}, "as many as there are seats"


def test_less_urgent_requests_do_not_overtake_one_that_lacks_seats() -> None:
    driven = DrivenScheduler(max_num_seqs=2, max_num_batched_tokens=64)
    driven.add(request("first", 5, first_token=2, max_tokens=5))
    driven.step()
    driven.add(request("wide", 5, first_token=3, max_tokens=3, priority=-1, n=2, **DRAWN))
    driven.add(request("narrow", 5, first_token=4, max_tokens=2))
    driven.step()

    assert driven.shares == {"first": 1}


def test_a_prompt_that_beams_had_does_not_wait_for_them_after_a_reset() -> None:
    driven = DrivenScheduler(max_num_seqs=8, max_num_batched_tokens=64)
    driven.add(request("beams", 10, max_tokens=20, beam_width=2))
    for _ in range(4):
        driven.step()
    driven.scheduler.kv.reset_prefix_cache()
    driven.add(request("equal", 10, max_tokens=3))
    driven.step()

    assert driven.shares["equal"] == 10
