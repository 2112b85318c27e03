"""Direct calls of one prefill or decode process, without a router."""

from dataclasses import dataclass

import grpc

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
from rpc.errors import from_worker_error
from tests.support.cluster import WORKER_CALL, ServerProcess

__all__ = ["Prefilled", "decode_at", "prefill_at"]

_TIMEOUT_S = 60


@dataclass(frozen=True)
class Prefilled:
    """A prefilled prompt, whose KV can be loaded until its lease ends.

    Attributes:
        spec: the request as both tiers get it.
        namespace: namespace of both tiers.
        token_ids: tokens drawn by prefill.
        handoff: the handoff of the KV.
    """

    spec: request_pb2.RequestSpec
    namespace: bytes
    token_ids: tuple[int, ...]
    handoff: prefill_pb2.KvHandoff


async def prefill_at(
    server: ServerProcess, request_id: str, prompt: list[int], num_tokens: int
) -> Prefilled:
    """Prefills a prompt; does not release its KV."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        info = await worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(
            worker_pb2.GetInfoRequest(), timeout=_TIMEOUT_S, metadata=WORKER_CALL
        )
        spec = request_pb2.RequestSpec(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=0),
            stopping=common_pb2.StoppingParams(max_tokens=num_tokens),
            timeout_ms=_TIMEOUT_S * 1000,
        )
        message = prefill_pb2.PrefillRequest(spec=spec, namespace=info.namespace)
        stub, events = prefill_pb2_grpc.PrefillServiceStub(channel), {}
        async for response in stub.Prefill(message, timeout=_TIMEOUT_S, metadata=WORKER_CALL):
            kind = response.WhichOneof("event")
            events[kind] = getattr(response, kind)
    token_ids = tuple(events["result"].outputs[0].token_ids)
    return Prefilled(spec, info.namespace, token_ids, events["end"].handoff)


async def decode_at(server: ServerProcess, prefilled: Prefilled) -> list[int]:
    """Generates from a handoff; returns all tokens.

    Raises:
        BatonError: decode has reported an error.
    """
    start = decode_pb2.StartDecode(
        spec=prefilled.spec, namespace=prefilled.namespace, handoff=prefilled.handoff
    )
    start.candidates.add(output_token_ids=prefilled.token_ids)
    token_ids = list(prefilled.token_ids)
    async with grpc.aio.insecure_channel(server.address) as channel:
        stream = decode_pb2_grpc.DecodeServiceStub(channel).Connect(
            timeout=_TIMEOUT_S, metadata=WORKER_CALL
        )
        await stream.write(decode_pb2.ConnectRequest(start=start))
        while True:
            for output in (await stream.read()).outputs:
                token_ids += output.token_ids
                if output.HasField("error"):
                    raise from_worker_error(output.error)
                if output.is_last:
                    return token_ids
