"""Prefill and decode workers on real gRPC servers that generate scripted tokens.

Every worker generates the same tokens for any prompt: `script[i]` is the i-th one.
Candidates after the first have their own scripts, `others`, if these are given.
A router is correct if its clients get exactly the scripts.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from baton.common.errors import BatonError
from baton.common.security.cluster import ClusterSecurity
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from rpc.errors import to_worker_error
from rpc.server import RpcServer
from rpc.server_access import cluster_access
from rpc.server_config import ServerConfig
from rpc.worker import WorkerServicer
from tests.support.fake_candidates import (
    FakeCandidates,
    add_logprobs,
    add_prompt_logprobs,
    fake_logprobs,
    is_ranked,
    num_candidates,
)
from tests.support.ports import reserved_port

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
        async with asyncio.timeout(60):
            while not condition():
                await self._event.wait()


class FakeWorker:
    """Base of both tiers' workers: a server, a description and a load."""

    role: int
    service_name: str

    def __init__(
        self,
        script: Sequence[int],
        *,
        others: Sequence[Sequence[int]] = (),
        host: str = "127.0.0.1",
        security: ClusterSecurity | None = None,
        **info: Any,
    ) -> None:
        self.script = list(script)
        self.security = security or ClusterSecurity()
        self.others = [list(other) for other in others]
        self.host = host
        self.info = worker_pb2.GetInfoResponse(
            **{
                "worker_id": f"worker-{next(_WORKER_NUMBERS)}",
                "role": self.role,
                "model": MODEL,
                "namespace": NAMESPACE,
                "block_size": BLOCK_SIZE,
                "pool_block_size": BLOCK_SIZE,
                "kv_dtype": "float32",
                "model_fingerprint": "0123456789abcdef",
                "layout_version": 1,
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
        if not self.info.max_pool_tokens:
            pool_tokens = self.info.num_blocks * self.info.pool_block_size
            self.info.max_pool_tokens = min(pool_tokens, self.info.max_model_len)
        self.current_load = worker_pb2.WorkerLoad(
            num_free_blocks=self.info.num_blocks, num_blocks=self.info.num_blocks
        )
        self.current_counters = worker_pb2.WorkerCounters()
        self.current_kv_backends: list[worker_pb2.KvBackendStatus] = []
        self.changes = Changes()
        self.refusal: BatonError | None = None
        self.asked_keys: list[tuple[bytes, ...]] = []
        self.lent_prefix: prefill_pb2.KvHandoff | None = None
        self.lend_refusal: BatonError | None = None
        self.holds_prefix = False
        self.is_frozen = False
        self.num_infos = 0
        self.num_watches = 0
        self.num_loads = 0
        self.running: dict[str, Any] = {}
        self._server: RpcServer | None = None
        self.port = reserved_port()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self, port: int | None = None) -> "FakeWorker":
        """Listens at its port, again after `stop`, or at the port that another worker had."""
        if port is not None:
            self.port = port
        names = [self.service_name, "baton.v1.WorkerService"]
        access = cluster_access(self.security, self.host)
        self._server = RpcServer(ServerConfig(host=self.host, port=self.port), names, access)
        self._server.add_servicer(
            worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._worker_servicer()
        )
        self._add_servicer(self._server)
        await self._server.listen()
        self._server.set_serving(True)
        return self

    async def stop(self) -> None:
        """Stops the server at once; all calls fail."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)
            self.running.clear()

    async def __aenter__(self) -> "FakeWorker":
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def stop_reports(self) -> None:
        """Ends the streams of loads, as a worker does that has drained."""
        self._reports.close()

    # rpc.worker.Worker

    def load(self) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad.FromString(self.current_load.SerializeToString())

    def counters(self) -> worker_pb2.WorkerCounters:
        return self.current_counters

    def kv_backends(self) -> Sequence[worker_pb2.KvBackendStatus]:
        return self.current_kv_backends

    def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    async def drain(self, timeout_s: float) -> int:
        return 0

    def _worker_servicer(self) -> WorkerServicer:
        self._reports = _FreezableServicer(self, lambda: None)
        return self._reports

    def _add_servicer(self, server: RpcServer) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> int:
        return 0

    async def lend_prefix(
        self, request: worker_pb2.LendPrefixRequest
    ) -> worker_pb2.LendPrefixResponse:
        self.asked_keys.append(tuple(request.keys))
        self.changes.notify()
        if self.holds_prefix:
            await asyncio.Event().wait()
        if self.lend_refusal is not None:
            raise self.lend_refusal
        return worker_pb2.LendPrefixResponse(handoff=self.lent_prefix)

    async def watch_kv_events(self) -> AsyncIterator[worker_pb2.WatchKvEventsResponse]:
        response = worker_pb2.WatchKvEventsResponse()
        response.events.add(sequence_number=0).cleared.SetInParent()
        yield response
        await asyncio.Event().wait()

    def script_of(self, index: int) -> list[int]:
        """Returns the tokens that candidate `index` generates."""
        return self.others[index - 1] if 0 < index <= len(self.others) else self.script

    def finish_reason(self, spec: request_pb2.RequestSpec, num_tokens: int, index: int = 0) -> int:
        if self.script_of(index)[num_tokens - 1] in spec.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP
        if num_tokens >= spec.stopping.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED


class _FreezableServicer(WorkerServicer):
    """While frozen, acts like a stopped process: keeps its connections but never answers."""

    async def GetInfo(self, request, context):
        self._worker.num_infos += 1
        return await super().GetInfo(request, context)

    async def WatchLoad(self, request, context):
        self._worker.num_watches += 1
        async for response in super().WatchLoad(request, context):
            if self._worker.is_frozen:
                await asyncio.Event().wait()
            yield response

    async def GetLoad(self, request, context):
        self._worker.num_loads += 1
        self._worker.changes.notify()
        if self._worker.is_frozen:
            await asyncio.Event().wait()
        return await super().GetLoad(request, context)


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServiceServicer):
    """Sends the scripts' first tokens, then a handoff.

    Args:
        script: tokens of the first candidate.
        hold: whether prompts wait for `answer`.
        hold_end: whether ends of prompts wait for `end`.
        saves: keys reported as saved before the first tokens, one list per event.
        late_saves: keys reported as saved after the first tokens, one list per event.
        info: fields of the worker's description.

    Attributes:
        num_cancelled: prompts whose caller cancelled the call.
    """

    role = worker_pb2.WORKER_ROLE_PREFILL
    service_name = "baton.v1.PrefillService"

    def __init__(
        self,
        script: Sequence[int],
        *,
        hold: bool = False,
        hold_end: bool = False,
        saves: Sequence[Sequence[bytes]] = (),
        late_saves: Sequence[Sequence[bytes]] = (),
        **info: Any,
    ) -> None:
        super().__init__(script, **info)
        self.requests: list[request_pb2.RequestSpec] = []
        self.prefixes: list[prefill_pb2.KvHandoff] = []
        self.released: list[str] = []
        self.num_cancelled = 0
        self.has_handoff = True
        self.transfer_ms = 3.0
        self.end_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self.end_refusal: BatonError | None = None
        self._saves, self._late_saves = saves, late_saves
        self._may_answer, self._may_end = asyncio.Event(), asyncio.Event()
        if not hold:
            self._may_answer.set()
        if not hold_end:
            self._may_end.set()

    def answer(self) -> None:
        """Lets prompts that `hold` keeps waiting continue."""
        self._may_answer.set()

    def end(self) -> None:
        """Lets ends that `hold_end` keeps waiting continue."""
        self._may_end.set()

    def _add_servicer(self, server: RpcServer) -> None:
        server.add_servicer(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, self)

    async def Prefill(self, request, context):
        self.requests.append(request.spec)
        if request.HasField("prefix"):
            self.prefixes.append(request.prefix)
        self.changes.notify()
        if self.refusal is not None:
            raise self.refusal
        try:
            async with contextlib.aclosing(self._events(request.spec)) as events:
                async for event in events:
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            self.changes.notify()
            raise

    async def _events(
        self, spec: request_pb2.RequestSpec
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        for keys in self._saves:
            yield prefill_pb2.PrefillResponse(saved=self._handoff(spec, keys))
        await self._may_answer.wait()
        result = self._result(spec)
        yield prefill_pb2.PrefillResponse(result=result)
        if result.outputs and result.outputs[-1].is_last:
            return
        for keys in self._late_saves:
            yield prefill_pb2.PrefillResponse(saved=self._handoff(spec, keys))
        await self._may_end.wait()
        if self.end_refusal is not None:
            raise self.end_refusal
        output = request_pb2.CandidateOutput(
            timings=common_pb2.Timings(queue_ms=1, prefill_ms=2, transfer_ms=self.transfer_ms),
            finish_reason=self.end_reason,
            is_last=bool(self.end_reason),
        )
        end = prefill_pb2.PrefillEnd(output=output)
        if self.has_handoff:
            end.handoff.CopyFrom(self._handoff(spec))
        yield prefill_pb2.PrefillResponse(end=end)

    def _result(self, spec: request_pb2.RequestSpec) -> prefill_pb2.PrefillResult:
        result = prefill_pb2.PrefillResult()
        candidates = range(num_candidates(spec))
        reasons = [self.finish_reason(spec, 1, index) for index in candidates]
        if is_ranked(spec) and not all(reasons):
            result.outputs.add()
            self._add_ranked(result, spec)
        else:
            for index in candidates[: spec.sampling.n or 1]:
                reason = reasons[index] if all(reasons) else 0
                token_ids = self.script_of(index)[:1]
                output = result.outputs.add(index=index, token_ids=token_ids, finish_reason=reason)
                add_logprobs(output, spec)
            result.outputs[-1].is_last = all(reasons)
        add_prompt_logprobs(result.outputs[0], spec)
        result.outputs[0].cached_tokens = BLOCK_SIZE
        result.outputs[0].timings.MergeFrom(common_pb2.Timings(queue_ms=1, prefill_ms=2))
        return result

    def _add_ranked(self, result: prefill_pb2.PrefillResult, spec: request_pb2.RequestSpec) -> None:
        for index in range(num_candidates(spec)):
            token_id, logprob = self.script_of(index)[0], -1.0 - index
            if spec.sampling.HasField("beam_search"):
                result.first_beams.add(token_id=token_id, logprob=logprob)
            else:
                begun = result.candidates.add(
                    index=index, output_token_ids=[token_id], logprob=logprob
                )
                if spec.sampling.HasField("logprobs"):
                    details = fake_logprobs(token_id, spec.sampling.logprobs)
                    begun.token_logprobs.append(details)

    async def ReleaseHandoff(self, request, context):
        self.released.append(request.handoff_id or f"handoff-{request.request_id}")
        self.changes.notify()
        return prefill_pb2.ReleaseHandoffResponse()

    def _handoff(
        self, spec: request_pb2.RequestSpec, keys: Sequence[bytes] = ()
    ) -> prefill_pb2.KvHandoff:
        return prefill_pb2.KvHandoff(
            format_version=1,
            handoff_id=f"handoff-{spec.request_id}",
            namespace=NAMESPACE,
            block_keys=keys,
            num_tokens=len(spec.prompt_token_ids),
            connector="memory",
        )


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServiceServicer):
    """Continues the scripts, one token of every candidate of a request per message.

    Args:
        script: tokens of the first candidate.
        pause_after: most tokens of a candidate until `resume` changes it; None for no limit.
        joins_steps: whether messages have all steps that are ready, not one each.
        info: fields of the worker's description.
    """

    role = worker_pb2.WORKER_ROLE_DECODE
    service_name = "baton.v1.DecodeService"

    def __init__(
        self,
        script: Sequence[int],
        *,
        pause_after: int | None = None,
        joins_steps: bool = False,
        **info: Any,
    ) -> None:
        super().__init__(script, **info)
        self.pause_after = pause_after
        self.joins_steps = joins_steps
        self.starts: list[decode_pb2.StartDecode] = []
        self.prefetches: list[decode_pb2.PrefetchKv] = []
        self.cancels: list[str] = []
        self.moves: list[str] = []
        self.moved_handoff: prefill_pb2.KvHandoff | None = None
        self.released: list[str] = []
        self.finished_candidates: list[tuple[str, int]] = []
        self.num_connects = 0
        self.num_sent = 0

    def _add_servicer(self, server: RpcServer) -> None:
        server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, self)

    def resume(self, pause_after: int | None = None) -> None:
        self.pause_after = pause_after
        self.changes.notify()

    def fail_running(self, error: BatonError, token_ids: Sequence[int] = ()) -> None:
        """Ends every request with this error and refuses more with it, as a dead engine does.

        `token_ids` are sent as an output before the error.
        """
        self.refusal = error
        for request_id in list(self.running):
            self._tasks.pop(request_id).cancel()
            del self.running[request_id]
            tokens = request_pb2.CandidateOutput(request_id=request_id, token_ids=token_ids)
            failure = _failure(request_id, error)
            self._outputs.put_nowait([tokens, failure] if token_ids else [failure])

    def abort_running(self) -> None:
        """Ends every request as an operator's abort does."""
        for request_id in list(self.running):
            self._tasks.pop(request_id).cancel()
            del self.running[request_id]
            reason = common_pb2.FINISH_REASON_ABORTED
            self._outputs.put_nowait(
                [
                    request_pb2.CandidateOutput(
                        request_id=request_id, finish_reason=reason, is_last=True
                    )
                ]
            )

    def cancel_stream(self) -> None:
        """Ends the Connect stream with CANCELLED, as a stopping server may."""
        self._outputs.put_nowait(None)

    def _move(self, request_id: str) -> None:
        self.moves.append(request_id)
        if request_id in self.running:
            self._tasks.pop(request_id).cancel()
            del self.running[request_id]
            moved = decode_pb2.MovedRequest(request_id=request_id, handoff=self.moved_handoff)
            self._outputs.put_nowait(moved)

    async def Connect(self, request_iterator, context) -> AsyncIterator[Any]:
        self.num_connects += 1
        outputs: asyncio.Queue[list[request_pb2.CandidateOutput] | None] = asyncio.Queue()
        self._outputs = outputs
        self._tasks = tasks = {}
        reader = asyncio.create_task(self._read(request_iterator, outputs, tasks))
        try:
            while True:
                step = await outputs.get()
                while self.joins_steps and step and not outputs.empty():
                    step = [*step, *(outputs.get_nowait() or ())]
                if step is None:
                    await context.abort(grpc.StatusCode.CANCELLED, "by the worker")
                if isinstance(step, decode_pb2.MovedRequest):
                    yield decode_pb2.ConnectResponse(moved=[step])
                    continue
                self.num_sent += sum(len(output.token_ids) for output in step)
                yield decode_pb2.ConnectResponse(outputs=step)
                self.changes.notify()
        finally:
            for task in (reader, *tasks.values()):
                task.cancel()
            self.running.clear()
            self.changes.notify()

    async def _read(self, commands, outputs, tasks) -> None:
        async for command in commands:
            if command.HasField("prefetch"):
                self.prefetches.append(command.prefetch)
            elif command.HasField("start"):
                request_id = command.start.spec.request_id
                self.starts.append(command.start)
                tasks[request_id] = asyncio.create_task(self._generate(command.start, outputs))
            elif command.HasField("move"):
                self._move(command.move.request_id)
            elif command.HasField("release"):
                self.released.append(command.release.handoff_id)
            elif command.cancel.HasField("index"):
                cancel = command.cancel
                self.finished_candidates.append((cancel.request_id, cancel.index))
            else:
                request_id = command.cancel.request_id
                self.cancels.append(request_id)
                self.running.pop(request_id, None)
                tasks.pop(request_id).cancel()
            self.changes.notify()

    def scripted_for(self, start: decode_pb2.StartDecode) -> "FakeDecode":
        """Returns the worker whose scripts a request gets."""
        return self

    async def _generate(self, start: decode_pb2.StartDecode, outputs: asyncio.Queue) -> None:
        request_id = start.spec.request_id
        if self.refusal is not None:
            outputs.put_nowait([_failure(request_id, self.refusal)])
            return
        self.running[request_id] = start
        self.changes.notify()
        candidates = FakeCandidates(self.scripted_for(start), start)
        while candidates.unfinished:
            await self._until_may_send(candidates.num_tokens)
            if step := candidates.advance():
                outputs.put_nowait(step)
        self.running.pop(request_id, None)

    async def _until_may_send(self, position: int) -> None:
        while self.pause_after is not None and position >= self.pause_after:
            await self.changes._event.wait()


def _failure(request_id: str, error: BatonError) -> request_pb2.CandidateOutput:
    return request_pb2.CandidateOutput(
        request_id=request_id,
        finish_reason=common_pb2.FINISH_REASON_ERROR,
        is_last=True,
        error=to_worker_error(error),
    )


async def first_of(workers: Sequence[Any], condition: Callable[[Any], object]) -> Any:
    """Returns the first worker for which a condition becomes true."""
    waiters = {
        asyncio.create_task(worker.changes.until(lambda w=worker: condition(w))): worker
        for worker in workers
    }
    done, pending = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
    for waiter in pending:
        waiter.cancel()
    found = done.pop()
    found.result()  # raises if it timed out
    return waiters[found]


@contextlib.asynccontextmanager
async def running_workers(*workers: FakeWorker) -> AsyncIterator[contextlib.AsyncExitStack]:
    """Starts workers; stops them at the end, after unwinding what was added to the stack."""
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        yield stack
