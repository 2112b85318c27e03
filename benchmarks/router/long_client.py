"""`python -m benchmarks.router.long_client grpc|http text|tokens PORT REQUESTS TOKENS PAUSE_MS`.

Sends long prompts, one after the other. Beside them it sends short requests, with a pause after
each; with a pause of 0 it sends none. Prints JSON: tokens per prompt, seconds until each answer had
ended, of long and of short requests.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from baton.common.model_files.named_models import demo_model_path
from baton.v1 import common_pb2, generation_pb2
from router.requests.tokenizer import Tokenizer
from rpc.channels import CHANNEL_OPTIONS

_METHOD = "/baton.v1.GenerationService/Generate"
_NUM_TOKENS = 2  # the first is prefill's, the second decode's
_SHORT = 16

_Call = Callable[[bytes], Awaitable[None]]


def _grpc_request(prompt: list[int] | str) -> bytes:
    request = generation_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(temperature=0),
        stopping=common_pb2.StoppingParams(max_tokens=_NUM_TOKENS, ignore_eos=True),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request.SerializeToString()


def _grpc_call(port: int) -> _Call:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)
    method: Any = channel.unary_unary(_METHOD)

    async def call(request: bytes) -> None:
        await method(request)

    return call


def _http_request(prompt: list[int] | str) -> bytes:
    fields = {"prompt": prompt, "temperature": 0, "max_tokens": _NUM_TOKENS, "ignore_eos": True}
    body = json.dumps({"model": demo_model_path().name, **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _http_call(port: int) -> _Call:
    async def call(request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode(errors="replace"))

    return call


async def _seconds(call: _Call, request: bytes) -> float:
    started_at = time.monotonic()
    await call(request)
    return time.monotonic() - started_at


async def _run(
    kind: str, form: str, port: int, num_requests: int, num_tokens: int, pause_ms: int
) -> None:
    tokenizer, rng = Tokenizer.load(demo_model_path()), random.Random(0)
    request_of = _grpc_request if kind == "grpc" else _http_request
    call = (_grpc_call if kind == "grpc" else _http_call)(port)

    def prompt(length: int) -> list[int] | str:
        token_ids = [rng.randrange(4, tokenizer.vocab_size) for _ in range(length)]
        return tokenizer.decode(token_ids) if form == "text" else token_ids

    prompts = [prompt(num_tokens) for _ in range(num_requests)]
    num_made = [len(tokenizer.encode(p) if isinstance(p, str) else p) for p in prompts]
    long, short = list(map(request_of, prompts)), request_of(prompt(_SHORT))
    await call(short)

    short_s: list[float] = []
    is_done = asyncio.Event()

    async def probe() -> None:
        while pause_ms and not is_done.is_set():
            short_s.append(await _seconds(call, short))
            await asyncio.sleep(pause_ms / 1000)

    probes = asyncio.create_task(probe())
    long_s = [await _seconds(call, item) for item in long]
    is_done.set()
    await probes  # on a busy machine the first short request may be the only one
    report = {
        "num_tokens": sum(num_made) / num_requests,
        "long_s": long_s,
        "short_s": short_s,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    _kind, _form, *_numbers = sys.argv[1:]
    asyncio.run(_run(_kind, _form, *map(int, _numbers)))
