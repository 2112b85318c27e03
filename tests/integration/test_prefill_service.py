"""PrefillService over a scripted engine."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest

from baton.errors import InternalError, ResourceExhaustedError
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from engine.request import FinishReason, RequestOutput, StageTimings
from kvstore.handoff import KvHandoff
from prefill_service.server import SERVICE_NAMES, add_services
from tests.support.fake_engine import FakeEngine, finished
from tests.support.rpc_servers import running_server, worker_request

HANDOFF = KvHandoff(
    handoff_id="h",
    namespace=b"n" * 32,
    block_keys=(b"k" * 32,),
    num_tokens=3,
    connector="memory",
    digest_scheme="xxh3-128",
    lease_ms=5000,
)


@pytest.fixture
async def engine():
    return FakeEngine("prefill")


@pytest.fixture
async def stub(engine):
    async with running_server(SERVICE_NAMES, lambda server: add_services(engine, server)) as (
        _,
        channel,
    ):
        yield prefill_pb2_grpc.PrefillServiceStub(channel)


def prefill(stub, request_id="r", timeout=20, **changes):
    request = prefill_pb2.PrefillRequest(request=worker_request(request_id, **changes))
    return stub.Prefill(request, timeout=timeout)


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def admitted(engine, request_id="r"):
    async with asyncio.timeout(10):
        await engine.until(lambda: request_id in engine.live)
    return engine.live[request_id]


async def test_the_last_output_carries_token_handoff_and_timings(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    engine.emit(
        RequestOutput(
            request_id="r",
            token_ids=(42,),
            finish_reason=FinishReason.HANDOFF,
            is_last=True,
            cached_tokens=2,
            timings=StageTimings(queue_ms=1.0, prefill_ms=2.0, transfer_ms=3.0),
            handoff=HANDOFF,
        )
    )
    response = await call
    assert list(response.token_ids) == [42]
    assert not response.candidates
    assert response.handoff.block_keys == [b"k" * 32]
    assert response.cached_tokens == 2
    assert (response.timings.queue_ms, response.timings.transfer_ms) == (1.0, 3.0)


async def test_ranked_first_tokens_come_with_log_probabilities(stub, engine):
    sampling = common_pb2.SamplingParams(seed=1, best_of=2)
    call = prefill(stub, sampling=sampling)
    assert (await admitted(engine)).num_candidates == 2
    engine.emit(
        RequestOutput(
            request_id="r",
            token_ids=(42, 43),
            logprobs=(-0.5, -1.5),
            finish_reason=FinishReason.HANDOFF,
            is_last=True,
        )
    )
    response = await call
    assert list(response.token_ids) == [42, 43]
    assert list(response.logprobs) == [-0.5, -1.5]
    assert not response.HasField("handoff")  # the connector could not take the blocks


async def test_a_generation_that_is_over_says_so(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    engine.emit(finished("r", FinishReason.STOP, 2))
    response = await call
    assert not response.token_ids
    (candidate,) = response.candidates
    assert list(candidate.token_ids) == [2]
    assert candidate.finish_reason == common_pb2.FINISH_REASON_STOP


async def test_candidates_that_are_over_come_one_by_one(stub, engine):
    call = prefill(stub, sampling=common_pb2.SamplingParams(seed=1, n=2))
    await admitted(engine)
    first = finished("r", FinishReason.STOP, 2, is_last=False)
    engine.emit(replace(first, score=-0.5, timings=StageTimings(queue_ms=1.0), cached_tokens=2))
    engine.emit(finished("r", FinishReason.LENGTH, 3, index=1))
    response = await call
    assert [(c.index, list(c.token_ids)) for c in response.candidates] == [(0, [2]), (1, [3])]
    assert [c.HasField("score") for c in response.candidates] == [True, False]
    assert (response.cached_tokens, response.timings.queue_ms) == (2, 1.0)


async def test_the_callers_deadline_is_the_engines(stub, engine):
    before = time.monotonic()
    call = prefill(stub, timeout=20)
    request = await admitted(engine)
    # The margin is for the header's rounding of the timeout.
    assert before + 15 < request.deadline < time.monotonic() + 21
    call.cancel()


@pytest.mark.parametrize("end", ["cancel", "deadline", "lost connection"])
async def test_a_caller_that_goes_away_frees_the_request(engine, end):
    async with running_server(SERVICE_NAMES, lambda server: add_services(engine, server)) as (
        _,
        channel,
    ):
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        call = prefill(stub, timeout=1 if end == "deadline" else 20)
        await admitted(engine)
        if end == "cancel":
            call.cancel()
        elif end == "lost connection":
            await channel.close()
        async with asyncio.timeout(10):
            await engine.until(lambda: engine.aborted == ["r"])
        assert not engine.live


async def test_a_failure_in_the_engine_keeps_its_status(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    error = InternalError("the engine failed on this request")
    engine.emit(
        RequestOutput(request_id="r", finish_reason=FinishReason.ERROR, is_last=True, error=error)
    )
    assert await status_of(call) == (grpc.StatusCode.INTERNAL, error.message)


async def test_a_refusal_keeps_its_status(stub, engine):
    engine.refusal = ResourceExhaustedError("the queue is full")
    expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert await status_of(prefill(stub)) == expected


async def test_a_foreign_namespace_is_refused_by_both_names(stub, engine):
    code, message = await status_of(prefill(stub, namespace=b"\xaa" * 32))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "aa" * 32 in message
    assert engine.namespace.hex() in message
    assert not engine.live


async def test_a_bad_field_is_named(stub):
    code, message = await status_of(prefill(stub, max_tokens=0))
    assert (code, "max_tokens" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_handoffs_are_released(stub, engine):
    await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id="h"), timeout=10)
    assert engine.released == ["h"]
