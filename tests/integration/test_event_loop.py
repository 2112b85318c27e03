"""No body that the router takes keeps its event loop from other requests, whatever its shape."""

import asyncio
import http.client
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest

from baton.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.chat.template import ChatTemplate
from router.chat.template_source import TemplateSource, TemplateText
from rpc.channels import open_blocking_channel
from tests.support.fake_workers import FakeDecode
from tests.support.loop_watch import watched_loops
from tests.support.running_http import RunningHttp, running_http
from tests.support.running_router import request, script_of

MAX_BYTES = 16 * 2**20
MAX_MULTIPLE = 12
"""The memory of a body while it is parsed, in its bytes, as docs/http.md states it."""
MAX_STALL_PASSES = 10
"""Passes of Python over a prompt for which it may keep the event loop; the fake worker runs on it
too. A slow machine takes longer for both.
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SMALL = '{"prompt":"a","max_tokens":2}'
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def repeated(head: str, item: str, tail: str, separator: str = ",") -> bytes:
    """A body of the largest size that repeats an item."""
    count = (MAX_BYTES - len((head + tail).encode())) // len((item + separator).encode())
    return (head + separator.join([item] * count) + tail).encode()


def chat(**fields: Any) -> str:
    """The start of a body of a chat whose last field is yet to come."""
    return json.dumps(CHAT | fields)[:-1] + ","


def of_parts() -> bytes:
    message = {"role": "user", "content": [""] * 4096}
    return json.dumps({"messages": [message] * 1362}, separators=(",", ":")).encode()[:MAX_BYTES]


def of_keys() -> bytes:
    fields = (f'"{i}":0' for i in range(1_400_000))
    return ('{"prompt":"a",' + ",".join(fields) + "}").encode()


def of_long_keys() -> bytes:
    """As many fields as a body may have."""
    fields = (f'"{i:0240}":""' for i in range(65_000))
    return ("{" + ",".join(fields) + "}").encode()


def of_calls() -> bytes:
    """Arguments of calls that are JSON texts of few values each, and of many together."""
    function = {"name": "f", "arguments": "[" + "[]," * 1300 + "[]]"}
    message = {"role": "assistant", "tool_calls": [{"function": function}]}
    return json.dumps({"messages": [message] * 4000}).encode()


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ANTHROPIC = '{"max_tokens":4,"messages":[{"role":"user","content":['
TEXT_BLOCK = '{"type":"text","text":"%s"}'
TOOL = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
IDS = '{"prompt":['
LARGE_BLOCK = TEXT_BLOCK % ("a" * 700)
SCHEMA = chat() + '"response_format":{"type":"json_schema","x":['
FLOATS = '{"prompt":"a","max_tokens":2,"x":['


BODIES: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "parts": (CHATS, of_parts, 400, "messages"),
    "ignored field": (COMPLETIONS, lambda: repeated('{"prompt":"a","x":[', "[]", "]}"), 400, "x"),
    "keys": (COMPLETIONS, of_keys, 400, ""),
    "token ids": (COMPLETIONS, lambda: repeated('{"prompt":[', "7", "]}"), 400, "prompt"),
    "fitting ids": (COMPLETIONS, lambda: repeated(IDS, "4" * 10 + " " * 4, "]}"), 400, "prompt"),
    "fitting keys": (COMPLETIONS, of_long_keys, 400, ""),
    "prompts": (COMPLETIONS, lambda: repeated('{"prompt":[', '"a"', "]}"), 400, "prompt"),
    "long text": (COMPLETIONS, lambda: repeated('{"prompt":"', "a", '"}', ""), 400, "prompt"),
    "escapes": (COMPLETIONS, lambda: repeated('{"prompt":"', "\\n", '"}', ""), 400, "prompt"),
    "wide text": (CHATS, lambda: repeated(chat() + '"x":"', "\U0001f600", '"}', ""), 200, ""),
    "mixed text": (CHATS, lambda: repeated(chat() + '"x":"', "a", '\U0001f600"}', ""), 200, ""),
    "backslashes": (CHATS, lambda: repeated(chat() + '"user":"', "\\\\", '"}', ""), 200, ""),
    "nested arrays": (COMPLETIONS, lambda: b"[" * MAX_BYTES, 400, ""),
    "nested objects": (COMPLETIONS, lambda: repeated("", '{"x":', "1", ""), 400, "x"),
    "spaces": (COMPLETIONS, lambda: repeated("", " ", SMALL, ""), 200, ""),
    "messages": (CHATS, lambda: repeated('{"messages":[', "{}", "]}"), 400, "messages"),
    "empty texts": (CHATS, lambda: repeated('{"messages":[', '""', "]}"), 400, "messages"),
    "tools": (CHATS, lambda: repeated(chat() + '"tools":[', TOOL, "]}"), 400, "tools"),
    "schema": (CHATS, lambda: repeated(SCHEMA, "{}", "]}}"), 400, "response_format"),
    "stops": (COMPLETIONS, lambda: repeated('{"prompt":"a","stop":[', '"a"', "]}"), 400, "stop"),
    "calls": (CHATS, of_calls, 400, "messages"),
    "same keys": (COMPLETIONS, lambda: repeated("{", '"prompt":"a"', "}"), 400, "prompt"),
    "integers": (COMPLETIONS, lambda: repeated('{"prompt":[', "7" * 4300, "]}"), 400, ""),
    "digits": (COMPLETIONS, lambda: repeated('{"seed":', "7", "}", ""), 400, ""),
    "floats": (COMPLETIONS, lambda: repeated(FLOATS, "1." + "7" * 380, "]}"), 200, ""),
    "blocks": (MESSAGES, lambda: repeated(ANTHROPIC, TEXT_BLOCK % "", "]}]}"), 400, "messages"),
    "large blocks": (MESSAGES, lambda: repeated(ANTHROPIC, LARGE_BLOCK, "]}]}"), 400, "the prompt"),
    "input": (RESPONSES, lambda: repeated('{"input":[', "{}", "]}"), 400, "input"),
    "not UTF-8": (COMPLETIONS, lambda: b"\xff" * MAX_BYTES, 400, ""),
}
"""Bodies of the largest size, with the status of the answer and the field that it names."""
LARGE_REPLICA = {
    "max_model_len": 2**18,
    "num_blocks": 2**15,
    "block_size": 16,
    "pool_block_size": 16,
}
FAST = (
    "parts",
    "ignored field",
    "token ids",
    "escapes",
    "calls",
    "blocks",
    "arrays",
    "prompts over gRPC",
)
"""The other shapes are slow tests."""
BUSY_SHAPES = ("parts", "ignored field", "escapes", "large blocks", "digits")


def template() -> ChatTemplate:
    return ChatTemplate(TemplateSource({"default": TemplateText(TEMPLATE, "a test")}, {}))


def running(**fields: Any):
    return running_http(FakeDecode(script_of("ab"), **fields), chat_template=template())


def posted(api: RunningHttp, path: str, body: bytes) -> tuple[int, Any]:
    """Sends a body; returns the status and the answer's JSON. Blocks."""
    status, answer = answer_of(api, path, body)
    return status, json.loads(answer)


