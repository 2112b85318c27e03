"""A hundred clients that start long streams and do not read them: the router's memory stays
bounded, others are served, and the tiers are freed when they leave.
"""

import asyncio
import json
import socket
import struct
import sys
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest

from baton.v1 import generation_pb2_grpc
from tests.support.fake_workers import MODEL, FakeDecode, running_workers
from tests.support.running_router import request, text_of, token_ids_of, tokenizer
from tests.support.tokenizer_folders import write_byte_level_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NUM_CLIENTS = 100
NUM_TOKENS = 250
SCRIPT = [50 + i % 200 for i in range(NUM_TOKENS)]
LONG_NAME = "a" * 40_000
"""Each chunk repeats it. All chunks of one client have 10 MB if no tokens are merged, far more than
sockets hold on any machine."""
MAX_GROWTH_BYTES = 70 * 2**20
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


class Router:
    """A router process.

    Attributes:
        http_port, grpc_port: where it listens.
    """

    def __init__(self, process: asyncio.subprocess.Process, http_port: int, grpc_port: int):
        self.http_port = http_port
        self.grpc_port = grpc_port
        self._process = psutil.Process(process.pid)

    def memory_bytes(self) -> int:
        return self._process.memory_info().rss

    async def complete(self) -> str:
        """The text of two tokens."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http_port)
        writer.write(post({"model": MODEL, "prompt": "x", "max_tokens": 2}, "Connection: close"))
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]


@asynccontextmanager
async def running_router_process(decode: FakeDecode, folder):
    model = write_byte_level_folder(folder / MODEL)
    ports = [folder / "http_port", folder / "grpc_port"]
    flags = ["--model", model, "--served-model-name", MODEL, LONG_NAME, "--decode", decode.address]
    flags += ["--port", 0, "--grpc-port", 0, "--port-file", ports[0], "--grpc-port-file", ports[1]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *map(str, flags), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await until(lambda: all(port.exists() and port.read_text() for port in ports))
        await until(lambda: decode.num_connects)
        router = Router(process, *(int(port.read_text()) for port in ports))
        yield router
    finally:
        process.kill()
        await process.wait()


async def until(condition) -> None:
    """Waits for a state of other processes."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in 200 s")


def post(body, *headers: str) -> bytes:
    text = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + text


async def start_client(port: int) -> socket.socket:
    """Starts a stream; its answer finds little room on the client's side."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    body = {"model": LONG_NAME, "prompt": "x", "max_tokens": NUM_TOKENS, "stream": True}
    await loop.sock_sendall(client, post(body, "Connection: close"))
    return client


async def all_of(client: socket.socket) -> str:
    loop, parts = asyncio.get_running_loop(), []
    while part := await loop.sock_recv(client, 2**20):
        parts.append(part)
    return b"".join(parts).decode()


def leave(client: socket.socket) -> None:
    """Leaves with a reset, as a client that crashes."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


async def test_http_streams_that_are_not_read(tmp_path):
    decode = FakeDecode(SCRIPT, max_num_seqs=2 * NUM_CLIENTS)
    async with running_workers(decode), running_router_process(decode, tmp_path) as router:
        assert await router.complete() == tokenizer().decode(SCRIPT[:2])
        before = router.memory_bytes()
        clients = [await start_client(router.http_port) for _ in range(NUM_CLIENTS)]
        assert await router.complete() == tokenizer().decode(SCRIPT[:2])
        await until(lambda: len(decode.starts) == NUM_CLIENTS + 2 and not decode.running)
        assert await router.complete() == tokenizer().decode(SCRIPT[:2])
        growth = router.memory_bytes() - before
        answer = await asyncio.wait_for(all_of(clients[0]), 60)
        for client in clients:
            leave(client)
        assert await router.complete() == tokenizer().decode(SCRIPT[:2])
    assert growth < MAX_GROWTH_BYTES
    lines = [line[6:] for line in answer.splitlines() if line.startswith("data: {")]
    texts = [json.loads(line)["choices"][0]["text"] for line in lines]
    assert "".join(texts) == tokenizer().decode(SCRIPT)
    assert len(texts) < NUM_TOKENS / 2


async def test_grpc_streams_that_are_not_read(tmp_path):
    decode = FakeDecode(SCRIPT, max_num_seqs=2 * NUM_CLIENTS)
    async with running_workers(decode), running_router_process(decode, tmp_path) as router:
        await router.complete()
        before = router.memory_bytes()
        address = f"127.0.0.1:{router.grpc_port}"
        async with grpc.aio.insecure_channel(address, SMALL_WINDOW) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            names = [f"{i:03d}" + "n" * 120 for i in range(NUM_CLIENTS)]
            messages = [request("x", request_id=n, max_tokens=NUM_TOKENS) for n in names]
            calls = [stub.GenerateStream(message) for message in messages]
            await until(lambda: len(decode.starts) == NUM_CLIENTS + 1 and not decode.running)
            await router.complete()
            growth = router.memory_bytes() - before
            responses = [response async for response in calls[0]]
            for call in calls[1:]:
                call.cancel()
            await router.complete()
    assert growth < MAX_GROWTH_BYTES
    assert token_ids_of(responses) == SCRIPT
    assert text_of(responses) == tokenizer().decode(SCRIPT)
    assert len(responses) < NUM_TOKENS / 2


async def test_clients_that_leave_free_the_decode_tier(tmp_path):
    decode = FakeDecode(SCRIPT, pause_after=3, max_num_seqs=2 * NUM_CLIENTS)
    async with running_workers(decode), running_router_process(decode, tmp_path) as router:
        clients = [await start_client(router.http_port) for _ in range(NUM_CLIENTS)]
        await until(lambda: len(decode.running) == NUM_CLIENTS)
        for client in clients:
            leave(client)
        await until(lambda: len(decode.cancels) == NUM_CLIENTS)
        assert not decode.running
        decode.resume()
        assert await router.complete()
