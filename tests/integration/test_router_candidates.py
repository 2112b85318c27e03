"""Several candidates of one prompt through a real router and scripted workers."""

import asyncio
from collections import defaultdict

import grpc
import pytest

from baton.common.errors import ResourceExhaustedError, UnavailableError
from baton.v1 import common_pb2
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import (
    BLOCK_SIZE,
    EOS_TOKEN_ID,
    FakeDecode,
    FakePrefill,
    first_of,
    running_workers,
)
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    script_of,
    token_ids_of,
)

SCRIPTS = [[base + i % 50 for i in range(300)] for base in (50, 150, 250, 350)]
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


def workers_of(scripts, **options):
    """Returns one worker of each tier."""
    return (
        FakePrefill(scripts[0], others=scripts[1:]),
        FakeDecode(scripts[0], others=scripts[1:], **options),
    )


def candidates_request(n=1, *, prompt=PROMPT_IDS, best_of=None, beam_width=None, **stopping):
    message = request(prompt, **stopping)
    message.sampling.n = n
    if best_of is not None:
        message.sampling.best_of = best_of
    if beam_width is not None:
        message.sampling.beam_search.beam_width = beam_width
    return message


def by_candidate(responses):
    token_ids = defaultdict(list)
    for response in responses:
        token_ids[response.index].extend(response.token_ids)
    return dict(token_ids)


def check_stream(responses, reasons):
    """Checks that each candidate ends once, and that only the last message has usage."""
    ended = {}
    for response in responses:
        assert response.index not in ended
        if response.finish_reason:
            ended[response.index] = response.finish_reason
    assert ended == dict(enumerate(reasons))
    assert [response.HasField("usage") for response in responses] == (
        [False] * (len(responses) - 1) + [True]
    )


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_candidates_are_streamed_together(has_prefill):
    prefill, decode = workers_of(SCRIPTS)
    workers = (prefill, decode) if has_prefill else (decode,)
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(candidates_request(3, max_tokens=20))
    assert by_candidate(responses) == {index: SCRIPTS[index][:20] for index in range(3)}
    check_stream(responses, [LENGTH] * 3)
    assert responses[-1].usage.completion_tokens == 60
    (start,) = decode.starts
    assert start.spec.sampling.n == 3
    if has_prefill:  # the prompt was computed once, and is handed over once
        assert len(prefill.requests) == 1
        assert given_tokens(start) == {index: SCRIPTS[index][:1] for index in range(3)}
        assert start.HasField("handoff")
        assert responses[-1].usage.cached_tokens == BLOCK_SIZE
    else:
        assert not given_tokens(start)


async def test_generate_returns_the_candidates_by_index():
    workers = workers_of([script_of("first one"), script_of("second")])
    async with running_workers(*workers), running_router(*workers) as router:
        num_tokens = min(len(worker) for worker in (script_of("first one"), script_of("second")))
        response = await router.stub.Generate(candidates_request(2, max_tokens=num_tokens))
    assert [completion.index for completion in response.completions] == [0, 1]
    assert [list(completion.token_ids) for completion in response.completions] == [
        script_of("first one")[:num_tokens],
        script_of("second")[:num_tokens],
    ]
    assert response.completions[1].text == "second"[: len(response.completions[1].text)]
    assert {completion.finish_reason for completion in response.completions} == {LENGTH}
    assert not response.completions[0].HasField("score")
    assert response.usage.completion_tokens == 2 * num_tokens


@pytest.mark.parametrize("has_prefill", [True, False])
@pytest.mark.parametrize("search", [{"best_of": 4}, {"beam_width": 4}], ids=["best_of", "beams"])
async def test_ranked_candidates_are_sent_whole_and_best_first(search, has_prefill):
    prefill, decode = workers_of(SCRIPTS)
    workers = (prefill, decode) if has_prefill else (decode,)
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(candidates_request(2, max_tokens=9, **search))
        whole = await router.stub.Generate(
            candidates_request(2, max_tokens=9, prompt=[7] * 40, **search)
        )
    # The fake ranks the last candidate highest.
    assert [list(response.token_ids) for response in responses] == [SCRIPTS[3][:9], SCRIPTS[2][:9]]
    check_stream(responses, [LENGTH] * 2)
    assert [response.score for response in responses] == [-0.5, -1.5]
    assert [completion.score for completion in whole.completions] == [-0.5, -1.5]
    timings = responses[-1].timings
    assert timings.prefill_ms == (2 if has_prefill else 20)
    assert 0 < timings.first_token_ms <= timings.total_ms
    start = decode.starts[0]
    first_tokens = [SCRIPTS[index][0] for index in range(4)] if has_prefill else []
    if "best_of" in search:
        assert given_tokens(start) == {i: [token] for i, token in enumerate(first_tokens)}
        logprobs = [given.logprob for given in start.candidates]
    else:
        assert [beam.token_id for beam in start.first_beams] == first_tokens
        logprobs = [beam.logprob for beam in start.first_beams]
    assert logprobs == ([-1.0, -2.0, -3.0, -4.0] if has_prefill else [])


