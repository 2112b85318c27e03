"""Replicas that die, refuse or hang, and clients that leave: always tokens or a typed error."""

import asyncio
import time

import grpc
import pytest

from baton.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from baton.common.request.request_spec import client_id_of
from baton.v1 import common_pb2, generation_pb2_grpc, prefill_pb2, request_pb2
from tests.support.fake_candidates import given_tokens
from tests.support.fake_workers import FakeDecode, FakePrefill, first_of, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    failed_call,
    request,
    running_router,
    token_ids_of,
)
from tests.support.thread_time import ThreadTime

SCRIPT = [50 + i % 200 for i in range(400)]


# Decode replicas that are lost.


@pytest.mark.parametrize("has_prefill", [True, False])
async def test_a_request_resumes_where_a_lost_decode_replica_left_off(has_prefill):
    first, second = FakeDecode(SCRIPT, pause_after=7), FakeDecode(SCRIPT, pause_after=7)
    prefills = [FakePrefill(SCRIPT)] if has_prefill else []
    workers = (*prefills, first, second)
    async with running_workers(*workers), running_router(*workers) as router:
        message = request(request_id="r", max_tokens=20)
        message.sampling.temperature = 1.0
        call = router.stub.GenerateStream(message, timeout=30)
        responses = []
        async for response in call:
            responses.append(response)
            if len(token_ids_of(responses)) == 7:
                dying = first if first.starts else second
                survivor = second if first.starts else first
                survivor.resume()
                await dying.stop()
    assert token_ids_of(responses) == SCRIPT[:20]
    assert responses[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert responses[-1].usage.completion_tokens == 20
    (begun,), (resumed,) = dying.starts, survivor.starts
    assert given_tokens(resumed) == {0: SCRIPT[:7]}
    assert resumed.spec.sampling == begun.spec.sampling
    assert resumed.spec.stopping.max_tokens == 20
    assert resumed.spec.request_id == f"{begun.spec.request_id}/1"
    assert client_id_of(resumed.spec.request_id) == "r"
    # The handoff was released after the first tokens, and its partial tail with it.
    assert not resumed.HasField("handoff")


async def test_the_handoff_is_sent_to_another_replica_if_decode_dies_before_loading_it():
    prefill = FakePrefill(SCRIPT)
    decodes = FakeDecode(SCRIPT, pause_after=0), FakeDecode(SCRIPT, pause_after=0)
    workers = (prefill, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=5)))
        dying = await first_of(decodes, lambda decode: decode.starts)
        survivor = other_of(decodes, dying)
        survivor.resume()
        await dying.stop()
        responses = await task
        await prefill.changes.until(lambda: prefill.released)
    assert token_ids_of(responses) == SCRIPT[:5]
    assert survivor.starts[0].handoff == dying.starts[0].handoff
    assert given_tokens(survivor.starts[0]) == {0: SCRIPT[:1]}
    assert len(prefill.released) == 1


class EndsACandidateFirst(FakeDecode):
    """Reports, before it loads KV, that a candidate's first token has ended it."""

    async def _generate(self, start, outputs):
        end = request_pb2.CandidateOutput(
            request_id=start.spec.request_id,
            index=1,
            finish_reason=common_pb2.FINISH_REASON_STOP,
        )
        outputs.put_nowait([end])
        await super()._generate(start, outputs)


async def test_the_handoff_is_kept_when_a_candidate_ends_before_the_kv_is_loaded():
    prefill = FakePrefill(SCRIPT)
    decodes = [EndsACandidateFirst(SCRIPT, pause_after=0) for _ in range(2)]
    workers = (prefill, *decodes)
    async with running_workers(*workers), running_router(*workers) as router:
        message = request(max_tokens=5)
        message.sampling.temperature, message.sampling.n = 1.0, 2
        call = router.stub.GenerateStream(message, timeout=30)
        async for response in call:
            if response.index == 1 and response.finish_reason:
                break
        assert not prefill.released
        dying = await first_of(decodes, lambda decode: decode.starts)
        survivor = other_of(decodes, dying)
        await dying.stop()
        await survivor.changes.until(lambda: survivor.starts)
        assert survivor.starts[0].handoff == dying.starts[0].handoff
        survivor.resume()
        await prefill.changes.until(lambda: prefill.released)
        call.cancel()


