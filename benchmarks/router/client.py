"""`python -m benchmarks.router.client grpc|http PORT STREAMS ROUNDS TOKENS PROBES [RATE]`: loads.

Starts all streams at once, or RATE per second, each of them ROUNDS times, and one request after the
other of a single token beside them, whose first-token times are what a new user sees. Prints JSON:
messages, seconds, first-token times, and the most streams that ran at the same time.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from baton.v1 import common_pb2, generation_pb2
from rpc.process_limits import raise_descriptor_limit

_PROMPT = "Return a list of names"
_METHOD = "/baton.v1.GenerationService/GenerateStream"
_READ_BYTES = 1 << 16
_STREAMS_PER_CHANNEL = 100
_MAX_CHANNELS = 16
_MAX_CONNECTING = 256
"""The most connections that are opened at the same time, far below a server's backlog."""


async def _grpc_messages(channel: grpc.aio.Channel, num_tokens: int) -> AsyncGenerator[int, None]:
    """Yields 1 per message of a stream."""
    request = generation_pb2.GenerateRequest(
        text=_PROMPT,
        sampling=common_pb2.SamplingParams(temperature=0),
        stopping=common_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
    )
    method: Any = channel.unary_stream(_METHOD)
    async for _ in method(request.SerializeToString()):
        yield 1


async def _http_messages(
    port: int, num_tokens: int, connecting: asyncio.Semaphore
) -> AsyncGenerator[int, None]:
    """Yields how many events each piece of a stream has. Reads bytes, so that it costs little."""
    body = json.dumps(
        {
            "model": "demo_model",
            "prompt": _PROMPT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "max_tokens": num_tokens,
        }
    ).encode()
    async with connecting:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    is_whole, first = False, b""
    try:
        while piece := await reader.read(_READ_BYTES):
            first = first or piece
            is_whole = is_whole or b"[DONE]" in piece
            if num_events := piece.count(b'data: {"'):
                yield num_events
    finally:
        writer.close()
    if not is_whole:
        raise RuntimeError(f"a stream ended early; it began with {first[:500]!r}")


class _Load:
    """Runs the requests of one server."""

    def __init__(self, kind: str, port: int) -> None:
        self._port = port
        self._is_grpc = kind == "grpc"
        self._channels: list[grpc.aio.Channel] = []
        self._num_streams = 0
        self.num_messages = 0
        self._num_running = self.max_running = 0
        self._connecting = asyncio.Semaphore(_MAX_CONNECTING)

    def _messages(self, num_tokens: int) -> AsyncGenerator[int, None]:
        if self._is_grpc:
            return _grpc_messages(self._channel(), num_tokens)
        return _http_messages(self._port, num_tokens, self._connecting)

    def _channel(self) -> grpc.aio.Channel:
        """The channel of the next stream, which one process of the router serves. Clients of many
        streams are many.
        """
        number = self._num_streams // _STREAMS_PER_CHANNEL % _MAX_CHANNELS
        self._num_streams += 1
        if number == len(self._channels):
            options = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=options)
            self._channels.append(channel)
        return self._channels[number]

    async def stream(self, num_tokens: int, *, is_probe: bool = False) -> float:
        """Reads one stream; returns the seconds until its first message. A probe is not counted
        among the running streams.
        """
        started_at, first_s = time.monotonic(), 0.0
        async with aclosing(self._messages(num_tokens)) as messages:
            async for number in messages:
                if not first_s:
                    first_s = time.monotonic() - started_at
                    self._num_running += not is_probe
                    self.max_running = max(self.max_running, self._num_running)
                self.num_messages += number
        self._num_running -= not is_probe
        return first_s


async def _run(
    kind: str,
    port: int,
    num_streams: int,
    num_rounds: int,
    num_tokens: int,
    num_probes: int,
    starts_per_s: int = 0,
) -> None:
    load = _Load(kind, port)
    await load.stream(2)
    load.num_messages, started_at = 0, time.monotonic()

    async def repeat(number: int) -> None:
        if starts_per_s:
            await asyncio.sleep(number / starts_per_s)
        for _ in range(num_rounds):
            await load.stream(num_tokens)

    streams = asyncio.gather(*(repeat(number) for number in range(num_streams)))
    first_s = [await load.stream(1, is_probe=True) for _ in range(num_probes)]
    await streams
    report = {
        "num_messages": load.num_messages - num_probes,
        "seconds": time.monotonic() - started_at,
        "max_running": load.max_running,
        "first_token_ms": [1000 * seconds for seconds in first_s],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    raise_descriptor_limit()
    asyncio.run(_run(sys.argv[1], *map(int, sys.argv[2:])))
