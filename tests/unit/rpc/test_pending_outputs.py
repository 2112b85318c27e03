"""`PendingOutputs`: outputs that wait for a reader are merged without loss."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.v1 import common_pb2, request_pb2
from rpc.pending_outputs import PendingOutputs, add_output

LENGTH = common_pb2.FINISH_REASON_LENGTH
ABORTED = common_pb2.FINISH_REASON_ABORTED


def make_output(*token_ids, **fields):
    return request_pb2.CandidateOutput(request_id="r", token_ids=token_ids, **fields)


def pending_of(*outputs):
    pending: PendingOutputs = {}
    for each in outputs:
        add_output(pending, each)
    return [(o.index, list(o.token_ids), o.finish_reason, o.is_last) for o in pending.values()]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
def test_merging_keeps_every_token_in_order(steps):
    pending: PendingOutputs = {}
    for index, token_ids in enumerate(steps):
        is_last = index == len(steps) - 1
        step = make_output(*token_ids, finish_reason=LENGTH if is_last else 0, is_last=is_last)
        if index == 0:
            step.cached_tokens = 16
            step.timings.queue_ms = 1.0
        add_output(pending, step)
    (merged,) = pending.values()
    assert merged.is_last
    assert list(merged.token_ids) == [token for step in steps for token in step]
    assert (merged.cached_tokens, merged.timings.queue_ms) == (16, 1.0)
    assert merged.finish_reason == LENGTH


def test_outputs_are_merged_by_candidate_and_the_last_output_stays_last():
    steps = (
        make_output(1),
        make_output(2, index=1),
        make_output(3, index=1),
        make_output(4, is_last=True),
    )
    assert pending_of(*steps) == [(1, [2, 3], 0, False), (0, [1, 4], 0, True)]


def test_the_end_of_a_request_does_not_change_a_candidate_that_has_ended():
    ended, other = make_output(1, finish_reason=LENGTH), make_output(2, index=1)
    end = make_output(finish_reason=ABORTED, is_last=True)
    assert pending_of(ended, other, end) == [
        (0, [1], LENGTH, False),
        (1, [2], 0, False),
        (0, [], ABORTED, True),
    ]


def test_an_error_is_not_merged_into_a_candidate():
    reason = common_pb2.FINISH_REASON_ERROR
    failed = make_output(finish_reason=reason, is_last=True, error=request_pb2.WorkerError(code=13))
    assert pending_of(make_output(1), failed) == [(0, [1], 0, False), (0, [], reason, True)]
    assert pending_of(failed) == [(0, [], reason, True)]


def test_log_probabilities_stay_with_their_tokens_and_the_prompts_come_first():
    def detail(number):
        return common_pb2.TokenLogprobs(logprob=-number)

    pending: PendingOutputs = {}
    for each in (
        make_output(1, logprobs=[detail(1)], prompt_logprobs=[detail(8), detail(9)]),
        make_output(2, index=1, logprobs=[detail(2)]),
        make_output(3, finish_reason=LENGTH, logprobs=[detail(3)], is_last=True),
    ):
        add_output(pending, each)
    other, last = pending.values()
    assert (list(other.token_ids), list(last.token_ids)) == ([2], [1, 3])
    assert list(last.logprobs) == [detail(1), detail(3)]
    assert list(other.prompt_logprobs) == [detail(8), detail(9)]
    assert not last.prompt_logprobs