async def test_candidates_that_all_end_at_prefill_never_reach_decode():
    prefill, decode = workers_of([[EOS_TOKEN_ID], [60], [EOS_TOKEN_ID]])
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(candidates_request(3, max_tokens=1))
        response = await router.stub.Generate(
            candidates_request(1, best_of=3, max_tokens=1, prompt=[7] * 40)
        )
    check_stream(responses, [STOP, LENGTH, STOP])
    assert by_candidate(responses) == {0: [EOS_TOKEN_ID], 1: [60], 2: [EOS_TOKEN_ID]}
    assert [r.matched_stop.token_id for r in responses] == [EOS_TOKEN_ID, 0, EOS_TOKEN_ID]
    assert responses[-1].timings.prefill_ms == 2
    assert len(response.completions) == 1
    assert not decode.starts


async def test_decode_reports_a_candidate_that_its_first_token_stopped():
    prefill, decode = workers_of([[EOS_TOKEN_ID], SCRIPTS[1]])
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(candidates_request(2, max_tokens=5))
    assert by_candidate(responses) == {0: [EOS_TOKEN_ID], 1: SCRIPTS[1][:5]}
    check_stream(responses, [STOP, LENGTH])
    (end,) = [response for response in responses if response.finish_reason == STOP]
    assert end.matched_stop.token_id == EOS_TOKEN_ID


async def test_a_stop_text_ends_one_candidate_on_decode_as_well():
    endless = script_of("x") * 300
    stopping = script_of("abc quick brown") + endless
    prefill, decode = workers_of([endless, stopping], pause_after=20)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        task = asyncio.create_task(
            router.generate(candidates_request(2, max_tokens=40, stop=["ck b"]))
        )
        await decode.changes.until(lambda: decode.finished_candidates)
        decode.resume()
        responses = await task
    (start,) = decode.starts
    assert decode.finished_candidates == [(start.spec.request_id, 1)]
    check_stream(responses, [LENGTH, STOP])
    text = "".join(response.text for response in responses if response.index == 1)
    assert text == "abc qui"
    assert len(by_candidate(responses)[0]) == 40
    assert not decode.cancels


async def test_a_candidate_with_a_stop_text_in_its_first_token_never_reaches_decode():
    scripts = [SCRIPTS[0], script_of("!") + SCRIPTS[1]]
    prefill, decode = workers_of(scripts)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(candidates_request(2, max_tokens=5, stop=["!"]))
    check_stream(responses, [LENGTH, STOP])
    assert given_tokens(decode.starts[0]) == {0: SCRIPTS[0][:1]}
    assert not decode.finished_candidates


async def test_a_request_ends_once_stop_texts_have_ended_all_candidates():
    stopping = [script_of("a!") + script_of("x") * 300, script_of("bcd!") + script_of("x") * 300]
    (decode,) = workers_of(stopping, pause_after=50)[1:]  # a worker that ends itself gets no cancel
    async with running_workers(decode), running_router(decode) as router:
        responses = await router.generate(candidates_request(2, max_tokens=200, stop=["!"]))
        await decode.changes.until(lambda: decode.cancels)
    check_stream(responses, [STOP, STOP])
    worker_id = decode.starts[0].spec.request_id
    assert decode.cancels == [worker_id]
    assert sorted(decode.finished_candidates) == [(worker_id, 0), (worker_id, 1)]


