"""`RequestOutput` and `CompletionOutput`: vLLM's names for what Baton has."""

from baton.common.request.results import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Timings,
    Usage,
    logprobs_of,
)
from baton.common.request.wire import parse_chunk, parse_response
from baton.v1 import common_pb2, generation_pb2


def output(**fields):
    completion = CompletionOutput(0, "ab", [4, 5], **fields)
    usage = Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=2)
    timings = Timings(queue_ms=250.0, first_token_ms=500.0)
    return RequestOutput("r", [completion], usage, timings, prompt_token_ids=[1, 2, 3])


def test_the_attributes_of_vllm_have_their_values():
    result = output(finish_reason="stop", stop_reason=5)
    assert result.prompt_token_ids + result.outputs[0].token_ids == [1, 2, 3, 4, 5]
    assert (result.prompt, result.finished, result.num_cached_tokens) == (None, True, 2)
    assert result.metrics == RequestMetrics(2, time_in_queue=0.25, first_token_latency=0.5)
    first = result.outputs[0]
    assert (first.finish_reason, first.stop_reason, first.finished()) == ("stop", 5, True)
    assert (first.cumulative_logprob, first.logprobs) == (None, None)
    assert (result.text, result.token_ids) == ("ab", [4, 5])
    assert (result.finish_reason, result.stop_reason) == ("stop", 5)
    assert not output().outputs[0].finished()


def test_the_cumulative_logprob_sums_the_tokens_own():
    found = [{4: Logprob(-1.0, 2), 9: Logprob(-0.5, 1)}, {5: Logprob(-2.0, 1)}]
    assert output(logprobs=found).outputs[0].cumulative_logprob == -3.0


def test_tokens_have_texts_if_they_can_be_decoded():
    assert logprobs_of(7, -3.0, 5, (9, 7), (-0.5, -1.0), "<{}>".format) == {
        7: Logprob(-3.0, 5, "<7>"),
        9: Logprob(-0.5, 1, "<9>"),
    }
    assert logprobs_of(7, -3.0, 5, (), ())[7].decoded_token is None


def test_an_aborted_request_ends_with_abort():
    aborted = common_pb2.FINISH_REASON_ABORTED
    whole = generation_pb2.GenerateResponse(
        completions=[generation_pb2.Completion(finish_reason=aborted)]
    )
    result = parse_response(whole, "the prompt")
    assert (result.finish_reason, result.prompt) == ("abort", "the prompt")
    chunk = generation_pb2.GenerateStreamResponse(finish_reason=aborted)
    assert parse_chunk(chunk).finish_reason == "abort"