async def test_a_request_resumes_on_a_replica_that_restarts_at_the_same_address():
    old = FakeDecode(SCRIPT, pause_after=5)
    async with running_workers(old), running_router(old) as router:
        stream = aiter(router.stub.GenerateStream(request(max_tokens=12), timeout=30))
        responses = []
        while len(token_ids_of(responses)) < 5:
            responses.append(await anext(stream))
        await old.stop()
        new = await FakeDecode(SCRIPT).start(old.port)
        responses += [response async for response in stream]
        await new.stop()
    assert token_ids_of(responses) == SCRIPT[:12]
    assert given_tokens(new.starts[0]) == {0: SCRIPT[:5]}


async def test_a_stream_that_the_worker_cancels_is_opened_again():
    decode = FakeDecode(SCRIPT, pause_after=3)
    async with running_workers(decode), running_router(decode) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await decode.changes.until(lambda: decode.num_sent == 3)
        decode.cancel_stream()
        decode.resume()
        assert token_ids_of(await task) == SCRIPT[:6]
    assert decode.num_connects == 2


async def test_requests_fail_in_time_when_the_last_decode_replica_is_lost():
    decode = FakeDecode(SCRIPT, pause_after=5)
    timeouts = {"resume_timeout_s": 0.2, "queue_timeout_s": 0}
    async with running_workers(decode), running_router(decode, **timeouts) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=12)))
        await decode.changes.until(lambda: decode.num_sent == 5)
        await decode.stop()
        error = await failed_call(task)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "no other continued it within" in error.details()
        # New requests do not wait: --queue-timeout-s is 0.
        error = await failed_call(router.generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_requests_of_a_stopped_engine_continue_on_another_replica():
    decodes = [FakeDecode(SCRIPT, pause_after=7) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        tasks = [
            asyncio.create_task(router.generate(request((*PROMPT_IDS, i), max_tokens=20)))
            for i in range(6)
        ]
        dying = await first_of(decodes, lambda decode: decode.num_sent)
        survivor = other_of(decodes, dying)
        survivor.resume()
        dying.fail_running(UnavailableError("the engine of this replica has stopped"))
        for responses in await asyncio.gather(*tasks):
            assert token_ids_of(responses) == SCRIPT[:20]


async def test_tokens_sent_with_an_error_are_neither_lost_nor_repeated():
    """A lagging router gets a request's last tokens and its end as one output."""
    decodes = [FakeDecode(SCRIPT, pause_after=5) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=12)))
        dying = await first_of(decodes, lambda decode: decode.num_sent == 5)
        survivor = other_of(decodes, dying)
        survivor.resume()
        dying.fail_running(UnavailableError("has stopped"), token_ids=SCRIPT[5:8])
        assert token_ids_of(await task) == SCRIPT[:12]
    assert given_tokens(survivor.starts[0]) == {0: SCRIPT[:8]}


@pytest.mark.parametrize(
    "refusal",
    [
        UnavailableError("drains"),
        ResourceExhaustedError("queue full"),
        FailedPreconditionError("this worker does not know field 8 of spec.sampling"),
    ],
    ids=lambda error: error.code,
)
async def test_a_stream_refused_after_its_first_token_waits_for_another_replica(refusal):
    prefill, refusing = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    late = FakeDecode(SCRIPT)
    async with running_workers(prefill, refusing, late):
        await late.stop()
        addresses = (refusing.address, late.address)
        async with running_router(prefill, refusing, decode=addresses) as router:
            refusing.refusal = refusal
            task = asyncio.create_task(router.generate(request(max_tokens=6)))
            await refusing.changes.until(lambda: refusing.starts)
            await late.start()
            responses = await task
    assert token_ids_of(responses) == SCRIPT[:6]
    assert given_tokens(late.starts[0]) == {0: SCRIPT[:1]}
    # A full replica may be asked again after its next report, if the other one takes that long.
    assert len(refusing.starts) == 1 or isinstance(refusal, ResourceExhaustedError)


async def test_a_replica_whose_role_has_changed_back_is_asked_again():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    decode.refusal = UnavailableError("of another role", reason=Reason.NO_REPLICA_READY)
    workers = (prefill, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await decode.changes.until(lambda: decode.starts)
        decode.refusal = None
        assert token_ids_of(await task) == SCRIPT[:6]
    assert given_tokens(decode.starts[-1]) == {0: SCRIPT[:1]}


async def test_a_stream_that_no_replica_accepts_in_time_is_unavailable():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    decode.refusal = UnavailableError("this replica takes no new requests")
    workers = (prefill, decode)
    async with running_workers(*workers), running_router(*workers, resume_timeout_s=0.1) as router:
        error = await failed_call(router.generate(request(max_tokens=6)))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "no other continued it within" in error.details()


async def test_a_stream_that_only_older_replicas_could_continue_names_what_to_update():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    decode.refusal = FailedPreconditionError("this worker does not know field 8: update it")
    workers = (prefill, decode)
    async with running_workers(*workers), running_router(*workers, resume_timeout_s=0.1) as router:
        error = await failed_call(router.generate(request(max_tokens=6)))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "update it" in error.details()


async def test_a_request_is_aborted_when_several_engines_stop_under_it():
    decodes = [FakeDecode(SCRIPT, pause_after=0) for _ in range(5)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=12)))
        for num_tokens in range(1, 5):
            for decode in decodes:
                decode.resume(num_tokens)
            victim = await first_of(decodes, lambda decode: decode.running and decode.num_sent)
            victim.fail_running(UnavailableError("has stopped"))
        error = await failed_call(task)
    assert error.code() is grpc.StatusCode.ABORTED


