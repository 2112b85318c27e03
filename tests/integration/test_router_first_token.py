"""The first token is sent before its prompt's KV is saved; decode loads blocks saved early."""

import asyncio

import grpc
import pytest

from baton.common.errors import DeadlineExceededError, InternalError, UnavailableError
from baton.v1 import common_pb2
from router.fleet.decode_connection import DecodeConnection
from router.requests.pace import Pace
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import FakeDecode, FakePrefill, first_of, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    script_of,
    token_ids_of,
)

SCRIPT = [50 + i % 200 for i in range(100)]
KEYS = [bytes([i]) * 32 for i in range(10)]


async def first_message(call):
    """Reads the first message of a stream, and checks its token."""
    response = await call.read()
    assert list(response.token_ids) == SCRIPT[:1]
    return response


async def rest_of(call):
    return [response async for response in iterate(call)]


async def iterate(call):
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


def prefetched_keys(decode):
    return [key for command in decode.prefetches for key in command.blocks.block_keys]


async def test_streams_that_pause_do_not_delay_decode():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        router.model._pipeline._pace = pace = Pace()
        pace.pause_s = 3600
        call = router.stub.GenerateStream(request(max_tokens=5), timeout=30)
        await first_message(call)
        await decode.changes.until(lambda: decode.starts)
        pace.pause_s = 0
        call.cancel()


async def test_the_first_token_is_sent_before_the_prompt_is_saved():
    prefill, decode = FakePrefill(SCRIPT, hold_end=True), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(max_tokens=5), timeout=30)
        first = await first_message(call)
        assert not decode.starts
        (replica,) = router.fleet.prefill.candidates
        assert replica.candidate().num_queued_tokens == 0  # the prompt is computed
        prefill.end()
        responses = [first, *await rest_of(call)]
    assert token_ids_of(responses) == SCRIPT[:5]
    (start,) = decode.starts
    assert start.HasField("handoff")
    assert given_tokens(start) == {0: SCRIPT[:1]}
    timings = responses[-1].timings
    assert (timings.queue_ms, timings.prefill_ms, timings.transfer_ms) == (1, 2, 3)
    assert timings.load_ms == 30
    assert prefill.num_cancelled == 0


async def test_saved_blocks_reach_decode_in_order_before_the_request_does():
    prefill = FakePrefill(
        SCRIPT,
        hold=True,
        hold_end=True,
        saves=[KEYS[:2], KEYS[2:3]],
        late_saves=[KEYS[3:9], KEYS[9:]],
    )
    decode = FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(max_tokens=5), timeout=30)
        await decode.changes.until(lambda: prefetched_keys(decode) == KEYS[:3])
        prefill.answer()
        await first_message(call)
        await decode.changes.until(lambda: prefetched_keys(decode) == KEYS)
        assert not decode.starts
        prefill.end()
        await rest_of(call)
    (start,) = decode.starts
    assert {command.blocks.handoff_id for command in decode.prefetches} == {
        start.handoff.handoff_id
    }
    assert len(prefill.released) == 1


async def test_saved_blocks_go_to_the_replica_that_will_generate():
    """No other replica gets them, and meanwhile other prompts go to other replicas."""
    prefill = FakePrefill(SCRIPT, hold=True, saves=[KEYS[:2]])
    decodes = FakeDecode(SCRIPT), FakeDecode(SCRIPT)
    workers = (prefill, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        tasks = [
            asyncio.create_task(router.generate(request((*PROMPT_IDS, i), max_tokens=3)))
            for i in range(2)
        ]
        for decode in decodes:
            await decode.changes.until(lambda d=decode: d.prefetches)
        prefill.answer()
        for responses in await asyncio.gather(*tasks):
            assert token_ids_of(responses) == SCRIPT[:3]
    for decode in decodes:
        (command,), (start,) = decode.prefetches, decode.starts
        assert command.blocks.handoff_id == start.handoff.handoff_id


@pytest.mark.parametrize("end", ["dies", "freezes", "unavailable", "internal"])
async def test_decode_computes_the_prompt_if_prefill_is_lost_after_the_first_token(end):
    prefills = [FakePrefill(SCRIPT, hold_end=True, saves=[KEYS[:2]]) for _ in range(2)]
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=30)
        first = await first_message(call)
        prefill, other = sorted(prefills, key=lambda prefill: not prefill.requests)
        if end == "dies":
            await prefill.stop()
        elif end == "freezes":
            prefill.is_frozen = True
        else:
            error = UnavailableError if end == "unavailable" else InternalError
            prefill.end_refusal = error("the engine of this replica has stopped")
            prefill.end()
        responses = [first, *await rest_of(call)]
    assert token_ids_of(responses) == SCRIPT[:6]
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    (start,) = decode.starts
    assert not start.HasField("handoff")
    assert given_tokens(start) == {0: SCRIPT[:1]}
    assert not other.requests
    if end not in ("dies", "freezes"):
        assert len(prefill.released) == 1  # the handoff of the saved part


async def test_ranked_candidates_survive_the_loss_of_prefill_after_their_first_tokens():
    scripts = [[base + i for i in range(20)] for base in (50, 150)]
    prefill = FakePrefill(scripts[0], others=scripts[1:], hold_end=True)
    decode = FakeDecode(scripts[0], others=scripts[1:])
    prefill.end_refusal = UnavailableError("drains")
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        message = request(max_tokens=9)
        message.sampling.best_of = 2
        task = asyncio.create_task(router.generate(message))
        await prefill.changes.until(lambda: prefill.requests)
        prefill.end()
        responses = await task
    assert token_ids_of(responses) == scripts[1][:9]
    assert given_tokens(decode.starts[0]) == {0: [50], 1: [150]}
    assert len(prefill.requests) == 1


