"""Bad input is refused as INVALID_ARGUMENT with the field's name, and never reaches a worker."""

import grpc
import pytest

from baton.v1 import common_pb2, generation_pb2
from tests.support.fake_workers import MODEL, VOCAB_SIZE, FakeDecode, running_workers
from tests.support.running_router import (
    PROMPT_IDS,
    request,
    running_router,
    token_ids_of,
    tokenizer,
)

NAN = float("nan")
CHAT = '[{"role": "user", "content": "Hi"}]'
LONGEST = tokenizer().longest_token_chars


def token_ids(*ids):
    return {"token_ids": common_pb2.TokenIds(ids=ids)}


def sampling(**fields):
    return {"text": "hello", "sampling": common_pb2.SamplingParams(**fields)}


def stopping(**fields):
    return {"text": "hello", "stopping": common_pb2.StoppingParams(**fields)}


BAD_REQUESTS = [
    ("prompt is unset; set one of text, token_ids, prompts, chat", {}),
    (
        "prompts[0].prompt is unset; set one of text, token_ids",
        {"prompts": generation_pb2.Prompts(prompts=[generation_pb2.Prompt()])},
    ),
    (
        "reasoning_start is 99; it must be one of REASONING_START_UNSPECIFIED, ",
        {"text": "hello", "reasoning_start": 99},
    ),
    (
        "reasoning_start is 99; ",
        {"chat": generation_pb2.Chat(messages_json=CHAT), "reasoning_start": 99},
    ),
    (
        "sampling.beam_search.early_stopping is 9; it must be one of EARLY_STOPPING_UNSPECIFIED, ",
        sampling(beam_search={"beam_width": 2, "early_stopping": 9}),
    ),
    ("text", {"text": ""}),
    ("token_ids", token_ids()),
    ("prompt has 60 tokens; it must have fewer than 60, the model", token_ids(*range(60))),
    ("prompt has 48 tokens; it must have fewer than 48, the tokens", token_ids(*range(48))),
    (f"text has 100000 characters; it must have at most {48 * LONGEST}", {"text": "a " * 50_000}),
    (f"prompt token_ids is {VOCAB_SIZE}", token_ids(3, VOCAB_SIZE, 4)),
    ("max_tokens", stopping(max_tokens=0)),
    ("temperature", sampling(temperature=-1)),
    ("temperature", sampling(temperature=NAN)),
    ("top_p", sampling(top_p=0)),
    ("top_p", sampling(top_p=1.01)),
    ("structured_outputs sets no form", sampling(structured_outputs={})),
    ("structured_outputs.json is not JSON", sampling(structured_outputs={"json": "{"})),
    (
        "structured_outputs sets regex, grammar; set exactly one",
        sampling(structured_outputs={"regex": "a", "grammar": "b"}),
    ),
    (
        "structured_outputs is set together with beam_width",
        sampling(structured_outputs={"regex": "a"}, beam_search={"beam_width": 2}),
    ),
    ("extra_args is not JSON", sampling(extra_args_json="x")),
    ("extra_args has 70000 bytes", sampling(extra_args_json=" " * 70_000)),
    ("stop has 17 entries", stopping(stop=["x"] * 17)),
    ("stop", stopping(stop=["x" * 257])),
    (f"stop_token_ids is {VOCAB_SIZE}", stopping(stop_token_ids=[VOCAB_SIZE])),
]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bad_fields_are_refused_by_name(method):
    # A prompt of 60 tokens exceeds the model's limit, and one of 48 only the pool's.
    decode = FakeDecode([50] * 100, max_model_len=60, num_blocks=12)
    async with running_workers(decode), running_router(decode) as router:
        call = getattr(router.stub, method)
        for message, fields in BAD_REQUESTS:
            error = await failure(call(generation_pb2.GenerateRequest(**fields)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, message
            assert error.details().startswith(message)
        assert not decode.starts
        # The router still serves requests.
        responses = await router.generate(request(PROMPT_IDS, max_tokens=2))
        assert token_ids_of(responses) == [50, 50]


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize", "GetModel"])
async def test_malformed_messages_are_refused(method):
    """Field 1 of GetModel's request is a string, and field 2 of the other requests."""
    field = 1 if method == "GetModel" else 2
    bad_bytes = (bytes([field << 3 | 2, 2, 0xC3, 0x28]), b"\x0a\xff")  # invalid UTF-8; truncated
    decode = FakeDecode([50] * 100)
    async with running_workers(decode), running_router(decode) as router:
        path = f"/baton.v1.GenerationService/{method}"
        is_stream = method == "GenerateStream"
        call = (router.channel.unary_stream if is_stream else router.channel.unary_unary)(path)
        for data in bad_bytes:
            error = await failure(call(data))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "UTF-8" in error.details()


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (generation_pb2.GenerateRequest(text="a"), "GenerateRequest"),
        (generation_pb2.TokenizeRequest(text="a"), "TokenizeRequest"),
        (generation_pb2.DetokenizeRequest(), "DetokenizeRequest"),
        (generation_pb2.GetModelRequest(), "GetModelRequest"),
        (common_pb2.SamplingParams(), "sampling"),
        (generation_pb2.Prompt(text="a"), r"prompts.prompts[1]"),
        (generation_pb2.Chat(messages_json=CHAT), "chat"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_fields_of_a_newer_client_are_refused(message, place):
    """They are refused wherever they are, as the answer would lack what they ask for."""
    newer = type(message).FromString(message.SerializeToString() + b"\xb0\x0d\x01")
    request = generation_pb2.GenerateRequest(text="a")
    match newer:
        case common_pb2.SamplingParams():
            request.sampling.MergeFrom(newer)
        case generation_pb2.Prompt():
            prompts = [generation_pb2.Prompt(text="a"), newer]
            request.prompts.MergeFrom(generation_pb2.Prompts(prompts=prompts))
        case generation_pb2.Chat():
            request.chat.MergeFrom(newer)
        case _:
            request = newer
    method = type(request).__name__.removesuffix("Request")
    decode = FakeDecode([50])
    async with running_workers(decode), running_router(decode) as router:
        error = await failure(getattr(router.stub, method)(request))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == (
        f"this router does not know field 214 of {place}; the client is newer: update the router"
    )
    assert not decode.starts


async def test_other_methods_name_their_fields_too():
    decode = FakeDecode([50])
    async with running_workers(decode), running_router(decode) as router:
        for method, message, field in (
            (
                "Tokenize",
                generation_pb2.TokenizeRequest(text="a" * (2**20 + 1)),
                "text has 1048577",
            ),
            ("Detokenize", generation_pb2.DetokenizeRequest(token_ids=[VOCAB_SIZE]), "token_ids"),
            (
                "Detokenize",
                generation_pb2.DetokenizeRequest(token_ids=[1] * (2**18 + 1)),
                "token_ids has 262145 ids; it must have at most 262144",
            ),
        ):
            error = await failure(getattr(router.stub, method)(message))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(field)


async def test_an_unknown_model_is_not_found():
    decode = FakeDecode([50])
    async with running_workers(decode), running_router(decode) as router:
        for method, message in (
            ("Generate", generation_pb2.GenerateRequest(text="a", model="x")),
            ("GetModel", generation_pb2.GetModelRequest(model="x")),
            ("Tokenize", generation_pb2.TokenizeRequest(model="x")),
            ("Detokenize", generation_pb2.DetokenizeRequest(model="x")),
        ):
            error = await failure(getattr(router.stub, method)(message))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert error.details() == f"model 'x' does not exist; this router serves '{MODEL}'"


async def test_a_duplicate_id_and_one_request_too_many_are_refused():
    decode = FakeDecode([50] * 100, pause_after=1)
    async with (
        running_workers(decode),
        running_router(decode, max_concurrent_requests=2) as router,
    ):
        calls = [router.stub.GenerateStream(request(request_id=name)) for name in "ab"]
        for call in calls:
            await call.read()
        error = await failure(router.generate(request(request_id="a")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert "request_id is 'a'" in error.details()
        error = await failure(router.generate(request(request_id="c")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        decode.resume()
        for call in calls:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await router.generate(request(request_id="a"))


async def failure(call) -> grpc.aio.AioRpcError:
    answer = call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value
