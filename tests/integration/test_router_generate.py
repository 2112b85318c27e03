"""Requests through a real router and scripted workers: their routes and their ends."""

import asyncio
import logging

import grpc
import pytest

from baton.common.request.request_spec import client_id_of
from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import (
    BLOCK_SIZE,
    EOS_TOKEN_ID,
    MAX_MODEL_LEN,
    FakeDecode,
    FakePrefill,
    running_workers,
)
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    script_of,
    text_of,
    token_ids_of,
)

TEXT = "The quick brown fox jumps over the lazy dog, naïve café 😀 and so on."


async def test_a_request_is_prefilled_remotely_and_then_decoded():
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        message = request(request_id="r", max_tokens=len(script))
        responses = await router.generate(message, timeout_s=30)
        await prefill.changes.until(lambda: prefill.released)
    assert token_ids_of(responses) == script
    assert text_of(responses) == TEXT
    assert [r.finish_reason for r in responses[:-1]] == [0] * (len(responses) - 1)
    last = responses[-1]
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert last.usage.prompt_tokens == len(PROMPT_IDS)
    assert last.usage.cached_tokens == BLOCK_SIZE  # what prefill found, not what decode loaded
    assert last.usage.completion_tokens == len(script)
    # Decode got the first token and the handoff, and nothing to compute.
    (start,) = decode.starts
    assert given_tokens(start) == {0: script[:1]}
    assert start.handoff.handoff_id == f"handoff-{start.spec.request_id}"
    assert prefill.released == [start.handoff.handoff_id]
    assert 0 < start.spec.timeout_ms <= 31_000  # gRPC rounds timeouts up
    timings = last.timings
    assert (timings.queue_ms, timings.prefill_ms, timings.transfer_ms) == (1, 2, 3)
    assert timings.load_ms == 30
    assert 0 < timings.route_ms <= timings.first_token_ms <= timings.total_ms
    assert timings.decode_ms == pytest.approx(timings.total_ms - timings.first_token_ms, abs=0.01)


async def test_workers_never_get_a_request_id_twice(caplog):
    """A client may reuse an id; late outputs of the old request must not reach the new one."""
    caplog.set_level(logging.DEBUG, logger="baton.router")
    prefill, decode = FakePrefill(script_of(TEXT)), FakeDecode(script_of(TEXT))
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        for _ in range(2):
            responses = await router.generate(request(request_id="r", max_tokens=5))
            assert responses[-1].request_id == "r"
    names = {start.spec.request_id for start in decode.starts}
    assert len(names) == 2
    assert {client_id_of(name) for name in names} == {"r"}
    log = [record.getMessage() for record in caplog.records]
    for name in names:  # the log connects a request with its id on workers
        assert any(f"worker_request_id='{name}'" in line for line in log)


async def test_generate_returns_the_whole_completion():
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        response = await router.stub.Generate(request("one two three " * 9, max_tokens=9))
    (completion,) = response.completions
    assert list(completion.token_ids) == script[:9]
    assert response.usage.completion_tokens == 9
    assert len(response.request_id) == 32
    assert response.timings.total_ms > 0
    assert completion.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not completion.HasField("matched_stop")


async def test_generate_returns_the_stop_that_matched():
    decode = FakeDecode([50, EOS_TOKEN_ID])
    async with running_workers(decode), running_router(decode) as router:
        response = await router.stub.Generate(request(max_tokens=9))
    assert response.completions[0].matched_stop.token_id == EOS_TOKEN_ID


