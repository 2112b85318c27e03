"""Conversion between engine data and protobuf messages."""

from dataclasses import replace

import pytest

from baton.common.errors import FailedPreconditionError, InvalidArgumentError
from baton.v1 import common_pb2, request_pb2
from engine.batch import TokenLogprobs
from engine.request import CandidateProgress, EngineLoad, EngineOutput, FinishReason, StageTimings
from engine.wire import (
    check_namespace,
    finish_reason_to_proto,
    kv_backends_to_proto,
    load_to_proto,
    logprobs_to_proto,
    output_to_proto,
    progress_from_proto,
    timings_to_proto,
)
from kvstore.guard.status import BackendStatus
from kvstore.handoff import KvHandoff, handoff_from_proto, handoff_to_proto

HANDOFF = KvHandoff(
    handoff_id="h",
    namespace=b"n" * 32,
    block_keys=(b"k" * 32, b"l" * 32),
    num_tokens=20,
    connector="redis",
    digest_scheme="xxh3-128",
    lease_ms=5000,
    connector_params=b"p",
)


def test_progress_is_read_from_its_messages():
    messages = [
        request_pb2.CandidateProgress(output_token_ids=[1, 2], logprob=-1.5),
        request_pb2.CandidateProgress(index=3, output_token_ids=[4]),
    ]
    expected = (CandidateProgress(0, (1, 2), -1.5), CandidateProgress(3, (4,)))
    assert progress_from_proto(messages) == expected


def test_the_message_of_an_output_has_all_its_fields():
    output = EngineOutput(
        request_id="r",
        index=2,
        token_ids=(4, 5),
        finish_reason=FinishReason.STOP,
        is_last=True,
        score=-0.5,
        cached_tokens=16,
        timings=StageTimings(queue_ms=1.0),
    )
    message = output_to_proto(output)
    assert (message.request_id, message.index, list(message.token_ids)) == ("r", 2, [4, 5])
    assert (message.finish_reason, message.is_last) == (common_pb2.FINISH_REASON_STOP, True)
    assert (message.score, message.cached_tokens, message.timings.queue_ms) == (-0.5, 16, 1.0)
    assert not message.HasField("error")
    assert not output_to_proto(EngineOutput(request_id="r")).HasField("score")


def test_the_message_of_a_load_has_all_its_fields():
    load = EngineLoad(*range(1, 6), draining=True, num_swapped_blocks=7)
    message = load_to_proto(load)
    names = {field.name for field in message.DESCRIPTOR.fields}
    assert names == {*EngineLoad.__slots__, "kv_store_ids"}
    assert all(getattr(message, name) == getattr(load, name) for name in EngineLoad.__slots__)


def test_the_error_of_a_namespace_mismatch_names_both_sides():
    check_namespace(b"\xaa", b"\xaa")
    with pytest.raises(FailedPreconditionError, match="request has aa, this replica bb"):
        check_namespace(b"\xaa", b"\xbb")
    with pytest.raises(FailedPreconditionError, match=r"has none, this replica bbbbbbbbbbbb$"):
        check_namespace(b"", b"\xbb" * 32)


def test_the_error_of_an_incompatible_handoff_names_both_sides():
    handoff = replace(HANDOFF, namespace=b"\xaa")
    handoff.check_compatible(namespace=b"\xaa", connector="redis")
    with pytest.raises(FailedPreconditionError, match="this replica has bb, the handoff aa"):
        handoff.check_compatible(namespace=b"\xbb", connector="redis")


def test_a_handoff_survives_a_round_trip():
    assert handoff_from_proto(handoff_to_proto(HANDOFF)) == HANDOFF


def test_handoffs_of_another_format_or_with_bad_keys_are_refused():
    newer = handoff_to_proto(HANDOFF)
    newer.format_version = 99
    with pytest.raises(FailedPreconditionError, match="this replica has 1, the handoff 99"):
        handoff_from_proto(newer)
    torn = handoff_to_proto(HANDOFF)
    torn.block_keys[1] = b"short"
    with pytest.raises(InvalidArgumentError, match="block_keys"):
        handoff_from_proto(torn)


def test_a_lease_too_long_for_its_field_is_sent_as_the_maximum():
    endless = handoff_to_proto(replace(HANDOFF, lease_ms=10**12))
    assert handoff_from_proto(endless).lease_ms == 2**32 - 1


def test_every_finish_reason_but_handoff_has_an_enum_value():
    assert finish_reason_to_proto(None) == common_pb2.FINISH_REASON_UNSPECIFIED
    unspecified = {FinishReason.HANDOFF}
    for reason in FinishReason:
        wire = finish_reason_to_proto(reason)
        assert (wire == common_pb2.FINISH_REASON_UNSPECIFIED) == (reason in unspecified)


def test_the_message_of_timings_has_every_stage():
    assert timings_to_proto(None) is None
    wire = timings_to_proto(StageTimings(queue_ms=1, prefill_ms=2, transfer_ms=3, load_ms=4))
    assert (wire.queue_ms, wire.prefill_ms, wire.transfer_ms, wire.load_ms) == (1, 2, 3, 4)


def test_log_probabilities_reach_the_message_and_the_engine():
    own, prompt = TokenLogprobs(-0.5, 3, (7, 8), (-0.25, -0.375)), TokenLogprobs(-1.5, 1)
    message = output_to_proto(
        EngineOutput("r", token_ids=(4,), logprobs=(own,), prompt_logprobs=(prompt, prompt))
    )
    (found,) = message.logprobs
    assert (found.logprob, found.rank) == (-0.5, 3)
    assert (list(found.top_token_ids), list(found.top_logprobs)) == ([7, 8], [-0.25, -0.375])
    assert [(each.logprob, each.rank) for each in message.prompt_logprobs] == [(-1.5, 1)] * 2
    progress = request_pb2.CandidateProgress(
        output_token_ids=[1], token_logprobs=logprobs_to_proto((own,))
    )
    assert progress_from_proto([progress])[0].token_logprobs == (own,)


STORE = BackendStatus("KV store redis://cache:6379/0", "a")


@pytest.mark.parametrize(
    ("statuses", "ids"),
    [
        ((), []),
        ((STORE, replace(STORE, identity="b")), ["a", "b"]),
        ((STORE, replace(STORE, identity="")), []),
        ((BackendStatus("grpc://127.0.0.1:7100"), STORE), []),
    ],
)
def test_a_load_names_the_stores_through_which_alone_kv_is_handed_over(statuses, ids):
    message = load_to_proto(EngineLoad(0, 0, 0, 0, 0), statuses)
    assert list(message.kv_store_ids) == ids
    backends = kv_backends_to_proto(statuses)
    assert [(each.name, each.identity, each.can_load) for each in backends] == [
        (each.name, each.identity, each.can_load) for each in statuses
    ]
