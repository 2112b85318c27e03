"""`python -m benchmarks.router.floors grpc|http STEP_MS PORT_FILE`: streams of constant tokens.

A bare grpc.aio server, or a bare uvicorn server, whose streams get one constant message per step.
What they cost is the floor of a router that sends one message per token.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from typing_extensions import override

from baton.v1 import generation_pb2, generation_pb2_grpc
from rpc.channels import SERVER_OPTIONS
from rpc.listeners import write_port_file

_MESSAGE = generation_pb2.GenerateStreamResponse(request_id="r" * 32, token_ids=(7,), text=" word")
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"demo_model","choices":[{"index":0,"text":" word",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"


class _FloorSteps:
    """Wakes all streams once per step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            passed, self._next = self._next, asyncio.Event()
            passed.set()

    async def wait(self) -> None:
        await self._next.wait()


class _GrpcFloor(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, steps: _FloorSteps) -> None:
        self._steps = steps

    @override
    async def GenerateStream(  # type: ignore[override]  # the stubs expect a generator
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> None:
        for _ in range(request.stopping.max_tokens):
            await self._steps.wait()
            await context.write(_MESSAGE)


async def _serve_grpc(steps: _FloorSteps, port_file: Path) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        _GrpcFloor(steps),  # type: ignore[abstract]  # no other method is called
        server,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_port_file(port_file, port)
    await server.wait_for_termination()


async def _serve_http(steps: _FloorSteps, port_file: Path) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        num_tokens = int(body.rpartition(b'"max_tokens":')[2].partition(b",")[0].strip(b" }"))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(num_tokens):
            await steps.wait()
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})

    config = uvicorn.Config(application, port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    write_port_file(port_file, server.servers[0].sockets[0].getsockname()[1])
    await server.main_loop()


async def _run(kind: str, step_ms: float, port_file: Path) -> None:
    steps = _FloorSteps(step_ms / 1000)
    serve = _serve_grpc if kind == "grpc" else _serve_http
    await asyncio.gather(steps.run(), serve(steps, port_file))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