async def test_a_failed_request_is_retried_once_on_another_replica():
    decodes = [FakeDecode(SCRIPT, pause_after=3) for _ in range(3)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        failing = await first_of(decodes, lambda decode: decode.num_sent == 3)
        others = [decode for decode in decodes if decode is not failing]
        for other in others:
            other.resume()
        failing.fail_running(InternalError("the engine failed on this request"))
        assert token_ids_of(await task) == SCRIPT[:6]
        for other in others:
            other.refusal = InternalError("the engine failed on this request")
        error = await failed_call(router.generate(request([9] * 40)))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert sum(len(decode.starts) for decode in decodes) == 4


async def test_a_request_that_loses_several_replicas_is_aborted():
    decodes = [FakeDecode(SCRIPT, pause_after=1) for _ in range(4)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=12)))
        for _ in decodes:
            victim = await first_of(decodes, lambda decode: decode.running)
            await victim.stop()
        error = await failed_call(task)
    assert error.code() is grpc.StatusCode.ABORTED


@pytest.mark.alone
async def test_requests_of_a_frozen_replica_resume_on_another_within_two_seconds():
    decodes = [FakeDecode(SCRIPT, pause_after=3) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        frozen = await first_of(decodes, lambda decode: decode.num_sent == 3)
        other_of(decodes, frozen).resume()
        frozen.is_frozen = True
        work, frozen_at = ThreadTime(), time.monotonic()
        assert token_ids_of(await task) == SCRIPT[:6]
        assert time.monotonic() - frozen_at - work.busy_s() < 2
        assert router.candidate_ids() == {other_of(decodes, frozen).info.worker_id}


async def test_requests_of_a_replica_whose_step_hangs_resume_on_another_until_it_ends():
    decodes = [FakeDecode(SCRIPT, pause_after=3) for _ in range(2)]
    async with running_workers(*decodes), running_router(*decodes) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        stuck = await first_of(decodes, lambda decode: decode.num_sent == 3)
        other_of(decodes, stuck).resume()
        stuck.current_load.stalled = True
        assert token_ids_of(await task) == SCRIPT[:6]
        assert router.candidate_ids() == {other_of(decodes, stuck).info.worker_id}
        stuck.current_load.stalled = False
        await router.until_connected(stuck)


@pytest.mark.parametrize("tier", [FakePrefill, FakeDecode])
async def test_a_request_that_hangs_two_replicas_ends_before_it_hangs_the_others(tier):
    hold = {"hold": True} if tier is FakePrefill else {"pause_after": 0}
    stuck = [tier(SCRIPT, **hold) for _ in range(3)]
    others = [FakeDecode(SCRIPT)] if tier is FakePrefill else []
    async with running_workers(*stuck, *others), running_router(*stuck, *others) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        left = list(stuck)
        for _ in range(2):
            busy = await first_of(left, lambda each: getattr(each, "requests", each.running))
            busy.current_load.stalled = True
            left.remove(busy)
        error = await failed_call(task)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert not any(getattr(each, "requests", each.running) for each in left)


async def test_a_drained_replica_that_reports_no_more_may_still_send_its_last_outputs():
    draining = FakeDecode(SCRIPT, pause_after=3)
    async with running_workers(draining), running_router(draining) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await draining.changes.until(lambda: draining.num_sent == 3)
        draining.stop_reports()
        await router.until(lambda: not router.candidate_ids())
        await draining.changes.until(lambda: draining.num_loads > 8)  # longer than a silence
        draining.resume()
        assert token_ids_of(await task) == SCRIPT[:6]
    assert len(draining.starts) == 1


# Prefill replicas that are lost.


async def test_another_prefill_replica_computes_the_prompt_when_one_dies():
    prefills = FakePrefill(SCRIPT, hold=True), FakePrefill(SCRIPT, hold=True)
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        dying = await first_of(prefills, lambda prefill: prefill.requests)
        survivor = other_of(prefills, dying)
        await dying.stop()
        await survivor.changes.until(lambda: survivor.requests)
        survivor.answer()
        responses = await task
    assert token_ids_of(responses) == SCRIPT[:6]
    assert decode.starts[0].HasField("handoff")


async def test_another_prefill_replica_computes_the_prompt_when_one_freezes():
    prefills = [FakePrefill(SCRIPT, hold=True) for _ in range(2)]
    decode = FakeDecode(SCRIPT)
    async with running_workers(*prefills, decode), running_router(*prefills, decode) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        frozen = await first_of(prefills, lambda prefill: prefill.requests)
        other_of(prefills, frozen).answer()
        frozen.is_frozen = True
        assert token_ids_of(await task) == SCRIPT[:6]
        await frozen.changes.until(lambda: frozen.num_cancelled)


@pytest.mark.parametrize(
    "refusal",
    [
        UnavailableError("drains"),
        ResourceExhaustedError("queue full"),
        FailedPreconditionError("namespace"),
        InternalError("bug"),
        DeadlineExceededError("the call's request did not come in 30 s"),  # the client has time
    ],
    ids=lambda error: error.code,
)
async def test_decode_computes_the_prompt_when_no_prefill_replica_can(refusal):
    prefills = [FakePrefill(SCRIPT) for _ in range(2)]
    decode = FakeDecode(SCRIPT)
    workers = (*prefills, decode)
    async with running_workers(*workers), running_router(*workers) as router:
        for prefill in prefills:
            prefill.refusal = refusal
        responses = await router.generate(request(max_tokens=6))
    assert token_ids_of(responses) == SCRIPT[:6]
    assert not given_tokens(decode.starts[0])
    assert [len(prefill.requests) for prefill in prefills] == [1, 1]


@pytest.mark.parametrize(
    ("has_handoff", "transfer_ms", "skips"),
    [(True, 2000, False), (False, 2000, True), (False, 3, False)],
)
async def test_decode_does_not_wait_again_for_a_store_that_has_not_answered_prefill(
    has_handoff, transfer_ms, skips
):
    """A store that refuses is asked again: it may have what other requests have saved."""
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    prefill.has_handoff, prefill.transfer_ms = has_handoff, transfer_ms
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        assert token_ids_of(await router.generate(request(max_tokens=4))) == SCRIPT[:4]
    (start,) = decode.starts
    assert start.skip_lookup == skips


async def test_prefills_error_about_the_request_itself_reaches_the_client():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    prefill.refusal = InvalidArgumentError("top_p is 7; it must be in (0, 1]")
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        error = await failed_call(router.generate(request()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "top_p is 7; it must be in (0, 1]"
    assert not decode.starts


async def test_decode_computes_a_prompt_too_large_for_prefill_pools():
    prefill, decode = FakePrefill(SCRIPT, num_blocks=5), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(request(max_tokens=6))
    assert token_ids_of(responses) == SCRIPT[:6]
    assert not prefill.requests


# Replicas that refuse.


async def test_a_refusing_decode_replica_is_skipped():
    decodes = [FakeDecode(SCRIPT) for _ in range(2)]
    decodes[0].refusal = UnavailableError("drains")
    async with running_workers(*decodes):
        async with running_router(*decodes) as router:
            responses = await router.generate(request(max_tokens=6))
        assert token_ids_of(responses) == SCRIPT[:6]
        decodes[1].refusal = ResourceExhaustedError("queue full")
        async with running_router(*decodes, queue_timeout_s=0.2) as router:
            error = await failed_call(router.generate(request(max_tokens=6)))
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_the_failure_of_a_request_on_decode_reaches_its_client():
    decode = FakeDecode(SCRIPT)
    decode.refusal = InternalError("not a number")
    async with running_workers(decode), running_router(decode) as router:
        error = await failed_call(router.generate(request()))
    assert error.code() is grpc.StatusCode.INTERNAL


async def test_a_draining_replica_gets_no_new_requests_and_finishes_its_own():
    draining = FakeDecode(SCRIPT, pause_after=3)
    async with running_workers(draining), running_router(draining, queue_timeout_s=0.2) as router:
        task = asyncio.create_task(router.generate(request(max_tokens=6)))
        await draining.changes.until(lambda: draining.num_sent == 3)
        draining.current_load.draining = True
        await router.until(lambda: not router.candidate_ids())
        error = await failed_call(router.generate(request()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        draining.resume()
        assert token_ids_of(await task) == SCRIPT[:6]
    assert len(draining.starts) == 1


async def test_a_result_without_outputs_counts_as_the_replicas_failure(caplog):
    class EmptyPrefill(FakePrefill):
        def _result(self, request):
            return prefill_pb2.PrefillResult()

    prefill, decode = EmptyPrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        responses = await router.generate(request(max_tokens=5))
    assert token_ids_of(responses) == SCRIPT[:5]
    assert "a result without outputs" in caplog.text


# Clients that leave, and deadlines.


async def test_client_cancel_reaches_decode():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT, pause_after=5)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.GenerateStream(request(request_id="c"))
        await call.read()
        await decode.changes.until(lambda: decode.num_sent)
        call.cancel()
        await decode.changes.until(lambda: decode.cancels)
    assert decode.cancels == [decode.starts[0].spec.request_id]
    assert not decode.finished_candidates


async def test_client_cancel_reaches_prefill():
    """The handoff is released too, although the router does not know of one yet."""
    prefill, decode = FakePrefill(SCRIPT, hold=True), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        call = router.stub.Generate(request())
        await prefill.changes.until(lambda: prefill.requests)
        call.cancel()
        await prefill.changes.until(lambda: prefill.num_cancelled and prefill.released)
        (spec,) = prefill.requests
        assert prefill.released == [f"handoff-{spec.request_id}"]
        (replica,) = router.fleet.prefill.candidates
        assert replica.candidate().num_requests == replica.candidate().num_queued_tokens == 0
    assert not decode.starts


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_requests_without_a_deadline_get_the_default_one(stage):
    prefill = FakePrefill(SCRIPT, hold=stage == "prefill")
    decode = FakeDecode(SCRIPT, pause_after=5)
    workers = (prefill, decode)
    async with running_workers(*workers), running_router(*workers, default_timeout_s=1.0) as router:
        error = await failed_call(router.generate(request(), timeout_s=None))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if stage == "prefill":
            await prefill.changes.until(lambda: prefill.num_cancelled)
        else:
            await decode.changes.until(lambda: decode.cancels)
            assert decode.starts[0].spec.timeout_ms <= 1000


async def test_client_deadline_frees_every_tier():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT, pause_after=5)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        error = await failed_call(router.generate(request(), timeout_s=1.0))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await decode.changes.until(lambda: decode.cancels)
        await prefill.changes.until(lambda: prefill.released)


async def test_a_call_whose_client_never_reads_ends_at_the_deadline():
    script = [50] * 4000
    decode = FakeDecode(script)
    async with running_workers(decode), running_router(decode, default_timeout_s=1.0) as router:
        options = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(router.server.address, options) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            message = request(request_id="r" * 128, max_tokens=len(script))
            call = stub.GenerateStream(message)
            await call.read()
            # The id is free again once the request has ended.
            async with asyncio.timeout(20):
                while not await is_accepted(router, message):
                    pass
            error = await failed_call(read_to_end(call))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def is_accepted(router, message) -> bool:
    call = router.stub.GenerateStream(message)
    try:
        await call.read()
    except grpc.aio.AioRpcError:
        return "unique among running requests" not in await call.details()
    return True


async def read_to_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


# Many failures at once.


async def test_streams_survive_workers_that_keep_restarting():
    """Sixty streams run while workers of both tiers die and restart at their addresses."""
    prefills = [FakePrefill(SCRIPT) for _ in range(2)]
    decodes = [FakeDecode(SCRIPT, pause_after=20) for _ in range(3)]
    async with running_workers(*prefills, *decodes) as stack:
        router = await stack.enter_async_context(running_router(*prefills, *decodes))
        streams = [
            asyncio.create_task(router.generate(request((*PROMPT_IDS, i), max_tokens=150)))
            for i in range(60)
        ]
        for pause_after in (40, 60, None):
            victim = await first_of(decodes, lambda decode: decode.running)
            decodes[decodes.index(victim)] = await restarted(victim, stack)
            prefills[0] = await restarted(prefills[0], stack)
            await router.until_connected(*decodes)
            for decode in decodes:
                decode.resume(pause_after)
        for responses in await asyncio.gather(*streams):
            assert token_ids_of(responses) == SCRIPT[:150]


async def restarted(worker, stack):
    """Replaces a worker at its address; a new decode worker pauses where the old one did."""
    await worker.stop()
    successor = type(worker)(SCRIPT)
    if isinstance(worker, FakeDecode):
        successor.resume(worker.pause_after)
    await successor.start(worker.port)
    stack.push_async_callback(successor.stop)
    return successor


def other_of(pair, one):
    return pair[1] if pair[0] is one else pair[0]