async def test_requests_without_an_id_get_one_that_is_logged(caplog):
    caplog.set_level(logging.INFO, logger="baton.rpc")
    decode = FakeDecode([50] * 9)
    async with running_workers(decode), running_router(decode) as router:
        streamed = await router.generate(request(max_tokens=2))
        whole = await router.stub.Generate(request(max_tokens=2))
    ids = (streamed[-1].request_id, whole.request_id)
    assert ids[0] != ids[1]
    lines = [record.getMessage() for record in caplog.records]
    for request_id, method in zip(ids, ("GenerateStream", "Generate"), strict=True):
        assert len(request_id) == 32
        (line,) = [line for line in lines if f"/{method} " in line]
        assert f"request_id='{request_id}'" in line


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_decode_computes_short_prompts_and_those_without_a_prefill_tier(has_prefill):
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    workers = (prefill, decode) if has_prefill else (decode,)
    prompt = PROMPT_IDS[:16] if has_prefill else PROMPT_IDS
    async with running_workers(*workers), running_router(*workers) as router:
        responses = await router.generate(request(prompt, max_tokens=5))
    assert token_ids_of(responses) == script[:5]
    assert not prefill.requests
    assert not decode.starts[0].HasField("handoff")
    assert not given_tokens(decode.starts[0])
    assert responses[-1].usage.cached_tokens == 2 * BLOCK_SIZE
    assert responses[-1].timings.prefill_ms == 20


async def test_prompts_whose_prefix_decode_has_cached_skip_prefill():
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        await router.generate(request(max_tokens=5))
        await router.generate(request((*PROMPT_IDS, 7, 8), max_tokens=5))
        salted = request((*PROMPT_IDS, 7, 8), max_tokens=5)
        salted.cache_salt = "another tenant"
        await router.generate(salted)
    assert [len(r.prompt_token_ids) for r in prefill.requests] == [40, 42]
    assert [r.cache_salt for r in prefill.requests] == ["", "another tenant"]


@pytest.mark.parametrize(
    ("max_tokens", "first_token", "reason"),
    [(1, 50, "LENGTH"), (8, EOS_TOKEN_ID, "STOP")],
)
async def test_a_generation_that_ends_with_the_first_token_never_reaches_decode(
    max_tokens, first_token, reason
):
    script = [first_token, 60, 61]
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(request(max_tokens=max_tokens))
    assert token_ids_of(responses) == [first_token]
    assert responses[-1].finish_reason == common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
    assert responses[-1].matched_stop.token_id == (first_token if reason == "STOP" else 0)
    assert not decode.starts


async def test_decode_computes_the_prompt_if_there_is_no_handoff():
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    prefill.has_handoff = False
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(request(max_tokens=5))
    assert token_ids_of(responses) == script[:5]
    assert not decode.starts[0].HasField("handoff")
    assert given_tokens(decode.starts[0]) == {0: script[:1]}


async def test_a_stop_text_across_tokens_cuts_the_text_and_cancels_decode():
    script = script_of("abc quick brown") + [300] * 2000
    prefill, decode = FakePrefill(script), FakeDecode(script, pause_after=50)  # never ends itself
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        message = request(request_id="s", stop=["ck br", "never"], max_tokens=2000)
        responses = await router.generate(message)
        await decode.changes.until(lambda: decode.cancels)
    assert text_of(responses) == "abc qui"
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert responses[-1].matched_stop.text == "ck br"
    assert decode.cancels == [decode.starts[0].spec.request_id]
    assert decode.finished_candidates == [(decode.starts[0].spec.request_id, 0)], (
        "the request was not aborted"
    )
    got = token_ids_of(responses)
    assert got == script[: len(got)]
    assert responses[-1].usage.completion_tokens == len(got)
    assert len(got) == len(script_of("abc quick brown"))  # up to the token that completed the stop


async def test_stop_tokens_and_ignore_eos_reach_the_workers():
    script = [50, EOS_TOKEN_ID, 60, 61]
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        until_eos = await router.generate(request(max_tokens=4))
        past_eos = await router.generate(request(max_tokens=4, ignore_eos=True))
        until_60 = await router.generate(
            request(max_tokens=4, ignore_eos=True, stop_token_ids=[60])
        )
    assert token_ids_of(until_eos) == [50, EOS_TOKEN_ID]
    assert until_eos[-1].matched_stop.token_id == EOS_TOKEN_ID
    assert token_ids_of(past_eos) == script
    assert token_ids_of(until_60) == [50, EOS_TOKEN_ID, 60]


