"""What the next replica hears of a request's candidates."""

from baton.sampling_params import SamplingParams
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from router.progress import Progress
from tests.support.fake_candidates import given_tokens

LENGTH = common_pb2.FINISH_REASON_LENGTH


def written(progress):
    start = decode_pb2.StartDecode()
    progress.write_to(start)
    return start


def output(index, *token_ids, finish_reason=0):
    return decode_pb2.DecodeOutput(index=index, token_ids=token_ids, finish_reason=finish_reason)


def test_nothing_is_told_of_what_has_not_begun():
    progress = Progress(SamplingParams(n=3))
    assert not progress.has_begun
    assert written(progress) == decode_pb2.StartDecode()


def test_streamed_candidates_go_on_from_their_tokens():
    progress = Progress(SamplingParams(n=3))
    progress.begin(prefill_pb2.PrefillResult(token_ids=[7, 8, 9]))
    for step in (output(0, 1), output(1, 2, 3), output(2, 4, finish_reason=LENGTH)):
        progress.add(step)
    assert given_tokens(written(progress)) == {0: [7, 1], 1: [8, 2, 3]}
    assert progress.num_tokens == 4
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
    progress.begin(prefill_pb2.PrefillResult(token_ids=[7, 8], logprobs=[-1, -2]))
    start = written(progress)
    assert given_tokens(start) == {0: [7], 1: [8]}
    assert [given.logprob for given in start.candidates] == [-1, -2]
    assert progress.has_begun


def test_beams_begin_with_the_most_likely_tokens():
    progress = Progress(SamplingParams(n=1, beam_width=2))
    tops = prefill_pb2.PrefillResult(token_ids=[7, 8, 5, 6], logprobs=[-1, -2, -3, -4])
    progress.begin(tops)
    start = written(progress)
    assert not start.candidates
    assert [(beam.token_id, beam.logprob) for beam in start.first_beams] == [
        (7, -1),
        (8, -2),
        (5, -3),
        (6, -4),
    ]
