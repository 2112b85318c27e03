"""What the ports of a running cluster answer to callers without the right credential."""

import http.client
import importlib
import json
import pkgutil
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import grpc
import psutil
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import baton.v1
from tests.support.serve_process import ServedCluster, running_serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

API_KEY = "sk-baton-" + "k" * 40
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"}
TIMEOUT_S = 20
PATHS = (
    *("/metrics", "/v1/models", "/openapi.json", "/docs", "/version"),
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"),
)
OPEN_PATHS = ("/health", "/ready", "/ping")

Headers = Mapping[str, str]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServedCluster]:
    with running_serve("--kv-connector", "grpc://", variables={"BATON_API_KEY": API_KEY}) as served:
        yield served


def ports_of(cluster: ServedCluster) -> set[int]:
    """The TCP ports on which a process of the cluster listens."""
    parent = psutil.Process(cluster.pid)
    return {
        connection.laddr.port
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def methods() -> list[MethodDescriptor]:
    """Every method of every service of Baton."""
    modules = [
        importlib.import_module(f"baton.v1.{module.name}")
        for module in pkgutil.iter_modules(baton.v1.__path__)
        if module.name.endswith("_pb2")
    ]
    services = [one for module in modules for one in module.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def status_of(channel: grpc.Channel, method: str, metadata: tuple[tuple[str, str], ...]) -> str:
    """The status of a call with an empty message; OK if it is answered."""
    # On the wire unary calls are streams of one message.
    call = channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S, metadata=metadata)
    try:
        next(iter(call), None)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def speaks_grpc(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code() == grpc.StatusCode.UNIMPLEMENTED
    return True


def http_status(port: int, path: str, headers: Headers) -> int | None:
    """The status of an answer; None if the port does not speak HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    method = "POST" if path.startswith(("/v1/c", "/v1/me", "/tok")) else "GET"
    try:
        connection.request(method, path, json.dumps({}), dict(headers))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


CREDENTIALS = {
    "none": (),
    "a wrong token": (("authorization", "Bearer " + "w" * 43),),
    "a wrong key": (("x-api-key", "sk-baton-" + "w" * 40),),
}


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_nothing_but_health_answers_others(cluster, kind):
    given, ports = CREDENTIALS[kind], ports_of(cluster)
    on_grpc = {port for port in ports if speaks_grpc(port)}
    on_http = {port for port in ports if http_status(port, "/metrics", {}) is not None}
    assert on_grpc | on_http == ports, "a port speaks another protocol"
    assert len(on_grpc) >= 5  # the router, two workers and their KV peers
    assert len(on_http) >= 4  # the API and three ports of metrics
    for port in on_grpc:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in methods():
                name = f"/{method.containing_service.full_name}/{method.name}"
                assert status_of(channel, name, given) in REFUSED, (port, name)
    for port in on_http:
        for path in PATHS:
            assert http_status(port, path, dict(given)) in (401, 403, 404), (port, path)


def test_reflection_is_closed(cluster):
    for port in filter(speaks_grpc, ports_of(cluster)):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.ServerReflectionInfo(iter([request]), timeout=TIMEOUT_S))
            assert caught.value.code().name in REFUSED


def test_a_clients_key_opens_the_api_alone(cluster):
    key = (("authorization", f"Bearer {API_KEY}"),)
    api = urlsplit(cluster.url).port
    assert http_status(api, "/v1/models", dict(key)) == 200
    assert http_status(api, "/metrics", dict(key)) == 401
    for port in filter(speaks_grpc, ports_of(cluster)):
        is_router = port == int(cluster.grpc.rpartition(":")[2])
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for method in methods():
                service = method.containing_service
                if not (is_router and service.name == "GenerationService"):
                    name = f"/{service.full_name}/{method.name}"
                    assert status_of(channel, name, key) in REFUSED, (port, name)


def test_health_is_open(cluster):
    api = urlsplit(cluster.url).port
    assert [http_status(api, path, {}) for path in OPEN_PATHS] == [200, 200, 200]
