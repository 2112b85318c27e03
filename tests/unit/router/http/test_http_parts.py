"""Parts of the HTTP server that need no connection: errors, bodies, token texts, event streams."""

import asyncio
import json
from contextlib import aclosing

import pytest
from fastapi.exceptions import RequestValidationError

from baton.common.errors import (
    AbortedError,
    BatonError,
    ConfigurationError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PromptTooLongError,
    Reason,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
)
from router.config.http import HttpConfig
from router.fleet.served_model import RequestLimits
from router.http.bodies import SamplingBody
from router.http.errors import Problem, anthropic_error, openai_error, problem_of
from router.http.json_bytes import json_bytes
from router.http.logprobs import LegacyLogprobs
from router.http.openai_bodies import CompletionBody
from router.http.params import stated_fields
from router.http.sse import SseResponse, unless_client_leaves
from router.http.token_texts import TokenTexts
from router.requests.detokenizer import make_detokenizer
from router.requests.tokenizer import Tokenizer
from router.requests.validation import check_prompt_characters, check_prompt_length
from tests.support.tokenizer_folders import (
    CORPUS,
    write_byte_fallback_folder,
    write_byte_level_folder,
)


@pytest.mark.parametrize(
    ("kind", "status", "retries"),
    [
        (InvalidArgumentError, 400, False),
        (FailedPreconditionError, 400, False),
        (NotFoundError, 404, False),
        (ResourceExhaustedError, 503, True),
        (UnavailableError, 503, True),
        (AbortedError, 503, False),
        (DeadlineExceededError, 504, False),
        (RequestCancelledError, 499, False),
    ],
)
def test_each_error_has_its_status(kind: type[BatonError], status: int, retries: bool) -> None:
    problem = problem_of(kind("why it failed"), "r")
    assert problem.status == status
    assert problem.message == "why it failed"
    assert ("Retry-After" in problem.headers) == retries


@pytest.mark.parametrize(
    ("reason", "status", "code", "kind"),
    [
        (Reason.CLIENT_RATE, 429, "rate_limit_exceeded", "rate_limit_error"),
        (Reason.CLIENT_CONCURRENCY, 429, "rate_limit_exceeded", "rate_limit_error"),
        (Reason.OVERLOADED, 503, "overloaded", "overloaded_error"),
        (Reason.SLO_TTFT, 503, "overloaded", "overloaded_error"),
        (Reason.REPLICAS_FULL, 503, "overloaded", "overloaded_error"),
    ],
)
def test_limits_of_a_client_and_of_the_cluster_differ(reason, status, code, kind):
    problem = problem_of(ResourceExhaustedError("full", 2.5, reason=reason), "r")
    assert problem.status == status
    assert problem.headers == {
        "x-baton-reason": reason.lower().replace("_", "-"),
        "Retry-After": "3",
        "retry-after-ms": "2500",
    }
    assert openai_error(problem)["error"]["code"] == code
    assert anthropic_error(problem)["error"]["type"] == kind


@pytest.mark.parametrize(
    ("error", "header"),
    [
        (AbortedError("lost four replicas"), "false"),
        (DeadlineExceededError("late"), "false"),
        (InternalError("a bug"), "false"),
        (KeyError("a bug"), "false"),
        (UnavailableError("busy"), None),
        (InvalidArgumentError("wrong"), None),
    ],
)
def test_official_clients_repeat_only_what_may_succeed(error, header):
    assert problem_of(error, "r").headers.get("x-should-retry") == header


@pytest.mark.parametrize("error", [InternalError("secret"), KeyError("secret")])
def test_bugs_are_not_shown(error, caplog):
    problem = problem_of(error, "the-id")
    assert problem.status == 500
    assert "secret" not in json.dumps(openai_error(problem))
    assert "the-id" in problem.message
    assert caplog.records[0].exc_info[1] is error


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("top_p is 1.5; it must be in (0, 1]", "top_p"),
        ("tools[0].function.name is empty", "tools[0].function.name"),
        ("prompts[3]: prompt is empty; it must have at least 1 token", "prompt"),
        ("text is empty; the prompt must have at least 1 token", "prompt"),
        ("prompts[1].token_ids is empty; the prompt must have at least 1 token", "prompt"),
        ("the chat template refuses the messages: no", None),
        ("one of two is set", None),
    ],
)
def test_the_field_of_a_message_is_found(message, param):
    assert problem_of(InvalidArgumentError(message), "r").param == param


