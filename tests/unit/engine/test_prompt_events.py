"""`PromptEvents`: the messages that a router receives about a prompt."""

import asyncio
from dataclasses import replace

import pytest

from baton.common.errors import DeadlineExceededError
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import common_pb2
from engine.batch import TokenLogprobs
from engine.request import EngineOutput, FinishReason, StageTimings
from engine.wire import logprobs_to_proto
from kvstore.handoff import KvHandoff
from prefill_service.servicer import PromptEvents

HANDOFF = KvHandoff(
    handoff_id="h",
    namespace=b"n" * 32,
    block_keys=(b"k" * 32,),
    num_tokens=3,
    connector="memory",
    digest_scheme="xxh3-128",
    lease_ms=5000,
)


def saved_output(*keys, num_tokens):
    part = KvHandoff("h", b"n" * 32, keys, num_tokens, "memory", "xxh3-128", 5000)
    return EngineOutput(request_id="r", saved=part)


def drawn_output(*token_ids, **fields):
    return EngineOutput(request_id="r", token_ids=token_ids, **fields)


def handoff_output(handoff=HANDOFF, **fields):
    return EngineOutput(
        request_id="r",
        finish_reason=FinishReason.HANDOFF,
        is_last=True,
        handoff=handoff,
        timings=StageTimings(queue_ms=1.0, prefill_ms=2.0, transfer_ms=3.0),
        **fields,
    )


def ended_output(reason, **fields):
    return EngineOutput(request_id="r", finish_reason=reason, is_last=True, **fields)


async def all_messages(*outputs, **params):
    """Returns the messages if all outputs are added before the first read."""
    events = PromptEvents(SamplingParams(**params))
    for output in outputs:
        events.add(output)
    return [message async for message in events.messages()]


def kinds(messages):
    return [message.WhichOneof("event") for message in messages]


async def test_each_output_is_sent_at_once():
    events = PromptEvents(SamplingParams())
    messages = events.messages()
    for keys, num_tokens in (((b"1", b"2"), 8), ((b"3",), 12)):
        events.add(saved_output(*keys, num_tokens=num_tokens))
        part = (await anext(messages)).saved
        assert (tuple(part.block_keys), part.num_tokens) == (keys, num_tokens)
    events.add(drawn_output(42, timings=StageTimings(queue_ms=1.0), cached_tokens=4))
    (first,) = (await anext(messages)).result.outputs
    assert (list(first.token_ids), first.cached_tokens) == ([42], 4)
    assert first.timings.queue_ms == 1.0
    events.add(saved_output(b"4", num_tokens=16))
    assert list((await anext(messages)).saved.block_keys) == [b"4"]
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.add(handoff_output())
    end = (await waiting).end
    assert (list(end.handoff.block_keys), end.output.timings.transfer_ms) == ([b"k" * 32], 3.0)
    assert end.output.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    assert not end.output.is_last
    with pytest.raises(StopAsyncIteration):
        await anext(messages)


async def test_unread_saved_blocks_are_merged_into_one_event():
    events = PromptEvents(SamplingParams())
    for index in range(1000):
        events.add(saved_output(index.to_bytes(4), num_tokens=4 * (index + 1)))
    messages = events.messages()
    part = (await anext(messages)).saved
    assert list(part.block_keys) == [index.to_bytes(4) for index in range(1000)]
    assert part.num_tokens == 4000
    await messages.aclose()


async def test_saved_blocks_of_an_earlier_handoff_are_dropped():
    """The prompt was preempted, which ended its first handoff."""
    earlier = saved_output(b"1", num_tokens=3)
    later = replace(earlier, saved=replace(earlier.saved, handoff_id="i", block_keys=(b"1", b"2")))
    events = PromptEvents(SamplingParams())
    events.add(earlier)
    events.add(later)
    message = await anext(aiter(events.messages()))
    assert (message.saved.handoff_id, message.saved.block_keys) == ("i", [b"1", b"2"])


async def test_first_tokens_are_sent_before_saved_blocks():
    events = PromptEvents(SamplingParams())
    events.add(saved_output(b"1", num_tokens=4))
    events.add(drawn_output(42))
    messages = events.messages()
    assert kinds([await anext(messages), await anext(messages)]) == ["result", "saved"]
    await messages.aclose()


async def test_saved_blocks_are_not_sent_once_the_handoff_is_available():
    sent = await all_messages(drawn_output(42), saved_output(b"1", num_tokens=4), handoff_output())
    assert kinds(sent) == ["result", "end"]


