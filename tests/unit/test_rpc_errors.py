"""Errors keep their type and message across RPC."""

from urllib.parse import quote

import grpc
import pytest

from baton import errors
from baton.v1 import request_pb2
from rpc.errors import from_rpc_error, from_worker_error, to_status, to_worker_error

WIRE_ERRORS = [
    getattr(errors, name)
    for name in errors.__all__
    if name not in ("BatonError", "ConfigurationError", "PromptTooLongError")
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


@pytest.mark.parametrize("text", ["a" * 9000, "a\ud800" + "😀" * 5000])
def test_messages_fit_into_the_trailers_of_a_call(text):
    _, message = to_status(errors.InvalidArgumentError(text))
    assert len(quote(message)) < 8000
    assert message[:3] in ("aaa", "a?😀")
