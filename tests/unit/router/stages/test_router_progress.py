"""`Progress`: the tokens of a request's candidates, for the replica that continues them."""

from baton.common.request.answer import CandidateOutput
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import decode_pb2, prefill_pb2
from router.stages.continuation import Progress
from tests.support.fake_candidates import given_tokens


def start_message(progress):
    start = decode_pb2.StartDecode()
    progress.write_to(start)
    return start


def make_output(index, *token_ids, **fields):
    return CandidateOutput(index, token_ids, **fields)


def test_a_request_that_has_not_begun_has_no_progress():
    progress = Progress(SamplingParams(n=3))
    assert not progress.has_begun
    assert start_message(progress) == decode_pb2.StartDecode()


def test_streamed_candidates_continue_from_their_tokens():
    progress = Progress(SamplingParams(n=3))
    first = [make_output(index, token_id) for index, token_id in enumerate((7, 8, 9))]
    progress.add_prefilled(prefill_pb2.PrefillResult(), first)
    for step in (
        make_output(0, 1),
        make_output(1, 2, 3),
        make_output(2, 4, finish_reason="length"),
    ):
        progress.add(step)
    assert given_tokens(start_message(progress)) == {0: [7, 1], 1: [8, 2, 3]}
    assert progress.num_tokens == 3 + 4
    progress.end(1)  # by a stop string
    assert progress.has_ended(1)
    assert given_tokens(start_message(progress)) == {0: [7, 1]}


def test_late_tokens_of_an_ended_candidate_are_ignored():
    progress = Progress(SamplingParams(n=2))
    for step in (make_output(0, 1), make_output(1, 2)):
        progress.add(step)
    progress.end(0)  # by a stop string, while the replica had drawn more tokens
    progress.add(make_output(0, 3, 4))
    assert given_tokens(start_message(progress)) == {1: [2]}


def test_candidates_that_decode_began_continue_from_their_tokens():
    progress = Progress(SamplingParams(n=2))
    progress.add(make_output(0, 1))
    progress.add(make_output(1, 2))
    assert progress.has_begun
    assert given_tokens(start_message(progress)) == {0: [1], 1: [2]}


def test_ranked_candidates_continue_from_the_tokens_that_prefill_drew():
    progress = Progress(SamplingParams(n=1, best_of=2))
    assert start_message(progress) == decode_pb2.StartDecode()
    result = prefill_pb2.PrefillResult()
    result.candidates.add(index=0, output_token_ids=[7], logprob=-1)
    result.candidates.add(index=1, output_token_ids=[8], logprob=-2)
    progress.add_prefilled(result, [make_output(0)])
    start = start_message(progress)
    assert given_tokens(start) == {0: [7], 1: [8]}
    assert [given.logprob for given in start.candidates] == [-1, -2]
    assert progress.has_begun


def test_beams_start_from_the_first_beams_of_prefill():
    progress = Progress(SamplingParams(n=1, beam_width=2))
    result = prefill_pb2.PrefillResult()
    for token_id, logprob in ((7, -1), (8, -2), (5, -3), (6, -4)):
        result.first_beams.add(token_id=token_id, logprob=logprob)
    progress.add_prefilled(result, [make_output(0)])
    assert progress.has_begun
    start = start_message(progress)
    assert not start.candidates
    assert [(beam.token_id, beam.logprob) for beam in start.first_beams] == [
        (7, -1),
        (8, -2),
        (5, -3),
        (6, -4),
    ]