async def test_another_prefill_replica_replaces_one_lost_before_the_first_token():
    """Decode has been sent the lost replica's saved blocks, and then gets the other replica's."""
    prefills = [FakePrefill(SCRIPT, hold=True, saves=[KEYS[:2]]) for _ in range(2)]
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        dying = await first_of(prefills, lambda prefill: prefill.requests)
        (survivor,) = [prefill for prefill in prefills if prefill is not dying]
        await decode.changes.until(lambda: decode.prefetches)
        await dying.stop()
        await decode.changes.until(lambda: len(decode.prefetches) == 2)
        survivor.answer()
        assert token_ids_of(await task) == SCRIPT[:6]
        await survivor.changes.until(lambda: survivor.released)
    (start,) = decode.starts
    lost, kept = (command.blocks.handoff_id for command in decode.prefetches)
    assert lost != kept
    assert start.handoff.handoff_id == kept
    assert survivor.released == [kept]


async def test_another_decode_replica_gets_the_handoff_of_one_lost_while_blocks_are_saved():
    prefill = FakePrefill(SCRIPT, hold_end=True, saves=[KEYS[:2]], late_saves=[KEYS[2:]])
    decodes = FakeDecode(SCRIPT), FakeDecode(SCRIPT)
    workers = (prefill, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=30)
        first = await first_message(call)
        dying = await first_of(decodes, lambda decode: decode.prefetches)
        (survivor,) = [decode for decode in decodes if decode is not dying]
        await dying.stop()
        await router.until(lambda: dying.info.worker_id not in router.candidate_ids())
        prefill.end()
        responses = [first, *await rest_of(call)]
    assert token_ids_of(responses) == SCRIPT[:6]
    assert survivor.starts[0].HasField("handoff")


@pytest.mark.parametrize("is_first_token_sent", [False, True])
async def test_a_client_that_leaves_while_blocks_are_saved_frees_both_tiers(is_first_token_sent):
    prefill = FakePrefill(SCRIPT, hold=not is_first_token_sent, hold_end=True, saves=[KEYS[:2]])
    decode = FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(max_tokens=6))
        if is_first_token_sent:
            await first_message(call)
        await decode.changes.until(lambda: decode.prefetches)
        call.cancel()
        await prefill.changes.until(lambda: prefill.num_cancelled and prefill.released)
        (held,) = [command.blocks.handoff_id for command in decode.prefetches]
        assert prefill.released == [held]
        assert router.fleet.decode.candidates[0].candidate().num_requests == 0
    assert not decode.starts


async def test_a_deadline_while_blocks_are_saved_frees_both_tiers():
    prefill, decode = FakePrefill(SCRIPT, hold_end=True, saves=[KEYS[:2]]), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=1.5)
        await first_message(call)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await prefill.changes.until(lambda: prefill.num_cancelled and prefill.released)
    assert not decode.starts


async def test_a_deadline_of_prefill_alone_does_not_end_the_request():
    prefill, decode = FakePrefill(SCRIPT, hold_end=True), FakeDecode(SCRIPT)
    prefill.end_refusal = DeadlineExceededError("the request ran into its deadline")
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=30)
        first = await first_message(call)
        prefill.end()
        responses = [first, *await rest_of(call)]
    assert token_ids_of(responses) == SCRIPT[:6]
    assert not decode.starts[0].HasField("handoff")


async def test_a_request_aborted_while_its_blocks_are_saved_ends():
    prefill, decode = FakePrefill(SCRIPT, hold_end=True), FakeDecode(SCRIPT)
    prefill.has_handoff, prefill.end_reason = False, common_pb2.FINISH_REASON_ABORTED
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        message = request(max_tokens=6)
        message.sampling.n = 2
        call = router.stub.GenerateStream(message, timeout=30)
        for _ in range(2):
            await first_message(call)
        prefill.end()
        ends = await rest_of(call)
    assert {end.index: end.finish_reason for end in ends} == dict.fromkeys(
        range(2), common_pb2.FINISH_REASON_ABORTED
    )
    assert ends[-1].usage.completion_tokens == 2
    assert ends[-1].timings.transfer_ms == 3
    assert not decode.starts


async def test_unsent_prefetches_for_a_stuck_decode_replica_are_dropped_with_their_request(
    monkeypatch,
):
    async def send_nothing(connection):
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(DecodeConnection, "_outgoing", send_nothing)
    prefill, decode = FakePrefill(SCRIPT, hold_end=True, saves=[KEYS]), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        (replica,) = router.fleet.decode.candidates
        call = router.stub.GenerateStream(request(max_tokens=6), timeout=30)
        await first_message(call)
        assert len(replica.connection._commands) == 1
        call.cancel()
        await prefill.changes.until(lambda: prefill.released)
        assert not replica.connection._commands


async def test_a_stop_text_in_the_first_token_ends_the_request_before_the_transfer():
    script = [*script_of("!"), *SCRIPT]
    prefill, decode = FakePrefill(script, hold_end=True), FakeDecode(script)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        (response,) = await router.generate(request(max_tokens=6, stop=["!"]))
        await prefill.changes.until(lambda: prefill.num_cancelled)
    assert response.matched_stop.text == "!"
    assert response.timings.prefill_ms == 2
    assert not decode.starts
