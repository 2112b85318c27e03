"""Log-probabilities stay with their tokens from an engine's outputs to the client's objects."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.request.answer import JoinedAnswer
from baton.common.request.request_spec import RequestSpec
from baton.common.request.results import Logprob, logprobs_of
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.wire import parse_chunk, parse_output, parse_response
from baton.v1 import generation_pb2
from engine.batch import TokenLogprobs
from engine.request import EngineOutput, FinishReason
from engine.wire import output_to_proto
from router.fleet.output_wire import output_from_proto
from router.generation_wire import stream_response, whole_response
from router.observe.request_record import RequestRecord
from router.stages.completion import Completion
from rpc.pending_outputs import PendingOutputs, add_output
from tests.support.running_router import tokenizer

PROMPT = (5, 6, 7)
# Numbers that float32 holds exactly.
LOGPROBS = st.integers(-(2**20), 0).map(lambda number: number / 64) | st.just(float("-inf"))


@st.composite
def details(draw, num_top):
    tops = st.lists(st.integers(0, 300), min_size=num_top, max_size=num_top, unique=True)
    values = st.lists(LOGPROBS, min_size=num_top, max_size=num_top)
    rank = st.integers(1, 400)
    return TokenLogprobs(draw(LOGPROBS), draw(rank), tuple(draw(tops)), tuple(draw(values)))


@st.composite
def generations(draw):
    """Draws what the engine says of each candidate: (tokens, their log-probabilities)."""
    num_top, num_prompt_top = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    tokens = st.lists(st.integers(40, 120), min_size=1, max_size=12)
    candidates = [
        (token_ids, [draw(details(num_top)) for _ in token_ids])
        for token_ids in draw(st.lists(tokens, min_size=1, max_size=3))
    ]
    prompt = [draw(details(num_prompt_top)) for _ in PROMPT[1:]]
    return num_top, num_prompt_top, candidates, tuple(prompt)


def test_the_prompt_of_a_generation_is_what_the_server_used():
    response = generation_pb2.GenerateResponse(
        completions=[generation_pb2.Completion()], prompt_token_ids=[6, 7]
    )
    assert parse_response(response, [5, 6, 7]).prompt_token_ids == [6, 7]
    del response.prompt_token_ids[:]
    assert parse_response(response, [5, 6, 7]).prompt_token_ids == [5, 6, 7]
    assert parse_response(response, "text").prompt_token_ids is None


@settings(deadline=None)
@given(generations(), st.data())
async def test_stream_and_whole_answer_have_what_the_engine_said(generation, data):
    num_top, num_prompt_top, candidates, prompt = generation
    params = SamplingParams(
        n=len(candidates),
        logprobs=num_top,
        prompt_logprobs=num_prompt_top,
        stop=data.draw(st.sampled_from([(), ("a",), ("bc", "d")])),
    )
    spec = RequestSpec(request_id="r/1", prompt_token_ids=PROMPT, params=params)
    completion, whole = Completion(spec, tokenizer(), RequestRecord()), JoinedAnswer()
    outputs, responses = [], []
    pending: PendingOutputs = {}
    for output in outputs_of(candidates, prompt, data):
        add_output(pending, output_to_proto(output))
        if data.draw(st.booleans()) or output.is_last:  # the reader lags, and outputs merge
            for waiting in pending.values():
                outputs += completion.add(output_from_proto(waiting))
            pending.clear()
        if completion.is_over:
            break
    for output in outputs:
        whole.add(output)
        message = stream_response(output).SerializeToString()
        responses.append(generation_pb2.GenerateStreamResponse.FromString(message))
    check(whole, responses, candidates, prompt)


def outputs_of(candidates, prompt, data):
    """Yields one output per token, of the candidates in any order."""
    nexts, is_first = dict.fromkeys(range(len(candidates)), 0), True
    while nexts:
        index = data.draw(st.sampled_from(sorted(nexts)))
        (token_ids, found), place = candidates[index], nexts[index]
        is_over = place + 1 == len(token_ids)
        nexts[index] += 1
        if is_over:
            del nexts[index]
        yield EngineOutput(
            request_id="r/1",
            index=index,
            token_ids=(token_ids[place],),
            logprobs=(found[place],),
            prompt_logprobs=prompt if is_first else (),
            finish_reason=FinishReason.LENGTH if is_over else None,
            is_last=not nexts,
        )
        is_first = False


def check(whole, responses, candidates, prompt):
    chunks = [parse_chunk(response) for response in responses]
    parsed = parse_output(whole_response(whole))
    expected_prompt = [None, *by_token(PROMPT[1:], prompt)]
    assert parsed.prompt_logprobs == chunks[0].prompt_logprobs == expected_prompt
    assert parsed.prompt_token_ids == chunks[0].prompt_token_ids == list(PROMPT)
    assert not any(chunk.prompt_logprobs or chunk.prompt_token_ids for chunk in chunks[1:])
    for completion in parsed.outputs:
        token_ids, found = candidates[completion.index]
        num_tokens = len(completion.token_ids)  # a stop text may have ended it
        assert list(completion.token_ids) == token_ids[:num_tokens]
        assert completion.logprobs == by_token(completion.token_ids, found[:num_tokens])
        assert completion.cumulative_logprob == sum(each.logprob for each in found[:num_tokens])
        streamed = [chunk for chunk in chunks if chunk.index == completion.index]
        joined = [each for chunk in streamed for each in chunk.logprobs or ()]
        assert joined == completion.logprobs


def by_token(token_ids, found):
    return [
        logprobs_of(token_id, one.logprob, one.rank, one.top_token_ids, one.top_logprobs)
        for token_id, one in zip(token_ids, found, strict=True)
    ]


def test_the_drawn_token_comes_first_and_once():
    found = logprobs_of(7, -3.0, 5, (9, 7), (-0.5, -1.0))
    assert list(found) == [7, 9]
    assert found == {7: Logprob(-3.0, 5), 9: Logprob(-0.5, 1)}
