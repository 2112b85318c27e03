"""`python -m benchmarks.router.scripted_worker STEP_MS PORT_FILE`: decodes without a model.

Each step it sends the next token of every running request, as an engine does, so that a router
is all that a benchmark measures. With a step of 0 ms, steps are as fast as the router reads.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from baton.common.model_files.named_models import demo_model_path
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    request_pb2,
    worker_pb2,
)
from router.requests.tokenizer import Tokenizer
from rpc.server import RpcServer, serve
from rpc.server_config import ServerConfig
from rpc.worker import Worker, WorkerTier

_TEXT = (
    "Return a list of the names of all files in the folder, sorted by the time of their last "
    "change. If the folder does not exist, an OSError is raised. "
)
_SERVICES = ("baton.v1.DecodeService", "baton.v1.WorkerService")


@dataclass(slots=True)
class _Running:
    """A request, and how many tokens it has."""

    request_id: str
    max_tokens: int
    num_tokens: int = 0


class _Requests:
    """The running requests; makes the outputs of a step."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._running: dict[str, _Running] = {}
        self._arrived = asyncio.Event()

    def add(self, spec: request_pb2.RequestSpec) -> None:
        request = _Running(spec.request_id, spec.stopping.max_tokens)
        self._running[spec.request_id] = request
        self._arrived.set()

    def drop(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    async def wait(self) -> None:
        """Returns when a request runs."""
        while not self._running:
            self._arrived.clear()
            await self._arrived.wait()

    def step(self) -> decode_pb2.ConnectResponse:
        """Returns the next token of every request."""
        response = decode_pb2.ConnectResponse()
        for request in list(self._running.values()):
            token_id = self._token_ids[request.num_tokens % len(self._token_ids)]
            request.num_tokens += 1
            output = response.outputs.add(request_id=request.request_id, token_ids=(token_id,))
            if request.num_tokens >= request.max_tokens:
                output.finish_reason = common_pb2.FINISH_REASON_LENGTH
                output.is_last = True
                del self._running[request.request_id]
        return response


class _DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Runs each router's requests."""

    def __init__(self, step_s: float, token_ids: Sequence[int]) -> None:
        self._step_s = step_s
        self._token_ids = token_ids

    @override
    async def Connect(  # type: ignore[override]  # the stubs expect a generator
        self, request_iterator: AsyncIterator[decode_pb2.ConnectRequest], context: Any
    ) -> None:
        requests = _Requests(self._token_ids)
        reader = asyncio.create_task(_read_commands(request_iterator, requests))
        loop = asyncio.get_running_loop()
        try:
            for number in itertools.count():
                started_at = loop.time()
                await requests.wait()
                await context.write(requests.step())
                remaining_s = self._step_s - (loop.time() - started_at)
                if remaining_s > 0 or number % 64 == 0:
                    await asyncio.sleep(max(0.0, remaining_s))
        finally:
            reader.cancel()


async def _read_commands(
    commands: AsyncIterator[decode_pb2.ConnectRequest], requests: _Requests
) -> None:
    async for command in commands:
        if command.HasField("start"):
            requests.add(command.start.spec)
        elif command.HasField("cancel"):
            requests.drop(command.cancel.request_id)


class _ScriptedWorker(Worker):
    """The description of the replica."""

    def __init__(self, vocab_size: int) -> None:
        self._info = worker_pb2.GetInfoResponse(
            worker_id="scripted",
            role=worker_pb2.WORKER_ROLE_DECODE,
            model=demo_model_path().name,
            namespace=bytes(32),
            block_size=16,
            pool_block_size=16,
            num_blocks=1 << 20,
            max_pool_tokens=1 << 16,
            max_model_len=1 << 16,
            vocab_size=vocab_size,
            max_num_seqs=4096,
            kv_dtype="float32",
            kv_connector="memory",
            version="scripted",
        )

    @property
    @override
    def info(self) -> worker_pb2.GetInfoResponse:
        return self._info

    @override
    def change_role(self, role: "worker_pb2.WorkerRole.ValueType") -> None:
        raise NotImplementedError

    @override
    def load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(num_free_blocks=1 << 20, num_blocks=1 << 20)

    @override
    def counters(self) -> worker_pb2.WorkerCounters:
        return worker_pb2.WorkerCounters()

    @override
    def kv_backends(self) -> Sequence[worker_pb2.KvBackendStatus]:
        return ()

    @override
    def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    @override
    async def reset_prefix_cache(self) -> int:
        return 0

    @override
    async def watch_kv_events(self) -> AsyncGenerator[worker_pb2.WatchKvEventsResponse, None]:
        response = worker_pb2.WatchKvEventsResponse()
        response.events.add(sequence_number=0).cleared.SetInParent()
        yield response
        await asyncio.Event().wait()

    @override
    async def drain(self, timeout_s: float) -> int:
        return 0

    @override
    async def wait_failed(self) -> BaseException:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    @override
    async def close(self) -> None:
        return


async def _run(step_ms: float, port_file: str) -> None:
    tokenizer = Tokenizer.load(demo_model_path())
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)

    async def start(server: RpcServer) -> WorkerTier:
        servicer = _DecodeServicer(step_ms / 1000, token_ids)
        server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, servicer)
        return WorkerTier(_ScriptedWorker(tokenizer.vocab_size), server)

    await serve(ServerConfig(port_file=port_file), _SERVICES, start)


if __name__ == "__main__":
    asyncio.run(_run(float(sys.argv[1]), sys.argv[2]))
