"""A client that uses only gRPC reflection, against every process of a real cluster."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.support.checkpoints import VOCAB_SIZE, prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import WORKER_CALL, Cluster

PROMPT = prompt_of(40)
GENERATE = "baton.v1.GenerationService/Generate"
SERVICES = {
    "router": {"baton.v1.GenerationService", "baton.v1.ClusterService"},
    "prefill": {"baton.v1.PrefillService", "baton.v1.WorkerService"},
    "decode": {"baton.v1.DecodeService", "baton.v1.WorkerService"},
}

BAD_REQUESTS = {
    "prompt": {},
    "text": {"text": ""},
    "token_ids": {"token_ids": {"ids": []}},
    "token_ids is 259": {"token_ids": {"ids": [VOCAB_SIZE]}},
    "prompt has 512 tokens": {"token_ids": {"ids": [1] * 512}},
    "max_tokens": {"text": "x", "stopping": {"max_tokens": 0}},
    "temperature is -1": {"text": "x", "sampling": {"temperature": -1}},
    "temperature is nan": {"text": "x", "sampling": {"temperature": float("nan")}},
    "top_p is 0": {"text": "x", "sampling": {"top_p": 0}},
    "top_p is 1.5": {"text": "x", "sampling": {"top_p": 1.5}},
    "stop": {"text": "x", "stopping": {"stop": ["x"] * 17}},
    "stop_token_ids": {"text": "x", "stopping": {"stop_token_ids": [VOCAB_SIZE]}},
    "request_id": {"text": "x", "request_id": "r" * 129},
    "cache_salt": {"text": "x", "cache_salt": "s" * 257},
}


class GenericClient:
    """Calls methods by name; takes all message types from the server's reflection."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = descriptor_pool.DescriptorPool(self._database)

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def call(self, path: str, **fields: object) -> Message:
        service, name = path.split("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        request = message_factory.GetMessageClass(method.input_type)(**fields)
        return self.call_bytes(path, request.SerializeToString())

    def call_bytes(self, path: str, request: bytes) -> Message:
        service, name = path.split("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        response = message_factory.GetMessageClass(method.output_type)
        call = self._channel.unary_unary(
            f"/{path}", request_serializer=None, response_deserializer=response.FromString
        )
        return call(request, timeout=30)


class ShowsToken(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Adds the cluster's token to calls, reflection's among them."""

    def intercept_unary_unary(self, continuation, details, request):
        return continuation(details._replace(metadata=WORKER_CALL), request)

    def intercept_stream_stream(self, continuation, details, requests):
        return continuation(details._replace(metadata=WORKER_CALL), requests)


def check_server(address: str, expected: set[str]) -> None:
    with grpc.intercept_channel(grpc.insecure_channel(address), ShowsToken()) as channel:
        client = GenericClient(channel)
        assert expected <= client.services()
        for service in ("", *expected):
            assert client.call("grpc.health.v1.Health/Check", service=service).status == 1
            if hasattr(health_pb2, "HealthListResponse"):  # of newer versions of the package
                listed = client.call("grpc.health.v1.Health/List").statuses
                assert listed[service].status == 1
        if "baton.v1.WorkerService" in expected:
            assert client.call("baton.v1.WorkerService/GetInfo").model == "tiny"
            assert client.call("baton.v1.WorkerService/GetLoad").load.num_blocks == 512


def check_generation(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        client = GenericClient(channel)
        assert client.call("baton.v1.GenerationService/GetModel").vocab_size == VOCAB_SIZE
        response = client.call(
            GENERATE,
            token_ids={"ids": PROMPT},
            sampling={"temperature": 0},
            stopping={"max_tokens": 9, "ignore_eos": True},
        )
        expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, 9)
        assert list(response.completions[0].token_ids) == expected


def check_bad_requests(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        client = GenericClient(channel)
        for message, fields in BAD_REQUESTS.items():
            with pytest.raises(grpc.RpcError, match=message) as caught:
                client.call(GENERATE, **fields)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, message
        with pytest.raises(grpc.RpcError, match="unknown") as caught:
            client.call(GENERATE, text="x", model="unknown")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            client.call_bytes(GENERATE, b"\x1a\x02\xff\xfe")  # field 3, text: not UTF-8
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
async def test_a_generic_client_is_served_by_every_process(shared_cluster: Cluster) -> None:
    cluster = shared_cluster
    servers = {
        "router": cluster.router,
        "prefill": cluster.prefill[0],
        "decode": cluster.decode[0],
    }
    for name, server in servers.items():
        await asyncio.to_thread(check_server, server.address, SERVICES[name])
    await asyncio.to_thread(check_generation, cluster.router.address)
    await asyncio.to_thread(check_bad_requests, cluster.router.address)
    await cluster.wait_pools_full()