async def test_first_tokens_of_several_candidates_are_one_result():
    in_one = await all_messages(drawn_output(42, 43, cached_tokens=4), handoff_output(None), n=2)
    each = await all_messages(
        drawn_output(42, cached_tokens=4), drawn_output(43, index=1), handoff_output(None), n=2
    )
    assert in_one == each
    result, end = in_one[0].result, in_one[1].end
    outputs = [(output.index, list(output.token_ids)) for output in result.outputs]
    assert outputs == [(0, [42]), (1, [43])]
    assert [output.cached_tokens for output in result.outputs] == [4, 0]
    assert not end.HasField("handoff")  # the connector could not take the blocks


@pytest.mark.parametrize("params", [{"best_of": 2}, {"beam_width": 2}])
async def test_first_tokens_of_ranked_candidates_are_sent_for_decode_alone(params):
    tokens = drawn_output(42, 43, first_logprobs=(-0.5, -1.5), cached_tokens=4)
    result = (await all_messages(tokens, handoff_output(), **params))[0].result
    (output,) = result.outputs
    assert (list(output.token_ids), output.cached_tokens, output.is_last) == ([], 4, False)
    begun = [(c.index, list(c.output_token_ids), c.logprob) for c in result.candidates]
    beams = [(beam.token_id, beam.logprob) for beam in result.first_beams]
    if "best_of" in params:
        assert (begun, beams) == ([(0, [42], -0.5), (1, [43], -1.5)], [])
    else:
        assert (begun, beams) == ([], [(42, -0.5), (43, -1.5)])


async def test_a_generation_that_ends_in_prefill_has_no_end_event():
    first = EngineOutput(
        request_id="r",
        token_ids=(2,),
        finish_reason=FinishReason.STOP,
        score=-0.5,
        cached_tokens=2,
        timings=StageTimings(queue_ms=1.0),
    )
    sent = await all_messages(first, ended_output(FinishReason.LENGTH, index=1, token_ids=(3,)))
    (message,) = sent
    result = message.result
    assert [(c.index, list(c.token_ids)) for c in result.outputs] == [(0, [2]), (1, [3])]
    assert [c.HasField("score") for c in result.outputs] == [True, False]
    assert [c.is_last for c in result.outputs] == [False, True]
    assert (result.outputs[0].cached_tokens, result.outputs[0].timings.queue_ms) == (2, 1.0)


async def test_an_abort_after_the_first_tokens_ends_the_request():
    sent = await all_messages(drawn_output(42, 43), ended_output(FinishReason.ABORTED), n=2)
    assert kinds(sent) == ["result", "end"]
    assert [list(output.token_ids) for output in sent[0].result.outputs] == [[42], [43]]
    assert sent[1].end.output.finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert sent[1].end.output.is_last


async def test_an_abort_before_the_first_tokens_is_the_result():
    (message,) = await all_messages(
        saved_output(b"1", num_tokens=4), ended_output(FinishReason.ABORTED)
    )
    (candidate,) = message.result.outputs
    assert candidate.finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_first_tokens_are_sent_before_an_error_is_raised():
    events = PromptEvents(SamplingParams())
    events.add(drawn_output(42))
    events.add(ended_output(FinishReason.ERROR, error=DeadlineExceededError("too late")))
    messages = events.messages()
    assert kinds([await anext(messages)]) == ["result"]
    with pytest.raises(DeadlineExceededError, match="too late"):
        await anext(messages)


@pytest.mark.parametrize("params", [{"n": 2}, {"best_of": 2}])
async def test_first_tokens_have_their_log_probabilities(params):
    details = (TokenLogprobs(-0.5, 1), TokenLogprobs(-1.5, 4, (7,), (-0.25,)))
    output = drawn_output(
        42, 43, logprobs=details, first_logprobs=(-0.5, -1.5), prompt_logprobs=details[:1]
    )
    result = (await all_messages(output, handoff_output(), **params))[0].result
    first, second = (logprobs_to_proto([each]) for each in details)
    assert list(result.outputs[0].prompt_logprobs) == first
    if "best_of" in params:
        found = [given.token_logprobs for given in result.candidates]
        assert not result.outputs[0].logprobs
    else:
        found = [each.logprobs for each in result.outputs]
        assert not result.outputs[1].prompt_logprobs
    assert [list(each) for each in found] == [first, second]
