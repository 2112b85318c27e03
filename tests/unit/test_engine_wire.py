"""Messages become engine requests and engine outputs merge without loss."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import FailedPreconditionError, InvalidArgumentError
from baton.sampling_params import SamplingParams
from baton.sampling_wire import sampling_fields, sampling_to_proto
from baton.v1 import common_pb2, decode_pb2
from engine.request import (
    BeamSearchParams,
    CandidateProgress,
    FinishReason,
    RequestOutput,
    StageTimings,
)
from engine.wire import (
    add_output,
    check_namespace,
    engine_request,
    finish_reason_to_proto,
    merge_outputs,
    timings_to_proto,
)
from kvstore.handoff import KvHandoff, handoff_from_proto, handoff_to_proto
from tests.support.rpc_servers import worker_request

HANDOFF = KvHandoff(
    handoff_id="h",
    namespace=b"n" * 32,
    block_keys=(b"k" * 32, b"l" * 32),
    num_tokens=20,
    connector="redis",
    digest_scheme="xxh3-128",
    lease_ms=5000,
    connector_params=b"p",
    kv_form="model 1",
)


def test_every_field_reaches_the_engine():
    message = worker_request(
        "r",
        sampling=common_pb2.SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1),
        stop_token_ids=[2, 9],
        priority=-4,
        cache_salt="tenant",
    )
    progress = [decode_pb2.CandidateProgress(output_token_ids=[1, 2], logprob=-1.5)]
    request = engine_request(message, deadline=7.0, progress=progress, handoff=HANDOFF)
    assert request.request_id == "r"
    assert request.prompt_token_ids == (5, 6, 7)
    assert request.progress == (CandidateProgress(0, (1, 2), -1.5),)
    assert (request.num_candidates, request.num_returned, request.is_ranked) == (1, 1, False)
    draw = request.draw
    assert (draw.temperature, draw.top_k, draw.top_p, draw.seed) == (0.5, 3, 0.25, 2**64 - 1)
    assert request.max_tokens == 8
    assert request.stop_token_ids == frozenset((2, 9))
    assert (request.priority, request.cache_salt) == (-4, "tenant")
    assert (request.handoff, request.deadline) == (HANDOFF, 7.0)


@pytest.mark.parametrize(
    ("sampling", "num_candidates", "num_returned", "beams"),
    [
        ({"n": 3}, 3, 3, None),
        ({"n": 2, "best_of": 4}, 4, 2, None),
        ({"beam_search": {"beam_width": 4}}, 4, 1, BeamSearchParams(1.0, False)),
        (
            {"n": 2, "beam_search": {"beam_width": 2, "length_penalty": 0, "early_stopping": 1}},
            2,
            2,
            BeamSearchParams(0.0, True),
        ),
        (
            {"beam_search": {"beam_width": 2, "length_penalty": -1, "early_stopping": 2}},
            2,
            1,
            BeamSearchParams(-1.0, "never"),
        ),
    ],
)
def test_candidates_and_beams_reach_the_engine(sampling, num_candidates, num_returned, beams):
    message = worker_request("r", sampling=common_pb2.SamplingParams(seed=1, **sampling))
    first_beams = [decode_pb2.FirstBeam(token_id=4, logprob=-2)]
    request = engine_request(message, deadline=1.0, first_beams=first_beams)
    assert (request.num_candidates, request.num_returned) == (num_candidates, num_returned)
    assert request.beam_search == beams
    assert request.first_beams == ((4, -2.0),)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 4, width=32),
        top_p=st.floats(0.125, 1, width=32),
        seed=st.integers(0, 2**64 - 1) | st.none(),
        n=st.integers(1, 4),
        best_of=st.integers(4, 64) | st.none(),
    )
    | st.builds(
        SamplingParams,
        n=st.integers(1, 4),
        beam_width=st.integers(4, 64),
        length_penalty=st.floats(-3, 3),
        early_stopping=st.sampled_from([False, True, "never"]),
    )
)
def test_sampling_params_come_back_from_the_wire(params):
    assert SamplingParams(**sampling_fields(sampling_to_proto(params))) == params


def test_unset_sampling_fields_take_the_defaults_and_zeros_stay_zeros():
    unset = engine_request(
        worker_request("r", sampling=common_pb2.SamplingParams(seed=0)), deadline=1.0
    )
    assert (unset.draw.temperature, unset.draw.top_p, unset.draw.seed) == (1.0, 1.0, 0)
    zero = worker_request("r", sampling=common_pb2.SamplingParams(temperature=0.0, seed=0))
    assert engine_request(zero, deadline=1.0).draw.temperature == 0.0


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"sampling": common_pb2.SamplingParams()}, "seed"),
        ({"sampling": common_pb2.SamplingParams(seed=1, temperature=float("nan"))}, "temperature"),
        ({"sampling": common_pb2.SamplingParams(seed=1, top_p=0.0)}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": common_pb2.SamplingParams(seed=1, n=65)}, "n is 65"),
        ({"sampling": common_pb2.SamplingParams(seed=1, n=2, best_of=1)}, "n is 2"),
        ({"sampling": common_pb2.SamplingParams(seed=1, beam_search={})}, "beam_width is 0"),
    ],
)
def test_bad_fields_are_named(changes, field):
    with pytest.raises(InvalidArgumentError, match=field):
        engine_request(worker_request(**{"request_id": "r", **changes}), deadline=1.0)


def test_namespace_mismatch_names_both_sides():
    theirs = worker_request("r", namespace=b"\xaa", kv_form="model 1, float16")
    check_namespace(theirs, b"\xaa", "model 1, bfloat16")
    named = r"request has model 1, float16 \(aa\), this replica model 1, bfloat16 \(bb\)"
    with pytest.raises(FailedPreconditionError, match=named):
        check_namespace(theirs, b"\xbb", "model 1, bfloat16")


def test_a_handoff_for_another_form_of_kv_names_both_sides():
    handoff = replace(HANDOFF, namespace=b"\xaa")
    handoff.check_compatible(namespace=b"\xaa", connector="redis", kv_form="model 2")
    named = r"decode has model 2 \(bb\), prefill sent model 1 \(aa\)"
    with pytest.raises(FailedPreconditionError, match=named):
        handoff.check_compatible(namespace=b"\xbb", connector="redis", kv_form="model 2")


def test_handoff_round_trip():
    assert handoff_from_proto(handoff_to_proto(HANDOFF)) == HANDOFF


def test_foreign_handoffs_are_refused():
    newer = handoff_to_proto(HANDOFF)
    newer.format_version = 99
    with pytest.raises(FailedPreconditionError, match="decode has 1, prefill sent 99"):
        handoff_from_proto(newer)
    torn = handoff_to_proto(HANDOFF)
    torn.block_keys[1] = b"short"
    with pytest.raises(InvalidArgumentError, match="block_keys"):
        handoff_from_proto(torn)


def test_a_lease_longer_than_the_wire_takes_is_told_as_the_longest():
    endless = handoff_to_proto(replace(HANDOFF, lease_ms=10**12))
    assert handoff_from_proto(endless).lease_ms == 2**32 - 1


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
def test_merging_keeps_every_token_in_order(steps):
    first = StageTimings(queue_ms=1.0)
    merged = None
    for index, token_ids in enumerate(steps):
        is_last = index == len(steps) - 1
        output = RequestOutput(
            request_id="r",
            token_ids=tuple(token_ids),
            cached_tokens=16 if index == 0 else 0,
            timings=first if index == 0 else None,
            finish_reason=FinishReason.STOP if is_last else None,
            is_last=is_last,
        )
        merged = merge_outputs(merged, output) if merged else output
    assert merged.is_last
    assert merged.token_ids == tuple(token for step in steps for token in step)
    assert (merged.cached_tokens, merged.timings) == (16, first)
    assert merged.finish_reason is FinishReason.STOP


def test_outputs_wait_by_candidate_and_the_requests_last_stays_last():
    pending = {}
    for index, token_id, is_last in ((0, 1, False), (1, 2, False), (1, 3, False), (0, 4, True)):
        output = RequestOutput(request_id="r", index=index, token_ids=(token_id,), is_last=is_last)
        add_output(pending, output)
    assert [(o.index, o.token_ids, o.is_last) for o in pending.values()] == [
        (1, (2, 3), False),
        (0, (1, 4), True),
    ]


def test_the_requests_end_leaves_a_candidate_that_has_ended_before_its_end():
    pending, length, aborted = {}, FinishReason.LENGTH, FinishReason.ABORTED
    for output in (
        RequestOutput(request_id="r", token_ids=(1,), finish_reason=length),
        RequestOutput(request_id="r", index=1, token_ids=(2,)),
        RequestOutput(request_id="r", finish_reason=aborted, is_last=True),
    ):
        add_output(pending, output)
    assert [(o.index, o.token_ids, o.finish_reason, o.is_last) for o in pending.values()] == [
        (0, (1,), length, False),
        (1, (2,), None, False),
        (0, (), aborted, True),
    ]


def test_every_finish_reason_has_a_wire_form():
    assert finish_reason_to_proto(None) == common_pb2.FINISH_REASON_UNSPECIFIED
    going_on = {FinishReason.HANDOFF}
    for reason in FinishReason:
        wire = finish_reason_to_proto(reason)
        assert (wire == common_pb2.FINISH_REASON_UNSPECIFIED) == (reason in going_on)


def test_timings_keep_their_stages():
    assert timings_to_proto(None) is None
    wire = timings_to_proto(StageTimings(queue_ms=1, prefill_ms=2, transfer_ms=3, load_ms=4))
    assert (wire.queue_ms, wire.prefill_ms, wire.transfer_ms, wire.load_ms) == (1, 2, 3, 4)
