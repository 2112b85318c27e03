"""Log-probabilities through a real router with scripted workers."""

import asyncio

import grpc
import pytest

from baton.common.request.wire import parse_chunk, parse_output
from baton.v1 import generation_pb2_grpc
from tests.support.fake_candidates import fake_logprobs
from tests.support.fake_workers import FakeDecode, FakePrefill, running_workers
from tests.support.running_router import PROMPT_IDS, request, running_router, script_of

SCRIPT = [50 + i % 200 for i in range(400)]


def asking(prompt=PROMPT_IDS, *, logprobs=2, prompt_logprobs=None, **stopping):
    message = request(prompt, **stopping)
    if logprobs is not None:
        message.sampling.logprobs = logprobs
    if prompt_logprobs is not None:
        message.sampling.prompt_logprobs = prompt_logprobs
    return message


def check_stream(responses, num_top=2, prompt=None, num_prompt_top=0):
    """Checks that each token has its log-probabilities, and that the prompt's come first."""
    for index, response in enumerate(responses):
        assert list(response.logprobs) == [fake_logprobs(t, num_top) for t in response.token_ids]
        expected = prompt if prompt is not None and index == 0 else ()
        assert list(response.prompt_token_ids) == list(expected)
        assert list(response.prompt_logprobs) == [
            fake_logprobs(token_id, num_prompt_top) for token_id in expected[1:]
        ]


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_every_token_and_the_prompt_have_theirs(has_prefill):
    workers = (FakePrefill(SCRIPT), FakeDecode(SCRIPT))[0 if has_prefill else 1 :]
    message = asking(prompt_logprobs=1, max_tokens=9)
    message.sampling.n = 2
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(message)
        whole = await router.stub.Generate(message)
    check_stream(responses, prompt=PROMPT_IDS, num_prompt_top=1)
    assert sum(len(response.logprobs) for response in responses) == 18
    generation = parse_output(whole)
    assert generation.prompt_token_ids == list(PROMPT_IDS)
    assert generation.prompt_logprobs[0] is None
    own = [each[t] for each, t in pairs(generation.prompt_logprobs[1:], PROMPT_IDS[1:])]
    assert [(each.logprob, each.rank) for each in own] == [(-t / 8, t) for t in PROMPT_IDS[1:]]
    for completion in generation.outputs:
        own = [each[token_id] for each, token_id in pairs(completion.logprobs, SCRIPT)]
        assert [(each.logprob, each.rank) for each in own] == [(-t / 8, t) for t in SCRIPT[:9]]
        assert completion.cumulative_logprob == -sum(SCRIPT[:9]) / 8


def pairs(logprobs, token_ids):
    return zip(logprobs, token_ids[: len(logprobs)], strict=True)


async def test_requests_that_do_not_ask_get_none():
    workers = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(request(max_tokens=4))
        whole = await router.stub.Generate(request(max_tokens=4))
    check_stream([r for r in responses if not r.token_ids])
    assert not any(response.logprobs or response.prompt_token_ids for response in responses)
    generation = parse_output(whole)
    assert (generation.prompt_logprobs, generation.outputs[0].logprobs) == (None, None)
    assert generation.outputs[0].cumulative_logprob is None
    assert all(parse_chunk(response).logprobs is None for response in responses)


async def test_a_stop_text_cuts_them_with_the_tokens():
    script = script_of("a.b.c.d")
    decode = FakeDecode(script)
    async with running_workers(decode), running_router(decode) as router:
        (completion,) = (
            await router.stub.Generate(asking(stop=["b."], max_tokens=len(script)))
        ).completions
    assert list(completion.token_ids) == script[:4]
    assert list(completion.logprobs) == [fake_logprobs(token_id, 2) for token_id in script[:4]]


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_a_resumed_request_has_each_once(has_prefill):
    decodes = [FakeDecode(SCRIPT, pause_after=7) for _ in range(2)]
    workers = (*([FakePrefill(SCRIPT)] if has_prefill else []), *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        message = asking(prompt_logprobs=0, max_tokens=20)
        responses = []
        async for response in router.stub.GenerateStream(message, timeout=30):
            responses.append(response)
            if sum(len(each.token_ids) for each in responses) == 7:
                dying, survivor = sorted(decodes, key=lambda decode: not decode.starts)
                survivor.resume()
                await dying.stop()
    check_stream(responses, prompt=PROMPT_IDS)
    assert [t for response in responses for t in response.token_ids] == SCRIPT[:20]
    assert len(survivor.starts) == 1
    assert not survivor.starts[0].candidates[0].token_logprobs  # the client has them


async def test_another_prefill_replica_returns_the_prompts_whole_and_once():
    prefills = [FakePrefill(SCRIPT, hold=True) for _ in range(2)]
    workers = (*prefills, FakeDecode(SCRIPT))
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(asking(prompt_logprobs=3, max_tokens=5)))
        for prefill in prefills:
            if await begins(prefill, prefills):
                other = prefills[1 - prefills.index(prefill)]
                other.answer()
                await prefill.stop()
                break
        responses = await task
    check_stream(responses, prompt=PROMPT_IDS, num_prompt_top=3)


async def begins(prefill, prefills):
    """Waits until any of the replicas computes; returns whether this one does."""
    while not any(each.requests for each in prefills):
        await asyncio.wait(
            [
                asyncio.create_task(each.changes.until(lambda e=each: e.requests))
                for each in prefills
            ],
            return_when=asyncio.FIRST_COMPLETED,
        )
    return bool(prefill.requests)


async def test_first_tokens_of_ranked_candidates_take_theirs_to_decode():
    scripts = [[base + i % 50 for i in range(300)] for base in (50, 150, 250)]
    workers = (
        FakePrefill(scripts[0], others=scripts[1:]),
        FakeDecode(scripts[0], others=scripts[1:]),
    )
    message = asking(prompt_logprobs=1, max_tokens=6)
    message.sampling.best_of = 3
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(message)
    (start,) = workers[1].starts
    assert [list(given.token_logprobs) for given in start.candidates] == [
        [fake_logprobs(script[0], 2)] for script in scripts
    ]
    check_stream(responses, prompt=PROMPT_IDS, num_prompt_top=1)
    assert sum(len(response.logprobs) for response in responses) == 6


async def test_a_slow_client_gets_all_of_them_in_fewer_messages():
    script = SCRIPT * 8
    decode = FakeDecode(script)
    async with running_workers(decode), running_router(decode) as router:
        # The window does not grow, so that the stream soon blocks.
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(router.server.address, options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            message = asking(logprobs=20, prompt_logprobs=0, max_tokens=len(script))
            call = stub.GenerateStream(message, timeout=60)
            responses = [await call.read()]
            await decode.changes.until(lambda: decode.num_sent == len(script))
            while (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)
    check_stream(responses, num_top=20, prompt=PROMPT_IDS)
    assert [t for response in responses for t in response.token_ids] == script
    assert len(responses) < len(script)


async def test_a_prompt_that_decode_has_cached_goes_to_prefill():
    """Its log-probabilities are computed, which would delay others' tokens on decode."""
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        for message in (request(), request(), asking(prompt_logprobs=0)):
            await router.generate(message)
    assert len(prefill.requests) == 2
    assert prefill.requests[1].sampling.HasField("prompt_logprobs")