def test_a_prompt_that_is_too_long_has_openais_code():
    limits = RequestLimits(max_model_len=8, max_pool_tokens=9, vocab_size=99, max_candidates=1)
    with pytest.raises(PromptTooLongError) as caught:
        check_prompt_length(12, limits)
    problem = problem_of(caught.value.within("prompts[1]"), "r")
    assert (problem.code, problem.param) == ("context_length_exceeded", "prompt")
    assert problem.message == (
        "This model's maximum context length is 8 tokens. However, prompts[1]: prompt has 12 "
        "tokens; it must have fewer than 8, the model's context length."
    )
    error = anthropic_error(problem)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: 12 tokens > 7 maximum (prompts[1]")


def test_a_text_that_cannot_fit_is_refused_as_a_long_prompt():
    with pytest.raises(PromptTooLongError) as caught:
        check_prompt_characters("text", "x" * 100, 64, longest_token_chars=8, max_total_tokens=8)
    problem = problem_of(caught.value, "r")
    assert (problem.code, problem.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 8 tokens" in problem.message
    message = anthropic_error(problem)["error"]["message"]
    assert message.startswith("prompt is too long: 13 tokens > 7 maximum")


def test_wrong_types_name_the_field():
    error = RequestValidationError(
        [
            {
                "type": "int_type",
                "loc": ("body", "n"),
                "msg": "Input should be an integer",
                "input": "x",
            }
        ]
    )
    problem = problem_of(error, "r")
    assert (problem.status, problem.param) == (400, "n")
    assert "'x'" in problem.message


def test_bodies_are_strict_and_nulls_are_unset():
    with pytest.raises(ValueError, match="n"):
        SamplingBody(n="2")
    with pytest.raises(ValueError, match="temperature"):
        SamplingBody(temperature=True)
    body = SamplingBody.model_validate({"n": None, "temperature": 1, "logit_bias": {"5": 1}})
    assert stated_fields(body) == {"temperature": 1.0, "logit_bias": {"5": 1.0}}


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [
        ("suffix", "x", ""),
        ("modalities", ["text", "audio"], ["text"]),
        ("web_search_options", {}, None),
        ("functions", [{}], []),
        ("chat_template", "x", None),
    ],
)
def test_features_that_are_lacking_are_refused_by_name(name, refused, accepted):
    with pytest.raises(InvalidArgumentError, match=f"^{name} is set"):
        stated_fields(SamplingBody.model_validate({name: refused}))
    assert stated_fields(SamplingBody.model_validate({name: accepted})) == {}


@pytest.mark.parametrize(
    ("given", "seed"), [(None, None), (-1, None), (7, 7), (-2, 2**64 - 2), (-(2**63), 2**63)]
)
def test_seeds_may_be_negative(given, seed):
    assert stated_fields(SamplingBody(seed=given)).get("seed") == seed


def test_names_without_a_meaning_are_ignored_and_logged(caplog):
    caplog.set_level("DEBUG", logger="baton.http")
    assert stated_fields(SamplingBody.model_validate({"user": "me", "mystery": 1})) == {}
    (record,) = caplog.records
    assert "mystery" in record.getMessage()
    assert "user" not in record.getMessage()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_have_four_forms(prompt, prompts):
    assert CompletionBody(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""]])
def test_empty_prompts_are_refused(prompt):
    with pytest.raises(InvalidArgumentError, match="prompt is empty"):
        CompletionBody(prompt=prompt).prompts()


@pytest.mark.parametrize("write", [write_byte_level_folder, write_byte_fallback_folder])
def test_bytes_of_tokens_joined_are_the_text(tmp_path, write):
    tokenizer = Tokenizer.load(write(tmp_path))
    texts = TokenTexts(tokenizer)
    for text in (*CORPUS, "日本 😀 z\u0301\x00"):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(texts.bytes_of, token_ids)).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(token_ids)


def offsets(tokenizer, token_ids, prompt=None, **options):
    """The places of tokens, and the text that they are places of."""
    legacy = LegacyLogprobs(TokenTexts(tokenizer), as_ids=False, has_special=False)
    if prompt is None:
        found = [legacy.fields([token_id], [None])["text_offset"][0] for token_id in token_ids]
        stream = make_detokenizer(tokenizer, tokenizer.encode("a", add_special_tokens=False))
        return found, stream.push(token_ids) + stream.flush()
    found = legacy.prompt_fields(token_ids, [None] * (len(token_ids) - 1), prompt)["text_offset"]
    return found, prompt


@pytest.mark.parametrize("write", [write_byte_level_folder, write_byte_fallback_folder])
@pytest.mark.parametrize("as_prompt", [False, True])
@pytest.mark.parametrize("text", [*CORPUS[:4], "a 🗾🗾 z", "日本", "🗾x</s>y", " two  spaces 🗾"])
def test_offsets_are_places_in_the_text(tmp_path, write, as_prompt, text):
    tokenizer = Tokenizer.load(write(tmp_path))
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer.encode(f"x{text}", add_special_tokens=as_prompt)
    if not as_prompt:
        token_ids = token_ids[1:] if tokenizer.decode(token_ids[:1]) == "x" else token_ids
    found, whole = offsets(tokenizer, token_ids, f"x{text}" if as_prompt else None)
    assert found == sorted(found)
    for token_id, place in zip(token_ids, found, strict=True):
        token = texts.text(token_id)
        if "\ufffd" not in token and token_id not in tokenizer.special_token_ids:
            assert whole.startswith(token.lstrip(" ") if place == 0 else token, place)
    parts = {}
    for token_id, place in zip(token_ids, found, strict=True):
        if "\ufffd" in texts.text(token_id) and texts.bytes_of(token_id)[:1] > b"\x7f":
            parts[place] = parts.get(place, b"") + texts.bytes_of(token_id)
    for place, data in parts.items():
        assert whole.startswith(data.decode(errors="ignore"), place)