def answer_of(api: RunningHttp, path: str, body: bytes) -> tuple[int, bytes]:
    """Sends a body; returns the status and the answer. Blocks."""
    connection = http.client.HTTPConnection("127.0.0.1", api.server.port, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def called(
    api: RunningHttp, message: generation_pb2.GenerateRequest
) -> list[generation_pb2.GenerateStreamResponse]:
    """Sends a message over gRPC; returns the messages of the answer. Blocks."""
    with open_blocking_channel(api.router.server.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return list(stub.GenerateStream(message, timeout=60))


def time_of_health(api: RunningHttp) -> float:
    """Seconds until `/health` answers. Blocks."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", api.server.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
    return time.monotonic() - started


def time_of_a_pass(ids: list[int]) -> float:
    """Seconds of this thread for a loop over all tokens."""
    began = time.thread_time()
    for token in ids:
        assert token
    return time.thread_time() - began


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function in a thread of its own: the router may need all threads of the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def end(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            outcome = function(*args), None
        except Exception as error:
            outcome = None, error
        loop.call_soon_threadsafe(end, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future


@pytest.mark.parametrize(
    "shape",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in BODIES],
)
async def test_no_body_blocks_the_event_loop(shape: str):
    path, make, status, field = BODIES[shape]
    body = make()
    assert MAX_BYTES * 0.9 < len(body) <= MAX_BYTES
    small = json.dumps(CHAT | {"prompt": "a", "input": "a"}).encode()
    async with running() as api:
        await in_thread(posted, api, path, small)
        with watched_loops() as watch:
            got, answer = await in_thread(posted, api, path, body)
    watch.assert_never_blocked()
    assert got == status, answer
    if status == 400:
        error = answer["error"]
        assert (error.get("param") or error["message"]).startswith(field), answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, MESSAGES, RESPONSES])
async def test_neither_a_body_nor_its_ignored_fields_are_kept_while_an_answer_runs(path: str):
    ignored = {f"x{i}": ["a" * 2**20] for i in range(15)}
    prompt = {COMPLETIONS: {"prompt": "a"}, RESPONSES: {"input": "a"}}.get(path, CHAT)
    body = json.dumps({"max_tokens": 2} | prompt | ignored).encode()
    decode = FakeDecode(script_of("ab"), pause_after=1)
    async with running_http(decode, chat_template=template()) as api:
        tracemalloc.start()
        try:
            answer = asyncio.ensure_future(in_thread(posted, api, path, body))
            await decode.changes.until(lambda: decode.running)
            kept_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        decode.resume()
        assert (await answer)[0] == 200
    assert kept_bytes < len(body) / 4


def of_messages(unit: str) -> generation_pb2.GenerateRequest:
    text = unit * ((MAX_BYTES - 100) // len(unit))
    return generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages_json=text))


def of_empty_prompts() -> generation_pb2.GenerateRequest:
    prompts = generation_pb2.Prompts.FromString(b"\x0a\x00" * (MAX_BYTES // 2 - 100))
    return generation_pb2.GenerateRequest(prompts=prompts)


def of_empty_stops() -> generation_pb2.GenerateRequest:
    stopping = common_pb2.StoppingParams(stop=[""] * (MAX_BYTES // 2 - 100))
    return generation_pb2.GenerateRequest(text="a", stopping=stopping)


OVER_GRPC: dict[str, tuple[Callable[[], generation_pb2.GenerateRequest], str]] = {
    "arrays": (partial(of_messages, "[],"), "messages_json has more than 131072 objects"),
    "nested": (partial(of_messages, "["), "messages_json has more than 131072 objects"),
    "prompts over gRPC": (of_empty_prompts, "prompts has 8388508 entries"),
    "token ids over gRPC": (lambda: request([7] * (MAX_BYTES - 100)), "prompt has 16777116"),
    "stops over gRPC": (of_empty_stops, "stop has 8388508 entries"),
}


@pytest.mark.parametrize(
    "shape",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OVER_GRPC],
)
async def test_no_message_over_grpc_blocks_the_event_loop(shape: str):
    make, error = OVER_GRPC[shape]
    message = make()
    async with running() as api:
        with watched_loops() as watch, pytest.raises(grpc.RpcError) as caught:
            await in_thread(called, api, message)
    watch.assert_never_blocked()
    assert error in str(caught.value)


@pytest.mark.parametrize("path", [COMPLETIONS, "grpc"])
async def test_many_token_ids_do_not_block_the_event_loop(path: str):
    ids = [7 + i % 900 for i in range(2**17)]
    message = request(ids, max_tokens=2)
    async with running(**LARGE_REPLICA) as api:
        with watched_loops() as watch:
            if path == "grpc":
                responses = await in_thread(called, api, message)
                assert responses[-1].usage.prompt_tokens == 2**17
            else:
                body = json.dumps({"prompt": ids, "max_tokens": 2}).encode()
                status, answer = await in_thread(posted, api, path, body)
                assert status == 200, answer
                assert answer["usage"]["prompt_tokens"] == 2**17
    watch.assert_never_blocked()


@pytest.mark.parametrize("path", [COMPLETIONS, "grpc"])
async def test_a_long_prompt_delays_other_requests_by_a_few_milliseconds(path: str):
    """The best of some requests, as a busy machine makes any callback slower now and then."""
    ids = [7 + i % 900 for i in range(100_000)]
    message, body = request(ids, max_tokens=2), json.dumps({"prompt": ids, "max_tokens": 2})
    longest, passes = [], []
    async with running(**LARGE_REPLICA) as api:
        for _ in range(4):
            passes.append(time_of_a_pass(ids))
            with watched_loops() as watch:
                if path == "grpc":
                    await in_thread(called, api, message)
                else:
                    await in_thread(posted, api, path, body.encode())
            longest.append(watch.longest_s)
    assert min(longest) < MAX_STALL_PASSES * min(passes), (longest, passes)


@pytest.mark.parametrize("options", [{}, {"echo": True, "logprobs": 5}, {"stream": True}], ids=str)
async def test_many_log_probabilities_do_not_block_the_event_loop(options: dict[str, Any]):
    prompt = {"prompt": [7 + i % 900 for i in range(2**12)], "prompt_logprobs": 5}
    body = json.dumps(prompt | {"max_tokens": 2} | options).encode()
    async with running(**LARGE_REPLICA) as api:
        await in_thread(answer_of, api, COMPLETIONS, SMALL.encode())
        with watched_loops() as watch:
            status, answer = await in_thread(answer_of, api, COMPLETIONS, body)
    watch.assert_never_blocked()
    assert status == 200
    assert answer.count(b'"decoded_token"') >= 5 * (2**12 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", BUSY_SHAPES)
async def test_health_is_answered_while_large_bodies_are_parsed(shape: str):
    path, make, _, _ = BODIES[shape]
    body = make()
    async with running() as api:
        began = time.monotonic()
        posts = [asyncio.ensure_future(in_thread(posted, api, path, body)) for _ in range(4)]
        longest_s = 0.0
        while not all(post.done() for post in posts):
            longest_s = max(longest_s, await in_thread(time_of_health, api))
        await asyncio.gather(*posts)
        all_s = time.monotonic() - began
    print(f"{shape}: longest {longest_s:.3f} s of {all_s:.3f} s")
    # A busy machine takes any time for both.
    assert longest_s < max(1.5, all_s / 2)


@pytest.mark.slow
@pytest.mark.parametrize("shape", BODIES)
async def test_a_body_costs_bounded_memory(shape: str):
    path, make, _, _ = BODIES[shape]
    body = make()
    async with running() as api:
        tracemalloc.start()
        try:
            await in_thread(posted, api, path, body)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    print(f"{shape}: {peak_bytes / 2**20:.0f} MiB")
    assert peak_bytes < MAX_MULTIPLE * MAX_BYTES