async def test_the_router_draws_one_seed_for_a_sampled_request_without_one():
    script = script_of(TEXT)
    prefill, decode = FakePrefill(script), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        sampled, seeded = request(max_tokens=3), request(max_tokens=3)
        sampled.sampling.temperature = 1.0
        seeded.sampling.CopyFrom(common_pb2.SamplingParams(temperature=0.5, seed=0, top_k=7))
        for salt, message in (("a", sampled), ("b", sampled), ("c", seeded)):
            message.cache_salt = salt  # else the second would be computed on decode
            await router.generate(message)
    assert len(prefill.requests) == 3
    first, second, given = (r.sampling for r in prefill.requests)
    assert first.seed != second.seed
    assert given.HasField("seed")
    assert given == seeded.sampling
    assert [s.spec.sampling.seed for s in decode.starts] == [first.seed, second.seed, 0]


async def test_max_tokens_is_cut_to_the_context_length():
    script = [50] * 100
    decode = FakeDecode(script, max_model_len=50)
    async with running_workers(decode), running_router(decode) as router:
        responses = await router.generate(request(max_tokens=10_000))
    assert len(token_ids_of(responses)) == 10
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_slow_client_gets_every_token_in_fewer_messages():
    script = [50 + i % 200 for i in range(MAX_MODEL_LEN - len(PROMPT_IDS))]
    decode = FakeDecode(script)
    async with running_workers(decode), running_router(decode) as router:
        # The window does not grow and messages have a long id, so that the stream soon blocks.
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(router.server.address, options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            message = request(request_id="r" * 128, max_tokens=len(script))
            call = stub.GenerateStream(message, timeout=60)
            responses = [await call.read()]
            await decode.changes.until(lambda: decode.num_sent == len(script))
            while (response := await call.read()) is not grpc.aio.EOF:
                responses.append(response)
    assert token_ids_of(responses) == script
    assert len(responses) < len(script)


async def test_the_model_is_described_and_texts_are_tokenized():
    script = script_of(TEXT)
    decode = FakeDecode(script)
    async with running_workers(decode), running_router(decode) as router:
        model = await router.stub.GetModel(generation_pb2.GetModelRequest())
        plain = await router.stub.Tokenize(
            generation_pb2.TokenizeRequest(text=TEXT, add_special_tokens=False)
        )
        special = await router.stub.Tokenize(generation_pb2.TokenizeRequest(text=TEXT))
        back = await router.stub.Detokenize(
            generation_pb2.DetokenizeRequest(token_ids=special.token_ids)
        )
        whole = await router.stub.Detokenize(
            generation_pb2.DetokenizeRequest(token_ids=special.token_ids, skip_special_tokens=False)
        )
    assert (model.model, model.block_size) == ("scripted", BLOCK_SIZE)
    assert model.max_model_len == MAX_MODEL_LEN
    assert len(bytes.fromhex(model.kv_namespace)) == 32
    assert list(plain.token_ids) == script
    assert list(special.token_ids) == [0, *script]
    assert back.text == TEXT
    assert whole.text == "<s>" + TEXT


async def test_long_texts_survive_tokenizing_and_back():
    decode = FakeDecode([50])
    text = TEXT * 500
    async with running_workers(decode), running_router(decode) as router:
        ids = (await router.stub.Tokenize(generation_pb2.TokenizeRequest(text=text))).token_ids
        message = generation_pb2.DetokenizeRequest(token_ids=ids)
        assert (await router.stub.Detokenize(message)).text == text


async def test_many_requests_share_one_connection_per_replica():
    script = script_of(TEXT)
    prefills = [FakePrefill(script) for _ in range(2)]
    decodes = [FakeDecode(script) for _ in range(2)]
    workers = (*prefills, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        streams = [
            router.generate(request((i, *PROMPT_IDS[: 20 + i % 20]), max_tokens=1 + i % 20))
            for i in range(60)
        ]
        results = await asyncio.gather(*streams)
    for i, responses in enumerate(results):
        assert token_ids_of(responses) == script[: 1 + i % 20]
    assert [decode.num_connects for decode in decodes] == [1, 1]
    assert all(worker.requests for worker in prefills)  # both were used
    assert all(worker.starts for worker in decodes)