@pytest.mark.parametrize("write", [write_byte_level_folder, write_byte_fallback_folder])
def test_offsets_after_bytes_that_are_no_character(tmp_path, write):
    tokenizer = Tokenizer.load(write(tmp_path))
    wrong = tokenizer.encode("🗾", add_special_tokens=False)[-4:-1]
    last = tokenizer.encode("x", add_special_tokens=False)
    found, whole = offsets(tokenizer, [*last, *wrong, *last, *last])
    assert found[-1] == len(whole) - 1
    assert whole[found[-1 - len(last)] :].strip(" ").startswith("x")
    assert not whole[: found[-1 - len(last)]].strip(" ").endswith("x")


def test_unknown_tokens_have_no_text(tmp_path):
    texts = TokenTexts(Tokenizer.load(write_byte_level_folder(tmp_path)))
    assert (texts.text(10**6), texts.bytes_of(10**6)) == ("", b"")


def test_json_survives_lone_surrogates():
    assert json.loads(json_bytes({"a": "x\ud800"})) == {"a": "x?"}


class Client:
    """An ASGI client that may leave, and may stop reading."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.reads.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def response(produce, **options) -> SseResponse:
    def error_event(problem: Problem) -> bytes:
        return f"data: {problem.status}\n\n".encode()

    return SseResponse(produce, error_event=error_event, request_id="r", **options)


async def test_a_stream_is_sent_event_by_event():
    async def produce(emit):
        await emit(b"1")
        await emit(b"2")

    client = Client()
    await response(produce)({}, client.receive, client.send)
    start, *parts = client.sent
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert [part["body"] for part in parts] == [b"1", b"2", b""]
    assert [part["more_body"] for part in parts] == [True, True, False]


async def test_a_deadline_of_a_generator_that_waits_for_its_reader_is_an_event():
    """The deadline cancels the task, which is outside of the generator then."""
    may_read = asyncio.Event()

    async def chunks():
        async with asyncio.timeout(0.01):
            yield b"1"

    async def produce(emit):
        async with aclosing(chunks()) as pieces:
            async for piece in pieces:
                await emit(piece)
                await may_read.wait()

    client = Client()
    await response(produce)({}, client.receive, client.send)
    assert client.body == b"1data: 504\n\n"
    assert not client.sent[-1]["more_body"]


async def test_errors_before_the_first_event_are_raised_and_later_ones_are_events():
    async def fail_first(emit):
        raise UnavailableError("no replica")

    async def fail_later(emit):
        await emit(b"1")
        raise UnavailableError("no replica")

    client = Client()
    with pytest.raises(UnavailableError):
        await response(fail_first)({}, client.receive, client.send)
    assert client.sent == []
    await response(fail_later)({}, client.receive, client.send)
    assert client.body == b"1data: 503\n\n"
    assert client.sent[-1]["more_body"] is False


async def test_the_producer_waits_for_a_client_that_does_not_read():
    made = []

    async def produce(emit):
        for number in range(3):
            made.append(number)
            await emit(b"x")

    client = Client()
    client.reads.clear()
    running = asyncio.ensure_future(response(produce)({}, client.receive, client.send))
    for _ in range(20):
        await asyncio.sleep(0)
    assert made == [0]
    client.reads.set()
    await running
    assert client.body == b"xxx"


async def test_a_client_that_leaves_ends_the_producer():
    ended = asyncio.Event()

    async def produce(emit):
        try:
            await emit(b"1")
            await asyncio.Event().wait()
        finally:
            ended.set()

    client = Client()
    running = asyncio.ensure_future(response(produce)({}, client.receive, client.send))
    client.left.set()
    await running
    assert ended.is_set()


async def test_whole_answers_end_when_the_client_leaves():
    async def wait():
        await asyncio.Event().wait()

    async def answer():
        return 7

    client = Client()
    assert await unless_client_leaves(client.receive, answer()) == 7
    client.left.set()
    with pytest.raises(RequestCancelledError):
        await unless_client_leaves(client.receive, wait())


@pytest.mark.parametrize(
    "values", [{"port": 65536}, {"max_request_bytes": 0}, {"header_timeout_s": -1.0}]
)
def test_values_out_of_range_name_the_flag(values):
    flag = "--" + next(iter(values)).replace("_", "-")
    with pytest.raises(ConfigurationError, match=flag):
        HttpConfig(**values)