async def test_candidates_resume_where_a_lost_replica_left_off():
    scripts = [SCRIPTS[0], [*SCRIPTS[1][:4], EOS_TOKEN_ID], SCRIPTS[2]]
    prefill, *decodes = (
        *workers_of(scripts)[:1],
        *(workers_of(scripts, pause_after=7)[1] for _ in range(2)),
    )
    workers = (prefill, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        stream = router.stub.GenerateStream(candidates_request(3, max_tokens=20), timeout=30)
        responses = []
        while len(token_ids_of(responses)) < 7 + 5 + 7:
            responses.append(await stream.read())
        (dying,) = [decode for decode in decodes if decode.starts]
        (survivor,) = [decode for decode in decodes if decode is not dying]
        survivor.resume()
        await dying.stop()
        while (response := await stream.read()) is not grpc.aio.EOF:
            responses.append(response)
    assert by_candidate(responses) == {
        0: scripts[0][:20],
        1: scripts[1],
        2: scripts[2][:20],
    }
    check_stream(responses, [LENGTH, STOP, LENGTH])
    # The ended candidate is not sent again, and the others keep their indices.
    assert given_tokens(survivor.starts[0]) == {0: scripts[0][:7], 2: scripts[2][:7]}
    assert survivor.starts[0].spec.sampling.n == 3


@pytest.mark.parametrize("has_prefill", [True, False])
@pytest.mark.parametrize("search", [{"best_of": 4}, {"beam_width": 4}], ids=["best_of", "beams"])
async def test_ranked_requests_start_again_with_the_tokens_that_prefill_drew(search, has_prefill):
    prefill, _ = workers_of(SCRIPTS)
    decodes = [workers_of(SCRIPTS, pause_after=7)[1] for _ in range(2)]
    workers = (prefill, *decodes) if has_prefill else decodes
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(candidates_request(1, max_tokens=9, **search)))
        dying = await first_of(decodes, lambda decode: decode.running)
        (survivor,) = [decode for decode in decodes if decode is not dying]
        survivor.resume()
        await dying.stop()
        responses = await task
    assert [list(response.token_ids) for response in responses] == [SCRIPTS[3][:9]]
    (begun,), (resumed,) = dying.starts, survivor.starts
    assert resumed.candidates == begun.candidates
    assert resumed.first_beams == begun.first_beams
    assert resumed.HasField("handoff") == has_prefill
    assert resumed.handoff == begun.handoff


async def test_an_aborted_request_ends_all_its_candidates():
    decode = FakeDecode(SCRIPTS[0], pause_after=3)
    async with running_workers(decode), running_router(decode) as router:
        task = asyncio.create_task(router.generate(candidates_request(3, max_tokens=20)))
        await decode.changes.until(lambda: decode.num_sent == 9)
        decode.abort_running()
        responses = await task
    check_stream(responses, [common_pb2.FINISH_REASON_ABORTED] * 3)
    assert responses[-1].usage.completion_tokens == 9


async def test_more_candidates_than_a_replica_runs_are_refused():
    decodes = [FakeDecode(SCRIPTS[0], max_num_seqs=size) for size in (2, 4)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        for fields, named in (
            ({"n": 5}, "n is 5"),
            ({"best_of": 5}, "best_of is 5"),
            ({"beam_width": 5}, "beam_width is 5"),
        ):
            error = await failed(router.generate(candidates_request(**fields)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(f"{named}; it must be at most 4")
        for _ in range(3):
            await router.generate(candidates_request(3, max_tokens=2))
    assert [len(decode.starts) for decode in decodes] == [0, 3]


async def test_a_request_that_no_pool_can_hold_fails_at_once():
    """The router does not wait for another replica to continue it."""
    prefill, decode = workers_of(SCRIPTS)
    decode.refusal = ResourceExhaustedError("the request needs 100 KV blocks")
    workers = (prefill, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        error = await failed(router.generate(candidates_request(4, max_tokens=20)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "the request needs 100 KV blocks"


async def test_candidates_of_a_stopped_engine_continue_on_another_replica():
    decodes = [workers_of(SCRIPTS, pause_after=5)[1] for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(candidates_request(2, max_tokens=9)))
        dying = await first_of(decodes, lambda decode: decode.num_sent == 10)
        (survivor,) = [decode for decode in decodes if decode is not dying]
        survivor.resume()
        dying.fail_running(UnavailableError("the engine of this replica has stopped"))
        responses = await task
    assert by_candidate(responses) == {0: SCRIPTS[0][:9], 1: SCRIPTS[1][:9]}
    assert given_tokens(survivor.starts[0]) == {0: SCRIPTS[0][:5], 1: SCRIPTS[1][:5]}


async def failed(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
