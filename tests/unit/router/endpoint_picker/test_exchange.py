"""The endpoint picker's side of one exchange with Envoy."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from baton.v1 import endpoint_picker_pb2 as pb
from router.endpoint_picker.exchange import Exchange, HeldBytes, Picked, RefusedError
from router.endpoint_picker.messages import read_headers
from router.http.errors import Problem
from tests.support.ext_proc import (
    CHAT,
    body_message,
    destination_of,
    headers_message,
    passed_body,
    status_of,
)

SERVER = "10.0.0.1:8000"
DUPLEX = pb.EXT_PROC_BODY_MODE_FULL_DUPLEX_STREAMED
BUFFERED = pb.EXT_PROC_BODY_MODE_BUFFERED
STREAMED = pb.EXT_PROC_BODY_MODE_STREAMED
ANSWER_BEGINS = pb.ExtProcRequest(response_headers=pb.ExtProcHeaders())
TRAILERS = pb.ExtProcRequest(request_trailers=pb.ExtProcTrailers())


class Picks:
    """Chooses one server, and notes what it was asked."""

    def __init__(self, problem=None):
        self.bodies = []
        self.num_released = 0
        self._problem = problem

    async def __call__(self, asked, body):
        self.bodies.append(body)
        if self._problem is not None:
            raise RefusedError(self._problem)
        return Picked(SERVER, self._release)

    def _release(self):
        self.num_released += 1


class Driven:
    """An exchange that is sent messages."""

    def __init__(self, *, problem=None, max_bytes=1000, max_total_bytes=2000):
        self.picks = Picks(problem)
        self.held = HeldBytes(max_bytes, max_total_bytes)
        self.exchange = Exchange(self.picks, lambda asked: asked.path == CHAT, self.held)

    def send(self, *messages):
        async def take_all():
            return [answer for message in messages for answer in await self.exchange.take(message)]

        return asyncio.run(take_all())


def kinds(answers):
    return [answer.WhichOneof("answer") for answer in answers]


@given(pieces=st.lists(st.binary(max_size=70_000), max_size=4), has_trailers=st.booleans())
def test_the_body_waits_for_its_end_and_goes_on_as_it_was(pieces, has_trailers):
    driven = Driven(max_bytes=10**6, max_total_bytes=10**6)
    assert driven.send(headers_message()) == []
    sent = [body_message(piece, is_end=False) for piece in pieces]
    assert driven.send(*sent) == []
    assert driven.held.total == sum(map(len, pieces))
    answers = driven.send(TRAILERS if has_trailers else body_message(b"}"))
    whole = b"".join(pieces) + (b"" if has_trailers else b"}")
    assert destination_of(answers) == SERVER
    assert kinds(answers)[0] == "request_headers"
    assert (kinds(answers)[-1] == "request_trailers") == has_trailers
    assert passed_body(answers) == (whole, not has_trailers)
    assert driven.picks.bodies == [whole]
    assert driven.held.total == 0


def test_a_request_counts_until_its_answer_begins():
    driven = Driven()
    driven.send(headers_message(), body_message(b"{}"))
    assert driven.picks.num_released == 0
    assert kinds(driven.send(ANSWER_BEGINS)) == ["response_headers"]
    driven.exchange.close()
    assert driven.picks.num_released == 1


def test_a_request_without_an_answer_counts_until_its_exchange_ends():
    driven = Driven()
    driven.send(headers_message(), body_message(b"{}"))
    driven.exchange.close()
    driven.exchange.close()
    assert driven.picks.num_released == 1


def test_an_exchange_that_ends_early_gives_its_bytes_back():
    driven = Driven()
    driven.send(headers_message(), body_message(b"{}", is_end=False))
    assert driven.held.total == 2
    driven.exchange.close()
    assert (driven.held.total, driven.picks.bodies) == (0, [])


@pytest.mark.parametrize(("path", "has_body"), [("/v1/models", True), (CHAT, False)])
def test_without_a_prompt_the_headers_go_on_at_once(path, has_body):
    driven = Driven()
    answers = driven.send(headers_message(path, has_body=has_body))
    assert (kinds(answers), destination_of(answers)) == (["request_headers"], SERVER)
    assert driven.picks.bodies == [None]
    assert passed_body(driven.send(body_message(b"x", is_end=False))) == (b"x", False)
    assert passed_body(driven.send(body_message(b""))) == (b"", True)


def test_a_body_over_the_limit_goes_on_unread():
    driven = Driven(max_bytes=3)
    assert driven.send(headers_message(), body_message(b"ab", is_end=False)) == []
    answers = driven.send(body_message(b"cd", is_end=False))
    assert (destination_of(answers), passed_body(answers)) == (SERVER, (b"abcd", False))
    assert (driven.picks.bodies, driven.held.total) == ([None], 0)
    assert passed_body(driven.send(body_message(b"ef"))) == (b"ef", True)


def test_the_bodies_of_all_requests_have_a_limit():
    first, second = Driven(max_total_bytes=5), Driven()
    second.held = first.held
    second.exchange = Exchange(second.picks, lambda asked: True, first.held)
    first.send(headers_message(), body_message(b"abcd", is_end=False))
    answers = second.send(headers_message(), body_message(b"ef", is_end=False))
    assert (passed_body(answers), second.picks.bodies) == ((b"ef", False), [None])
    assert first.held.total == 4


def test_a_buffered_body_names_the_server():
    driven = Driven()
    answers = driven.send(headers_message(mode=BUFFERED))
    assert (kinds(answers), destination_of(answers)) == (["request_headers"], None)
    answers = driven.send(body_message(b"{}"))
    assert (kinds(answers), destination_of(answers)) == (["request_body"], SERVER)
    assert passed_body(answers) == (b"", False)  # Envoy keeps the body itself
    assert driven.picks.bodies == [b"{}"]


def test_a_streamed_body_comes_too_late():
    driven = Driven()
    answers = driven.send(headers_message(mode=STREAMED))
    assert (kinds(answers), destination_of(answers)) == (["request_headers"], SERVER)
    assert kinds(driven.send(body_message(b"{}"))) == ["request_body"]
    assert driven.picks.bodies == [None]


def test_a_proxy_that_does_not_say_its_mode_is_an_older_one_of_the_extension():
    driven = Driven()
    assert driven.send(headers_message(mode=None)) == []
    assert destination_of(driven.send(body_message(b"{}"))) == SERVER


@pytest.mark.parametrize("response_mode", [DUPLEX, STREAMED])
def test_the_answer_goes_on_as_it_is(response_mode):
    driven = Driven()
    driven.send(headers_message(response_mode=response_mode), body_message(b"{}"))
    part = pb.ExtProcBody(body=b"data", end_of_stream=True)
    (answer,) = driven.send(pb.ExtProcRequest(response_body=part))
    change = answer.response_body.response
    assert change.HasField("body_mutation") == (response_mode == DUPLEX)
    if response_mode == DUPLEX:
        assert change.body_mutation.streamed_response == part
    end = pb.ExtProcRequest(response_trailers=pb.ExtProcTrailers())
    assert kinds(driven.send(end)) == ["response_trailers"]


@pytest.mark.parametrize(("path", "key"), [(CHAT, "error"), ("/v1/messages", "type")])
def test_a_refusal_has_the_shape_of_its_protocol(path, key):
    problem = Problem(status=429, message="all are full", headers={"Retry-After": "5"})
    driven = Driven(problem=problem)
    answers = driven.send(headers_message(path, has_body=False))
    assert status_of(answers) == 429
    sent = answers[0].immediate_response
    assert key in json.loads(sent.body)
    headers = {option.header.key: option.header.raw_value for option in sent.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"5"}


def test_a_refused_request_holds_no_bytes():
    driven = Driven(problem=Problem(status=429, message="all are full"))
    assert status_of(driven.send(headers_message(), body_message(b"{}"))) == 429
    assert driven.held.total == 0


@pytest.mark.parametrize(
    "messages",
    [
        [pb.ExtProcRequest()],
        [body_message(b"")],
        [TRAILERS],
        [headers_message(), headers_message()],
    ],
    ids=["no part", "body first", "trailers first", "headers twice"],
)
def test_messages_out_of_order_are_refused(messages):
    driven = Driven()
    with pytest.raises(InvalidArgumentError):
        driven.send(*messages)


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (None, None),
        (["a:1", " b:2"], {"a:1", "b:2"}),
        ("a:1,b:2", {"a:1", "b:2"}),
        ([], set()),
    ],
)
def test_the_subset_is_a_list_or_a_text(subset, expected):
    asked = read_headers(headers_message("/v1/completions?x=1", subset=subset))
    assert asked.subset == expected
    assert (asked.method, asked.path) == ("POST", "/v1/completions")
