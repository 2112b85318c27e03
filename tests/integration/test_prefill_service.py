"""PrefillService over a scripted engine."""

import asyncio
import time
from dataclasses import replace

import grpc
import pytest

from baton.common.errors import InternalError, ResourceExhaustedError
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from engine.request import EngineOutput, FinishReason, Role, StageTimings
from kvstore.handoff import KvHandoff
from prefill_service.servicer import PrefillServicer
from tests.support.fake_engine import FakeEngine, finished
from tests.support.rpc_servers import prefill_request, running_server
from worker.server import SERVICE_NAMES, add_services

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
    return FakeEngine(Role.PREFILL)


@pytest.fixture
async def stub(engine):
    async with running_server(SERVICE_NAMES, lambda server: add_services(engine, server)) as (
        _,
        channel,
    ):
        yield prefill_pb2_grpc.PrefillServiceStub(channel)


def prefill(stub, request_id="r", timeout=20, **changes):
    return stub.Prefill(prefill_request(request_id, **changes), timeout=timeout)


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details()


async def admitted(engine, request_id="r"):
    async with asyncio.timeout(10):
        await engine.until(lambda: request_id in engine.live)
    return engine.live[request_id]


def drawn(*token_ids, **fields):
    return EngineOutput(request_id="r", token_ids=token_ids, **fields)


def handed_over(handoff=HANDOFF):
    return EngineOutput(
        request_id="r",
        finish_reason=FinishReason.HANDOFF,
        is_last=True,
        timings=StageTimings(queue_ms=1.0, prefill_ms=2.0, transfer_ms=3.0),
        handoff=handoff,
    )


async def test_the_first_token_does_not_wait_for_the_transfer(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    engine.emit(EngineOutput(request_id="r", saved=replace(HANDOFF, handoff_id="part")))
    assert (await call.read()).saved.handoff_id == "part"
    engine.emit(drawn(42, cached_tokens=2, timings=StageTimings(queue_ms=1.0, prefill_ms=2.0)))
    result = (await call.read()).result
    (output,) = result.outputs
    assert (list(output.token_ids), output.is_last) == ([42], False)
    assert (output.cached_tokens, output.timings.prefill_ms) == (2, 2.0)
    engine.emit(handed_over())
    end = (await call.read()).end
    assert end.handoff.block_keys == [b"k" * 32]
    assert (end.output.timings.queue_ms, end.output.timings.transfer_ms) == (1.0, 3.0)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert not engine.aborted
    assert not engine.released


async def test_ranked_first_tokens_have_log_probabilities(stub, engine):
    sampling = common_pb2.SamplingParams(seed=1, best_of=2)
    call = prefill(stub, sampling=sampling)
    assert (await admitted(engine)).spec.params.num_candidates == 2
    engine.emit(drawn(42, 43, first_logprobs=(-0.5, -1.5)))
    result = (await call.read()).result
    begun = [(list(c.output_token_ids), c.logprob) for c in result.candidates]
    assert begun == [([42], -0.5), ([43], -1.5)]
    (output,) = result.outputs
    assert not output.token_ids
    call.cancel()


async def test_a_finished_generation_is_reported_and_ends_the_stream(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    engine.emit(finished("r", FinishReason.STOP, 2))
    result = (await call.read()).result
    (candidate,) = result.outputs
    assert (list(candidate.token_ids), candidate.is_last) == ([2], True)
    assert candidate.finish_reason == common_pb2.FINISH_REASON_STOP
    assert await call.read() is grpc.aio.EOF


async def test_a_router_that_does_not_read_gets_every_key_in_few_events(stub, engine):
    """Keys saved in the meantime are merged into one event, so that events do not accumulate."""
    call = prefill(stub)
    await admitted(engine)
    keys = [index.to_bytes(32) for index in range(4000)]
    for index in range(0, 4000, 2):
        part = replace(HANDOFF, block_keys=tuple(keys[index : index + 2]))
        engine.emit(EngineOutput(request_id="r", saved=part))
        await asyncio.sleep(0)
    engine.emit(drawn(42))
    received, num_events = [], 0
    while True:
        message = await call.read()
        if message.HasField("result"):
            break
        received += message.saved.block_keys
        num_events += 1
    engine.emit(EngineOutput(request_id="r", saved=replace(HANDOFF, block_keys=())))
    received += (await call.read()).saved.block_keys
    assert received == keys
    assert num_events < 1000
    call.cancel()


async def test_the_engine_gets_the_callers_deadline(stub, engine):
    before = time.monotonic()
    call = prefill(stub, timeout_ms=20_000)
    request = await admitted(engine)
    assert before + 20 <= request.spec.deadline <= time.monotonic() + 20
    call.cancel()


@pytest.mark.parametrize("has_first_token", [False, True])
@pytest.mark.parametrize("end", ["cancel", "deadline", "lost connection"])
async def test_a_request_is_aborted_when_its_caller_leaves(engine, end, has_first_token):
    async with running_server(SERVICE_NAMES, lambda server: add_services(engine, server)) as (
        _,
        channel,
    ):
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        call = prefill(stub, timeout=1 if end == "deadline" else 20)
        await admitted(engine)
        if has_first_token:
            engine.emit(drawn(42))
            await call.read()
        if end == "cancel":
            call.cancel()
        elif end == "lost connection":
            await channel.close()
        async with asyncio.timeout(10):
            await engine.until(lambda: engine.aborted == ["r"])
        assert not engine.live


async def test_a_handoff_that_was_never_sent_is_released(engine):
    servicer = PrefillServicer(engine)
    messages = servicer.Prefill(prefill_request("r"), None)
    reading = asyncio.ensure_future(anext(messages))
    await admitted(engine)
    engine.emit(drawn(42), handed_over())
    assert (await reading).HasField("result")
    await messages.aclose()  # as when the router has left
    assert engine.released == ["h"]
    assert not engine.aborted


async def test_a_handoff_whose_end_was_sent_is_released_by_the_id_of_its_request(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    engine.emit(drawn(42), handed_over())
    while (message := await call.read()) is not grpc.aio.EOF:
        last = message
    assert last.end.handoff.handoff_id == "h"
    for _ in range(2):
        await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(request_id="r"), timeout=20)
    assert engine.released == ["h"]


async def test_ids_of_handoffs_that_were_sent_are_forgotten(engine):
    servicer = PrefillServicer(engine)
    for number in range(3000):
        servicer._note_sent(f"r{number}", "h")
    assert len(servicer._sent) == 1024


async def test_a_failure_in_the_engine_keeps_its_status(stub, engine):
    call = prefill(stub)
    await admitted(engine)
    error = InternalError("the engine failed on this request")
    engine.emit(
        EngineOutput(request_id="r", finish_reason=FinishReason.ERROR, is_last=True, error=error)
    )
    assert await status_of(call) == (grpc.StatusCode.INTERNAL, error.message)


async def test_a_refusal_keeps_its_status(stub, engine):
    engine.refusal = ResourceExhaustedError("the queue is full")
    expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
    assert await status_of(prefill(stub)) == expected


async def test_another_namespace_is_refused_with_both_names(stub, engine):
    code, message = await status_of(prefill(stub, namespace=b"\xaa" * 32))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    ours = engine.namespace.hex()[:12]
    assert f"the request has {'aa' * 6}, this replica {ours}" in message
    assert not engine.live


async def test_a_bad_field_is_named(stub):
    code, message = await status_of(prefill(stub, max_tokens=0))
    assert (code, "max_tokens" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_handoffs_are_released(stub, engine):
    await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id="h"), timeout=10)
    assert engine.released == ["h"]
