"""DecodeService.Connect over a scripted engine."""

import asyncio
import logging
import time
from dataclasses import replace

import grpc
import pytest

from baton.common.errors import DeadlineExceededError, ResourceExhaustedError
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, request_pb2
from decode_service.servicer import RouterSession
from engine.batch import TokenLogprobs
from engine.request import CandidateProgress, EngineOutput, FinishReason, Role
from kvstore.codec import DIGEST_SCHEME
from kvstore.handoff import KvHandoff, handoff_to_proto
from rpc.channels import MAX_MESSAGE_BYTES
from rpc.errors import from_worker_error
from tests.support.fake_engine import NAMESPACE, FakeEngine, finished, tokens
from tests.support.rpc_servers import running_server, spec_message
from worker.server import SERVICE_NAMES, add_services

SAVED = KvHandoff(
    handoff_id="h",
    namespace=NAMESPACE,
    block_keys=(b"k" * 32,),
    num_tokens=16,
    connector="memory",
    digest_scheme=DIGEST_SCHEME,
    lease_ms=5000,
)

pytestmark = pytest.mark.timeout(60)


def start(
    request_id, *, namespace=NAMESPACE, candidates=(), first_beams=(), handoff=None, **changes
):
    return decode_pb2.ConnectRequest(
        start=decode_pb2.StartDecode(
            spec=spec_message(request_id, **changes),
            namespace=namespace,
            candidates=candidates,
            first_beams=first_beams,
            handoff=handoff,
        )
    )


def cancel(request_id, index=None):
    return decode_pb2.ConnectRequest(
        cancel=decode_pb2.CancelDecode(request_id=request_id, index=index)
    )


def prefetch(**changes):
    blocks = handoff_to_proto(replace(SAVED, **changes))
    return decode_pb2.ConnectRequest(prefetch=decode_pb2.PrefetchKv(blocks=blocks))


def by_id(response):
    return {output.request_id: list(output.token_ids) for output in response.outputs}


def by_candidate(response):
    return {output.index: list(output.token_ids) for output in response.outputs}


@pytest.fixture
async def engine():
    return FakeEngine(Role.DECODE)


@pytest.fixture
async def served(engine):
    services = []

    def add(server):
        services.append(add_services(engine, server))
        return services[0]

    async with running_server(SERVICE_NAMES, add) as (_, channel):
        yield services[0], channel


@pytest.fixture
async def stub(served):
    return decode_pb2_grpc.DecodeServiceStub(served[1])


async def connect(stub, engine, *request_ids):
    """Opens a stream and starts these requests on it."""
    stream = stub.Connect()
    for request_id in request_ids:
        await stream.write(start(request_id))
    await engine.until(lambda: set(request_ids) <= set(engine.live))
    return stream


