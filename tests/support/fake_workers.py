"""Prefill and decode workers whose model is a script, on real gRPC servers.

Every worker "generates" the same tokens: `script[i]` is the i-th one, whatever
the prompt. A router is right if its clients get exactly the script.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from baton.errors import BatonError
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.errors import to_worker_error
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from rpc.worker import WorkerServicer

MODEL = "scripted"
NAMESPACE = bytes(range(32))
BLOCK_SIZE = 4
VOCAB_SIZE = 1000
EOS_TOKEN_ID = 1
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 4096

_WORKER_NUMBERS = itertools.count()


class Changes:
    """Lets tests wait for a condition without sleeping."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await self._event.wait()


class FakeWorker:
    """What both tiers share: a server, a description and a load."""

    role: int
    service_name: str

    def __init__(self, script: Sequence[int], *, host: str = "127.0.0.1", **info: Any) -> None:
        self.script = list(script)
        self.host = host
        self.info = worker_pb2.GetInfoResponse(
            **{
                "worker_id": f"worker-{next(_WORKER_NUMBERS)}",
                "role": self.role,
                "model": MODEL,
                "namespace": NAMESPACE,
                "block_size": BLOCK_SIZE,
                "num_blocks": NUM_BLOCKS,
                "max_model_len": MAX_MODEL_LEN,
                "vocab_size": VOCAB_SIZE,
                "eos_token_ids": [EOS_TOKEN_ID],
                "max_num_seqs": 64,
                "kv_connector": "memory",
                "version": "test",
            }
            | info
        )
        self.current_load = worker_pb2.WorkerLoad(
            num_free_blocks=self.info.num_blocks, num_blocks=self.info.num_blocks
        )
        self.changes = Changes()
        self.refusal: BatonError | None = None
        self.is_frozen = False
        self.num_infos = 0
        self.running: dict[str, Any] = {}
        self._server: RpcServer | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self, port: int = 0) -> "FakeWorker":
        names = [self.service_name, "baton.v1.WorkerService"]
        self._server = RpcServer(ServerConfig(host=self.host, port=port), names)
        self._server.add_servicer(
            worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._worker_servicer()
        )
        self._add_servicer(self._server)
        await self._server.listen()
        self._server.set_serving(True)
        self.port = self._server.port
        return self

    async def stop(self) -> None:
        """Dies: every call breaks."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)
            self.running.clear()

    async def __aenter__(self) -> "FakeWorker":
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    # rpc.worker.Worker

    def load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad.FromString(self.current_load.SerializeToString())

    def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    async def drain(self, timeout_s: float) -> int:
        return 0

    def _worker_servicer(self) -> WorkerServicer:
        return _FreezableServicer(self, lambda: None)

    def _add_servicer(self, server: RpcServer) -> None:
        raise NotImplementedError

    def _finish_reason(self, request: prefill_pb2.WorkerRequest, num_tokens: int) -> int:
        if self.script[num_tokens - 1] in request.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP
        if num_tokens >= request.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED


class _FreezableServicer(WorkerServicer):
    """A stopped process keeps its connections; it only never answers."""

    async def GetInfo(self, request, context):
        self._worker.num_infos += 1
        return await super().GetInfo(request, context)

    async def GetLoad(self, request, context):
        if self._worker.is_frozen:
            await asyncio.Event().wait()
        return await super().GetLoad(request, context)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Returns the script's first token.

    `hold` keeps prompts waiting; `cancelled` counts those whose caller left.
    """

    role = worker_pb2.WORKER_ROLE_PREFILL
    service_name = "baton.v1.PrefillService"

    def __init__(self, script: Sequence[int], *, hold: bool = False, **info: Any) -> None:
        super().__init__(script, **info)
        self.requests: list[prefill_pb2.WorkerRequest] = []
        self.released: list[str] = []
        self.num_cancelled = 0
        self.has_handoff = True
        self._may_answer = asyncio.Event()
        if not hold:
            self._may_answer.set()

    def answer(self) -> None:
        """Ends `hold`."""
        self._may_answer.set()

    def _add_servicer(self, server: RpcServer) -> None:
        server.add_servicer(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, self)

    async def Prefill(self, request, context):
        self.requests.append(request.request)
        self.changes.notify()
        if self.refusal is not None:
            raise self.refusal
        try:
            await self._may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.changes.notify()
            raise
        reason = self._finish_reason(request.request, 1)
        handoff = None if reason or not self.has_handoff else self._handoff(request.request)
        return prefill_pb2.PrefillResponse(
            token_ids=self.script[:1],
            finish_reason=reason,
            handoff=handoff,
            cached_tokens=BLOCK_SIZE,
            timings=common_pb2.Timings(queue_ms=1, prefill_ms=2, transfer_ms=3),
        )

    async def ReleaseHandoff(self, request, context):
        self.released.append(request.handoff_id)
        self.changes.notify()
        return prefill_pb2.ReleaseHandoffResponse()

    def _handoff(self, request: prefill_pb2.WorkerRequest) -> prefill_pb2.KvHandoff:
        return prefill_pb2.KvHandoff(
            format_version=1,
            handoff_id=f"handoff-{request.request_id}",
            namespace=NAMESPACE,
            num_tokens=len(request.prompt_token_ids),
            connector="memory",
        )


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Continues the script, one token of every request per message.

    `pause_after`: no request gets more tokens than this until `resume(…)`.
    """

    role = worker_pb2.WORKER_ROLE_DECODE
    service_name = "baton.v1.DecodeService"

    def __init__(
        self, script: Sequence[int], *, pause_after: int | None = None, **info: Any
    ) -> None:
        super().__init__(script, **info)
        self.pause_after = pause_after
        self.starts: list[decode_pb2.StartDecode] = []
        self.cancels: list[str] = []
        self.num_connects = 0
        self.num_sent = 0

    def _add_servicer(self, server: RpcServer) -> None:
        server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self)

    def resume(self, pause_after: int | None = None) -> None:
        self.pause_after = pause_after
        self.changes.notify()

    def fail_running(self, error: BatonError, token_ids: Sequence[int] = ()) -> None:
        """Ends every request with this error and refuses more with it, as a dead engine does.

        The last output carries `token_ids`, which nobody has read yet.
        """
        self.refusal = error
        for request_id in list(self.running):
            self._tasks.pop(request_id).cancel()
            del self.running[request_id]
            output = _output(request_id, finish_reason="ERROR", error=to_worker_error(error))
            output.token_ids.extend(token_ids)
            self._outputs.put_nowait(output)

    def cancel_stream(self) -> None:
        """Ends the Connect stream with CANCELLED, as a stopping server may."""
        self._outputs.put_nowait(None)

    async def Connect(self, request_iterator, context) -> AsyncIterator[Any]:
        self.num_connects += 1
        outputs: asyncio.Queue[decode_pb2.DecodeOutput | None] = asyncio.Queue()
        self._outputs = outputs
        self._tasks = tasks = {}
        reader = asyncio.create_task(self._read(request_iterator, outputs, tasks))
        try:
            while True:
                output = await outputs.get()
                if output is None:
                    await context.abort(grpc.StatusCode.CANCELLED, "by the worker")
                self.num_sent += len(output.token_ids)
                yield decode_pb2.ConnectResponse(outputs=[output])
                self.changes.notify()
        finally:
            for task in (reader, *tasks.values()):
                task.cancel()
            self.running.clear()
            self.changes.notify()

    async def _read(self, commands, outputs, tasks) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "start":
                request_id = command.start.request.request_id
                self.starts.append(command.start)
                tasks[request_id] = asyncio.create_task(self._generate(command.start, outputs))
            else:
                request_id = command.cancel.request_id
                self.cancels.append(request_id)
                self.running.pop(request_id, None)
                tasks.pop(request_id).cancel()
            self.changes.notify()

    async def _generate(self, start: decode_pb2.StartDecode, outputs: asyncio.Queue) -> None:
        request_id = start.request.request_id
        if self.refusal is not None:
            error = to_worker_error(self.refusal)
            outputs.put_nowait(_output(request_id, finish_reason="ERROR", error=error))
            return
        self.running[request_id] = start
        self.changes.notify()
        first_only = {
            "cached_tokens": 2 * BLOCK_SIZE,
            "timings": common_pb2.Timings(queue_ms=10, prefill_ms=20, load_ms=30),
        }
        for position in itertools.count(len(start.output_token_ids)):
            await self._until_may_send(position)
            reason = self._finish_reason(start.request, position + 1)
            outputs.put_nowait(
                decode_pb2.DecodeOutput(
                    request_id=request_id,
                    token_ids=[self.script[position]],
                    finish_reason=reason,
                    **first_only,
                )
            )
            first_only = {}
            if reason:
                del self.running[request_id]
                return
            await asyncio.sleep(0)

    async def _until_may_send(self, position: int) -> None:
        while self.pause_after is not None and position >= self.pause_after:
            await self.changes._event.wait()


def _output(request_id: str, *, finish_reason: str, error) -> decode_pb2.DecodeOutput:
    return decode_pb2.DecodeOutput(
        request_id=request_id,
        finish_reason=common_pb2.FinishReason.Value(f"FINISH_REASON_{finish_reason}"),
        error=error,
    )


async def first_of(workers: Sequence[Any], condition: Callable[[Any], object]) -> Any:
    """The first worker that a condition becomes true of."""
    waiters = {
        asyncio.create_task(worker.changes.until(lambda w=worker: condition(w))): worker
        for worker in workers
    }
    done, pending = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    for waiter in pending:
        waiter.cancel()
    found = done.pop()
    found.result()  # raises if the time was up
    return waiters[found]


@contextlib.asynccontextmanager
async def running_workers(*workers: FakeWorker) -> AsyncIterator[contextlib.AsyncExitStack]:
    """Starts workers and stops those that still live at the end, after what is on the stack."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield stack
