"""`python -m benchmarks.router.scripted_worker TIER STEP_MS NUMBER PORT_FILE`: workers of a tier
without a model, all in one process. The file gets their ports, one per line.

Each step a decode worker sends the next token of every running request, as an engine does, so that
a router is all that a benchmark measures. With a step of 0 ms, steps are as fast as the router
reads. A prefill worker answers at once, with the keys of all blocks.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from baton.common.model_files.named_models import demo_model_path
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    request_pb2,
    worker_pb2,
)
from kvstore.block_key import BlockKeyChain
from kvstore.handoff import KvHandoff, handoff_to_proto
from router.requests.tokenizer import Tokenizer
from rpc.server import RpcServer
from rpc.server_config import ServerConfig
from rpc.worker import Worker, WorkerTier

_TEXT = (
    "Return a list of the names of all files in the folder, sorted by the time of their last "
    "change. If the folder does not exist, an OSError is raised. "
)
_TIERS = {
    "decode": worker_pb2.WORKER_ROLE_DECODE,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
}
_SERVICES = ("baton.v1.DecodeService", "baton.v1.PrefillService", "baton.v1.WorkerService")
_NAMESPACE = bytes(32)
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1 << 18


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

    def add(self, start: decode_pb2.StartDecode) -> None:
        spec = start.spec
        num_tokens = sum(len(candidate.output_token_ids) for candidate in start.candidates)
        request = _Running(spec.request_id, spec.stopping.max_tokens, num_tokens)
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
            requests.add(command.start)
        elif command.HasField("cancel"):
            requests.drop(command.cancel.request_id)


class _PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Returns a first token and a handoff for every prompt."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    @override
    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        spec = request.spec
        result = prefill_pb2.PrefillResult()
        is_last = spec.stopping.max_tokens <= 1
        reason = common_pb2.FINISH_REASON_LENGTH if is_last else None
        result.outputs.add(token_ids=self._token_ids[:1], finish_reason=reason, is_last=is_last)
        yield prefill_pb2.PrefillResponse(result=result)
        if not is_last:
            handoff = await asyncio.to_thread(_handoff, spec)
            output = request_pb2.CandidateOutput(timings=common_pb2.Timings(prefill_ms=1))
            yield prefill_pb2.PrefillResponse(
                end=prefill_pb2.PrefillEnd(handoff=handoff, output=output)
            )

    @override
    async def ReleaseHandoff(
        self, request: prefill_pb2.ReleaseHandoffRequest, context: Any
    ) -> prefill_pb2.ReleaseHandoffResponse:
        return prefill_pb2.ReleaseHandoffResponse()


def _handoff(spec: request_pb2.RequestSpec) -> prefill_pb2.KvHandoff:
    """The handoff of a whole prompt."""
    chain = BlockKeyChain(_NAMESPACE, _BLOCK_SIZE, cache_salt=spec.cache_salt)
    return handoff_to_proto(
        KvHandoff(
            handoff_id=spec.request_id,
            namespace=_NAMESPACE,
            block_keys=chain.of_prompt(list(spec.prompt_token_ids), spec.request_id),
            num_tokens=len(spec.prompt_token_ids),
            connector="memory",
            digest_scheme="none",
            lease_ms=10_000,
        )
    )


class _ScriptedWorker(Worker):
    """The description of the replica."""

    def __init__(self, worker_id: str, tier: str, vocab_size: int, step_s: float) -> None:
        self._step_s = step_s
        self._info = worker_pb2.GetInfoResponse(
            worker_id=worker_id,
            role=_TIERS[tier],
            model=demo_model_path().name,
            namespace=_NAMESPACE,
            block_size=_BLOCK_SIZE,
            pool_block_size=_BLOCK_SIZE,
            num_blocks=1 << 20,
            max_pool_tokens=_MAX_MODEL_LEN,
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=vocab_size,
            max_num_seqs=1 << 14,
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
        return worker_pb2.WorkerLoad(
            num_free_blocks=1 << 20, num_blocks=1 << 20, decode_step_s=self._step_s
        )

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
    async def lend_prefix(
        self, request: worker_pb2.LendPrefixRequest
    ) -> worker_pb2.LendPrefixResponse:
        return worker_pb2.LendPrefixResponse()

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


async def _run(tier: str, step_ms: float, num_workers: int, port_file: Path) -> None:
    tokenizer = Tokenizer.load(demo_model_path())
    token_ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    servers, tiers = [], []
    for number in range(num_workers):
        server = RpcServer(ServerConfig(port=0), _SERVICES)
        if tier == "decode":
            decode = _DecodeServicer(step_ms / 1000, token_ids)
            server.add_servicer(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode)
        else:
            prefill = _PrefillServicer(token_ids)
            server.add_servicer(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill)
        worker = _ScriptedWorker(f"{tier}-{number}", tier, tokenizer.vocab_size, step_ms / 1000)
        tiers.append(WorkerTier(worker, server))
        await server.listen()
        servers.append(server)
    draft = port_file.with_suffix(".draft")
    draft.write_text("".join(f"{server.port}\n" for server in servers))
    draft.replace(port_file)
    await asyncio.gather(*(server.wait_failed() for server in servers))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
