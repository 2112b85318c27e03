"""What the next replica hears of a request's candidates."""

from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2, decode_pb2, prefill_pb2, request_pb2
from router.progress import Progress
from tests.support.fake_candidates import given_tokens

LENGTH = common_pb2.FINISH_REASON_LENGTH


def written(progress):
    start = decode_pb2.StartDecode()
    progress.write_to(start)
    return start


def output(index, *token_ids, **fields):
    return request_pb2.CandidateOutput(index=index, token_ids=token_ids, **fields)


def test_nothing_is_told_of_what_has_not_begun():
    progress = Progress(SamplingParams(n=3))
    assert not progress.has_begun
    assert written(progress) == decode_pb2.StartDecode()


def test_streamed_candidates_go_on_from_their_tokens():
    progress = Progress(SamplingParams(n=3))
    first = [output(index, token_id) for index, token_id in enumerate((7, 8, 9))]
    progress.add_prefilled(prefill_pb2.PrefillResult(outputs=first))
    for step in (output(0, 1), output(1, 2, 3), output(2, 4, finish_reason=LENGTH)):
        progress.add(step)
    assert given_tokens(written(progress)) == {0: [7, 1], 1: [8, 2, 3]}
    assert progress.num_tokens == 3 + 4
    progress.end(1)  # by a stop text
    assert progress.has_ended(1)
    assert given_tokens(written(progress)) == {0: [7, 1]}


def test_late_tokens_of_a_candidate_that_has_ended_do_not_bring_it_back():
    progress = Progress(SamplingParams(n=2))
    for step in (output(0, 1), output(1, 2)):
        progress.add(step)
    progress.end(0)  # by a stop text, while the replica had drawn more
    progress.add(output(0, 3, 4))
    assert given_tokens(written(progress)) == {1: [2]}


def test_candidates_that_decode_began_go_on_too():
    progress = Progress(SamplingParams(n=2))
    progress.add(output(0, 1))
    progress.add(output(1, 2))
    assert progress.has_begun
    assert given_tokens(written(progress)) == {0: [1], 1: [2]}


def test_ranked_candidates_go_on_from_what_prefill_drew():
    progress = Progress(SamplingParams(n=1, best_of=2))
    assert written(progress) == decode_pb2.StartDecode()
    result = prefill_pb2.PrefillResult(outputs=[output(0)])
    result.candidates.add(index=0, output_token_ids=[7], logprob=-1)
    result.candidates.add(index=1, output_token_ids=[8], logprob=-2)
    progress.add_prefilled(result)
    start = written(progress)
    assert given_tokens(start) == {0: [7], 1: [8]}
    assert [given.logprob for given in start.candidates] == [-1, -2]
    assert progress.has_begun


def test_beams_begin_with_the_most_likely_tokens():
    progress = Progress(SamplingParams(n=1, beam_width=2))
    result = prefill_pb2.PrefillResult(outputs=[output(0)])
    for token_id, logprob in ((7, -1), (8, -2), (5, -3), (6, -4)):
        result.first_beams.add(token_id=token_id, logprob=logprob)
    progress.add_prefilled(result)
    assert progress.has_begun
    start = written(progress)
    assert not start.candidates
    assert [(beam.token_id, beam.logprob) for beam in start.first_beams] == [
        (7, -1),
        (8, -2),
        (5, -3),
        (6, -4),
    ]
