"""Errors keep their type and message across RPC."""

from urllib.parse import quote

import grpc
import pytest

from baton.common import errors
from baton.common.errors import Reason
from baton.common.request.prompts import parse_prompts
from baton.common.request.sampling_params import SamplingParams
from baton.common.request.structured_outputs import StructuredOutputs
from baton.v1 import request_pb2
from router.chat.messages import conversation_of
from rpc.errors import from_rpc_error, from_worker_error, to_status, to_worker_error, trailers_of

WIRE_ERRORS = [
    getattr(errors, name)
    for name in errors.__all__
    if name not in ("BatonError", "ConfigurationError", "PromptTooLongError", "Reason")
]


def rpc_error(status: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(status, empty, empty, details=details)


@pytest.mark.parametrize("error_type", WIRE_ERRORS)
def test_an_error_survives_a_round_trip_as_a_status(error_type):
    status, message = to_status(error_type("top_p is 2"))
    assert status.name == error_type.code
    back = from_rpc_error(rpc_error(status, message))
    assert type(back) is error_type
    assert back.message == "top_p is 2"


@pytest.mark.parametrize("error_type", WIRE_ERRORS)
def test_an_error_survives_a_round_trip_as_a_worker_error(error_type):
    back = from_worker_error(to_worker_error(error_type("why")))
    assert (type(back), back.message) == (error_type, "why")


def test_the_error_of_a_long_prompt_is_one_of_an_argument_on_the_wire():
    status, message = to_status(errors.PromptTooLongError("why", num_tokens=9, max_total_tokens=8))
    back = from_rpc_error(rpc_error(status, message))
    assert (type(back), back.message) == (errors.InvalidArgumentError, "why")


def test_unknown_statuses_become_internal_errors_with_their_message():
    back = from_rpc_error(rpc_error(grpc.StatusCode.UNIMPLEMENTED, "no such method"))
    assert isinstance(back, errors.InternalError)
    assert "UNIMPLEMENTED: no such method" in back.message
    unknown = from_worker_error(request_pb2.WorkerError(code=999, message="?"))
    assert isinstance(unknown, errors.InternalError)


def test_empty_messages_get_the_status_name():
    assert from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "")).message == "UNAVAILABLE"


def test_a_worker_error_keeps_reason_field_and_time_of_retry():
    full = errors.ResourceExhaustedError("full", 1.5, reason=Reason.REPLICAS_FULL)
    back = from_worker_error(to_worker_error(full))
    assert (back.reason, back.retry_after_s, back.field) == ("REPLICAS_FULL", 1.5, None)
    back = from_worker_error(to_worker_error(errors.InvalidArgumentError("a.b has 9 bytes")))
    assert (back.reason, back.retry_after_s, back.field) == ("INVALID_ARGUMENT", None, "a.b")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("top_p is 1.5; it must be in (0, 1]", "top_p"),
        ("structured_outputs.json is not JSON", "structured_outputs.json"),
        ("tools[0].function.name is empty", "tools[0].function.name"),
        ("extra_args: it has no key", "extra_args"),
        ("prompts[3]: prompt is empty", "prompt"),
        ("prompts[3].text is empty", "prompts[3].text"),
        ("exactly one of prompt and messages must be set", None),
        ("the chat template refuses the messages", None),
        ("number of candidates is 9", None),
    ],
)
def test_errors_have_the_field_that_their_message_begins_with(message, field):
    assert errors.InvalidArgumentError(message).field == field
    assert errors.FailedPreconditionError(message).field == field
    assert errors.UnavailableError(message).field is None


def test_details_of_other_servers_are_ignored():
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"), ("retry-after-ms", "7"))
    status = grpc.StatusCode.UNAVAILABLE
    back = from_rpc_error(grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailers, "why"))
    assert (back.message, back.reason, back.retry_after_s) == ("why", "UNAVAILABLE", 0.007)


@pytest.mark.parametrize("key", ["k" * 6000, "\u6f22" * 6000, "\ud800" * 6000])
def test_long_keys_and_values_are_cut_where_they_stand_in_a_text(key):
    """The end of the text, which says what is right, stays."""
    refusals = [
        lambda: SamplingParams(structured_outputs={key: 1}),
        lambda: SamplingParams(structured_outputs={"regex": "a", "json": {"type": key}}),
        lambda: SamplingParams(temperature=key),
        lambda: StructuredOutputs.of_response_format({"type": key}),
        lambda: StructuredOutputs.of_response_format({"type": "json_schema", key: 1}),
        lambda: parse_prompts([{key: 1}]),
        lambda: conversation_of([{"role": key, "content": "a"}]),
        lambda: conversation_of([{"role": "user", "content": [{"type": key}]}]),
    ]
    for refusal in refusals:
        with pytest.raises((errors.InvalidArgumentError, TypeError)) as caught:
            refusal()
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["a" * 9000, "a\ud800" + "😀" * 5000])
def test_messages_fit_into_the_trailers_of_a_call(text):
    """Proxies take 4 KiB of all trailers, in which bytes are base64."""
    error = errors.InvalidArgumentError(text, 1.0, field="f" * 9000)
    status, message = to_status(error)
    values = dict(trailers_of(error, status, message)).values()
    sizes = [len(value) * 4 / 3 if isinstance(value, bytes) else len(value) for value in values]
    assert len(quote(message)) + sum(sizes) < 3800
    assert message[:3] in ("aaa", "a?😀")