async def test_each_engine_step_is_sent_as_one_message(stub, engine):
    stream = await connect(stub, engine, "a", "b")
    for step in range(3):
        engine.emit(tokens("a", step), tokens("b", 10 + step))
        assert by_id(await stream.read()) == {"a": [step], "b": [10 + step]}
    engine.emit(finished("a", FinishReason.STOP, 2), tokens("b", 13))
    response = await stream.read()
    assert response.outputs[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert response.outputs[1].finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
    stream.cancel()


async def test_start_reaches_the_engine_whole(stub, engine):
    handoff = prefill_pb2.KvHandoff(
        format_version=1, handoff_id="h", block_keys=[b"k" * 32], num_tokens=3
    )
    stream = stub.Connect()
    before = time.monotonic()
    given = request_pb2.CandidateProgress(index=1, output_token_ids=[9, 8], logprob=-0.5)
    sampling = common_pb2.SamplingParams(seed=1, n=2)
    candidates = [request_pb2.CandidateProgress(output_token_ids=[7]), given]
    await stream.write(
        start("a", timeout_ms=5000, candidates=candidates, handoff=handoff, sampling=sampling)
    )
    await engine.until(lambda: "a" in engine.live)
    request = engine.live["a"]
    assert request.progress == (CandidateProgress(0, (7,)), CandidateProgress(1, (9, 8), -0.5))
    assert request.spec.params.n == 2
    assert request.handoff.handoff_id == "h"
    assert before + 5 <= request.spec.deadline <= time.monotonic() + 5
    stream.cancel()


async def test_beams_reach_the_engine(stub, engine):
    stream = stub.Connect()
    beam_search = common_pb2.BeamSearch(
        beam_width=2, early_stopping=common_pb2.EARLY_STOPPING_NEVER
    )
    sampling = common_pb2.SamplingParams(seed=1, beam_search=beam_search)
    first_beams = [request_pb2.FirstBeam(token_id=7, logprob=-0.5)]
    await stream.write(start("a", first_beams=first_beams, sampling=sampling))
    await engine.until(lambda: "a" in engine.live)
    request = engine.live["a"]
    assert request.first_beams == ((7, -0.5),)
    params = SamplingParams(seed=1, beam_width=2, early_stopping="never", max_tokens=8)
    assert request.spec.params == params
    stream.cancel()


async def test_each_candidate_has_its_own_outputs(stub, engine):
    stream = await connect(stub, engine, "a")
    engine.emit(tokens("a", 1), tokens("a", 2, index=1))
    engine.emit(finished("a", FinishReason.STOP, 3, is_last=False), tokens("a", 4, index=1))
    response = await stream.read()
    assert by_candidate(response) == {0: [1, 3], 1: [2, 4]}
    reasons = [(output.finish_reason, output.is_last) for output in response.outputs]
    assert reasons == [(common_pb2.FINISH_REASON_STOP, False), (0, False)]
    last = EngineOutput(
        request_id="a",
        index=1,
        finish_reason=FinishReason.LENGTH,
        is_last=True,
        score=-0.25,
    )
    engine.emit(last)
    (output,) = (await stream.read()).outputs
    assert (output.index, output.is_last, output.score) == (1, True, -0.25)
    stream.cancel()


async def test_cancelling_one_candidate_leaves_its_request_running(stub, engine):
    stream = await connect(stub, engine, "a", "b")
    await stream.write(cancel("a", 0))
    await stream.write(cancel("unknown", 1))
    await stream.write(cancel("b"))
    await engine.until(lambda: engine.aborted == ["b"])
    assert engine.finished_candidates == [("a", 0)]
    assert set(engine.live) == {"a"}
    stream.cancel()


async def test_the_output_that_ends_a_request_is_sent_after_its_other_candidates(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    commands.put_nowait(start("a"))
    await engine.until(lambda: "a" in engine.live)
    engine.emit(tokens("a", 1), tokens("a", 2, index=1))
    engine.emit(finished("a", FinishReason.LENGTH, 3, index=1, is_last=False))
    engine.emit(finished("a", FinishReason.LENGTH, 4))
    response = await reading
    assert [(output.index, output.is_last) for output in response.outputs] == [
        (1, False),
        (0, True),
    ]
    await responses.aclose()


async def test_two_steps_before_the_writer_runs_are_one_message(stub, engine):
    stream = await connect(stub, engine, "a", "b")
    engine.emit(tokens("a", 1))
    engine.emit(tokens("a", 2), tokens("b", 7))
    assert by_id(await stream.read()) == {"a": [1, 2], "b": [7]}
    stream.cancel()


async def test_a_router_that_does_not_read_gets_every_token_in_few_messages(stub, engine):
    stream = await connect(stub, engine, "a")
    num_steps, per_step = 3000, 200
    for step in range(num_steps):
        engine.emit(tokens("a", *range(step * per_step, (step + 1) * per_step)))
        await asyncio.sleep(0)
    engine.emit(finished("a"))
    received, num_messages = [], 0
    while True:
        response = await stream.read()
        num_messages += 1
        received += response.outputs[0].token_ids
        if response.outputs[0].finish_reason:
            break
    assert received == list(range(num_steps * per_step))
    assert num_messages < num_steps / 2
    stream.cancel()


async def test_cancel_ends_a_request_and_its_outputs(stub, engine):
    stream = await connect(stub, engine, "a", "b")
    await stream.write(cancel("a"))
    await engine.until(lambda: engine.aborted == ["a"])
    await stream.write(cancel("unknown"))
    engine.emit(tokens("b", 1))
    assert by_id(await stream.read()) == {"b": [1]}
    stream.cancel()


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (start("x", max_tokens=0), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens is 0"),
        (start("x", timeout_ms=0), grpc.StatusCode.INVALID_ARGUMENT, "timeout_ms is 0"),
        (
            start("x", namespace=b"?"),
            grpc.StatusCode.FAILED_PRECONDITION,
            "the request has 3f, this replica 000102030405",
        ),
        (
            start("x", handoff=prefill_pb2.KvHandoff(format_version=7)),
            grpc.StatusCode.FAILED_PRECONDITION,
            "format version",
        ),
        (start(""), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
    ],
    ids=["field", "timeout", "namespace", "handoff", "id"],
)
async def test_a_bad_start_fails_only_its_own_request(stub, engine, bad, code, words):
    stream = await connect(stub, engine, "good")
    await stream.write(bad)
    (output,) = (await stream.read()).outputs
    assert output.request_id == bad.start.spec.request_id
    assert output.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert output.error.code == code.value[0]
    assert words in output.error.message
    engine.emit(tokens("good", 1))
    assert by_id(await stream.read()) == {"good": [1]}
    stream.cancel()


async def test_the_engines_refusal_and_its_failures_are_typed(stub, engine):
    stream = await connect(stub, engine, "a")
    engine.refusal = ResourceExhaustedError("the queue is full")
    await stream.write(start("b"))
    (refused,) = (await stream.read()).outputs
    assert isinstance(from_worker_error(refused.error), ResourceExhaustedError)
    error = DeadlineExceededError("too late")
    engine.emit(
        EngineOutput(request_id="a", finish_reason=FinishReason.ERROR, is_last=True, error=error)
    )
    (failed,) = (await stream.read()).outputs
    assert isinstance(from_worker_error(failed.error), DeadlineExceededError)
    stream.cancel()


async def test_an_engine_bug_is_an_internal_error_without_details(stub, engine, caplog):
    stream = await connect(stub, engine, "a")
    engine.refusal = RuntimeError("password=hunter2")
    await stream.write(start("b"))
    (output,) = (await stream.read()).outputs
    assert output.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "hunter2" not in output.error.message
    assert "hunter2" in caplog.text
    stream.cancel()


async def test_blocks_are_prefetched_before_their_request_starts(stub, engine):
    stream = stub.Connect()
    await stream.write(prefetch())
    await stream.write(start("a"))
    await engine.until(lambda: "a" in engine.live)
    assert engine.prefetched == [SAVED]
    stream.cancel()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"namespace": b"?" * 32}, "the handoff 3f3f3f3f3f3f"),
        ({"connector": "redis"}, "this replica has memory, the handoff redis"),
        ({"digest_scheme": "crc"}, "the handoff crc"),
        ({"format_version": 7}, "the handoff 7"),
        ({"block_keys": (b"short",)}, "32 bytes each"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_prefetch_of_incompatible_blocks_is_dropped_with_a_debug_log(
    stub, engine, changes, words, caplog
):
    caplog.set_level(logging.DEBUG, logger="baton.decode")
    stream = await connect(stub, engine, "a")
    await stream.write(prefetch(**changes))
    await stream.write(prefetch())
    await engine.until(lambda: engine.prefetched)
    assert engine.prefetched == [SAVED]
    (record,) = [r for r in caplog.records if "prefetch dropped" in r.getMessage()]
    assert record.levelno == logging.DEBUG
    assert words in record.getMessage()
    engine.emit(tokens("a", 1))
    assert by_id(await stream.read()) == {"a": [1]}
    stream.cancel()


async def test_a_bug_in_prefetching_fails_no_request(stub, engine, caplog):
    stream = await connect(stub, engine, "a")
    engine.prefetch = None
    await stream.write(prefetch())
    await stream.write(start("b"))
    await engine.until(lambda: "b" in engine.live)
    assert "prefetch failed" in caplog.text
    stream.cancel()


async def test_a_duplicate_id_is_refused_and_ends_the_request_it_names(stub, engine):
    stream = await connect(stub, engine, "a", "b")
    await stream.write(start("a"))
    (output,) = (await stream.read()).outputs
    assert (output.request_id, output.error.code) == ("a", 6)
    assert engine.aborted == ["a"]
    engine.emit(tokens("b", 1))
    assert by_id(await stream.read()) == {"b": [1]}
    stream.cancel()


async def test_each_router_gets_only_the_outputs_of_its_own_requests(stub, engine):
    first = await connect(stub, engine, "a")
    second = await connect(stub, engine, "b")
    engine.emit(tokens("a", 1), tokens("b", 2))
    assert by_id(await first.read()) == {"a": [1]}
    assert by_id(await second.read()) == {"b": [2]}
    await second.write(start("a"))  # live on the first stream
    assert (await second.read()).outputs[0].error.code == 3
    assert set(engine.live) == {"a", "b"}
    for stream in (first, second):
        stream.cancel()


@pytest.mark.parametrize("end", ["cancel", "lost connection"])
async def test_a_broken_stream_aborts_only_its_own_requests(served, engine, end):
    _, channel = served
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    other = await connect(stub, engine, "other")
    if end == "cancel":
        (await connect(stub, engine, "a", "b")).cancel()
        await engine.until(lambda: set(engine.live) == {"other"})
        other.cancel()
    else:
        await channel.close()
    await engine.until(lambda: not engine.live)


async def test_a_malformed_command_ends_the_stream(served, engine):
    _, channel = served
    raw = channel.stream_stream("/baton.v1.DecodeService/Connect")()
    await raw.write(start("a").SerializeToString())
    await engine.until(lambda: "a" in engine.live)
    await raw.write(b"\x0a\x7f")
    assert await raw.code() is grpc.StatusCode.INVALID_ARGUMENT
    await engine.until(lambda: engine.aborted == ["a"])


async def test_an_unset_command_ends_the_stream(stub, engine):
    stream = await connect(stub, engine, "a")
    await stream.write(decode_pb2.ConnectRequest())
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT
    await engine.until(lambda: engine.aborted == ["a"])


async def test_a_router_that_half_closed_gets_the_remaining_outputs(stub, engine):
    stream = await connect(stub, engine, "a")
    await stream.done_writing()
    engine.emit(tokens("a", 1))
    assert by_id(await stream.read()) == {"a": [1]}
    engine.emit(finished("a"))
    assert (await stream.read()).outputs[0].finish_reason
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_draining_refuses_new_requests_and_finishes_the_running(served, stub, engine):
    tier, _ = served
    stream = await connect(stub, engine, "a")
    draining = asyncio.create_task(tier.drain(30))
    await engine.until(lambda: engine.is_draining)
    await stream.write(start("b"))
    (refused,) = (await stream.read()).outputs
    assert refused.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
    engine.emit(tokens("a", 1))
    assert by_id(await stream.read()) == {"a": [1]}
    engine.emit(finished("a"))
    assert (await stream.read()).outputs[0].finish_reason
    assert await stream.read() is grpc.aio.EOF
    await draining


# The tests below use a session without a server, and decide when its writer runs.


async def test_a_new_request_never_gets_outputs_of_a_cancelled_one_with_its_id(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    commands.put_nowait(start("a"))
    await engine.until(lambda: "a" in engine.live)
    under_way = engine.handlers["a"]
    commands.put_nowait(cancel("a"))
    commands.put_nowait(start("a"))
    await engine.until(lambda: engine.aborted == ["a"] and "a" in engine.live)
    under_way(tokens("a", 99))
    engine.emit(tokens("a", 2))
    assert by_id(await reading) == {"a": [2]}
    await responses.aclose()
    assert not engine.live


async def test_a_cancel_drops_outputs_that_were_not_sent(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    for request_id in ("a", "b"):
        commands.put_nowait(start(request_id))
    await engine.until(lambda: len(engine.live) == 2)
    engine.emit(tokens("b", 1))
    await reading  # nothing reads from the writer again until below
    engine.emit(tokens("a", 2), tokens("b", 3))
    commands.put_nowait(cancel("a"))
    await engine.until(lambda: engine.aborted == ["a"])
    assert by_id(await anext(responses)) == {"b": [3]}
    await responses.aclose()


async def test_an_id_stays_in_use_until_its_end_is_sent(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    commands.put_nowait(start("a"))
    await engine.until(lambda: "a" in engine.live)
    engine.emit(tokens("a", 1))
    await reading  # nothing reads from the writer again until below
    engine.emit(finished("a", FinishReason.STOP, 2))
    commands.put_nowait(start("a"))
    while not commands.empty():  # noqa: ASYNC110 - the reader has no event to wait for
        await asyncio.sleep(0)
    (output,) = (await anext(responses)).outputs
    assert output.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert not engine.live
    await responses.aclose()


async def moved_unsent(engine, commands, responses):
    """Lets request "a" move; its handoff waits, since nothing reads from the writer."""
    reading = asyncio.create_task(anext(responses))
    for request_id in ("a", "b"):
        commands.put_nowait(start(request_id))
    await engine.until(lambda: len(engine.live) == 2)
    engine.emit(tokens("b", 1))
    await reading
    reason = FinishReason.HANDOFF
    engine.emit(EngineOutput("a", finish_reason=reason, is_last=True, handoff=SAVED))


async def test_a_moved_request_that_is_cancelled_before_its_handoff_is_sent_keeps_no_lease(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    await moved_unsent(engine, commands, responses)
    commands.put_nowait(cancel("a"))
    await engine.until(lambda: engine.released == [SAVED.handoff_id])
    engine.emit(tokens("b", 2))
    assert not (await anext(responses)).moved
    await responses.aclose()
    assert engine.released == [SAVED.handoff_id]


async def test_a_router_that_leaves_before_a_handoff_is_sent_keeps_no_lease(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    await moved_unsent(engine, commands, responses)
    await responses.aclose()
    assert engine.released == [SAVED.handoff_id]


async def test_an_id_stays_in_use_until_its_handoff_is_sent(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    await moved_unsent(engine, commands, responses)
    commands.put_nowait(start("a"))
    await engine.until(lambda: engine.released == [SAVED.handoff_id])
    (output,) = (await anext(responses)).outputs
    assert output.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert set(engine.live) == {"b"}
    await responses.aclose()


async def test_commands_wait_while_a_router_does_not_read(engine):
    """Unread ends of requests hold commands back, so that pending outputs stay bounded."""
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    num_refused, received, largest = 5000, 0, 0
    for index in range(num_refused):
        commands.put_nowait(start(f"bad {index}", max_tokens=0))
    while received < num_refused:
        num_outputs = len((await anext(responses)).outputs)
        largest = max(largest, num_outputs)
        received += num_outputs
    assert largest <= 1024
    await responses.aclose()


async def test_outputs_too_large_for_one_message_are_sent_in_several(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    request_ids = [f"r{index}" for index in range(8)]
    for request_id in request_ids:
        commands.put_nowait(start(request_id))
    await engine.until(lambda: len(engine.live) == 8)
    long = [10**9] * 400_000  # five bytes each
    engine.emit(*(tokens(request_id, *long) for request_id in request_ids))
    received = [await reading, await anext(responses), await anext(responses)]
    assert all(response.ByteSize() < MAX_MESSAGE_BYTES for response in received)
    assert [output.request_id for r in received for output in r.outputs] == request_ids
    await responses.aclose()


async def iterate(queue):
    while True:
        yield await queue.get()


async def test_log_probabilities_count_towards_the_size_of_a_message(engine):
    commands = asyncio.Queue()
    responses = RouterSession(engine).responses(iterate(commands))
    reading = asyncio.create_task(anext(responses))
    request_ids = [f"r{index}" for index in range(4)]
    for request_id in request_ids:
        commands.put_nowait(start(request_id))
    await engine.until(lambda: len(engine.live) == 4)
    token = TokenLogprobs(-1.0, 2**31, (2**31,) * 20, (-1.0,) * 20)
    details = (token,) * 30_000
    engine.emit(*(EngineOutput(name, prompt_logprobs=details) for name in request_ids))
    received = [await reading, *[await anext(responses) for _ in request_ids[1:]]]
    assert all(response.ByteSize() < MAX_MESSAGE_BYTES for response in received)
    assert [output.request_id for r in received for output in r.outputs] == request_ids
    await responses.aclose()
