"""Routers and workers with a token and with certificates: who may call whom."""

import asyncio
import itertools
import socket
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from router.config.security import RouterSecurityConfig, WorkerTlsConfig
from rpc.discovery.discovery import Discovery
from rpc.server_access import cluster_access, open_cluster_channel
from tests.support.certificates import Authority, write_files
from tests.support.fake_workers import Changes, FakeDecode, FakePrefill, running_workers
from tests.support.replica_sets import running_set
from tests.support.running_router import (
    request,
    running_router,
    script_of,
    token_ids_of,
)

SCRIPT = script_of("The quick brown fox jumps over the lazy dog.")
TOKEN, OTHER_TOKEN = "t" * 32, "u" * 32
HEALTH = "grpc.health.v1.Health"
METHODS_TO_SEE = {
    "/baton.v1.WorkerService/Drain",
    "/baton.v1.WorkerService/Abort",
    "/baton.v1.WorkerService/ResetPrefixCache",
    "/baton.v1.PrefillService/Prefill",
    "/baton.v1.DecodeService/Connect",
    "/baton.v1.ReplicaSetService/WatchReplicas",
    "/baton.v1.ReplicaSetService/Scale",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
}


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture
def files(tmp_path, authority):
    """Makes the certificate files of a process of the cluster, by the process's name."""

    def make(name="process", leaf=None, crl=None, ca_certs=authority.certificate):
        leaf = authority.issue(name) if leaf is None else leaf
        return write_files(tmp_path / name, leaf or None, ca_certs, crl)

    return make


async def call(channel, method, metadata=()):
    """The name of the status with which a method answers an empty message."""
    # On the wire all calls are streams. A stream of requests could fail for the client alone, when
    # the server ends the call before they are sent.
    stream = channel.unary_stream(method)(b"", metadata=metadata, timeout=10)
    try:
        async for _ in stream:
            break
    except grpc.aio.AioRpcError as error:
        return error.code().name
    stream.cancel()
    return "OK"


async def is_serving(channel):
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def methods_of(channel, metadata):
    """The full names of all methods that a server has, by reflection."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest
    listed = [
        r async for r in stub.ServerReflectionInfo(iter([ask(list_services="")]), metadata=metadata)
    ]
    names = [service.name for service in listed[0].list_services_response.service]
    found = set()
    for name in names:
        asked = iter([ask(file_containing_symbol=name)])
        async for answer in stub.ServerReflectionInfo(asked, metadata=metadata):
            for data in answer.file_descriptor_response.file_descriptor_proto:
                file = FileDescriptorProto.FromString(data)
                found |= {
                    f"/{file.package}.{service.name}/{method.name}"
                    for service in file.service
                    for method in service.method
                    if f"{file.package}.{service.name}" == name
                }
    return found


async def test_no_method_of_a_worker_answers_without_the_token():
    security = ClusterSecurity(token=TOKEN)
    workers = FakePrefill(SCRIPT, security=security), FakeDecode(SCRIPT, security=security)
    seen = set()
    async with running_workers(*workers), running_set(SCRIPT, 0, security) as replicas:
        for worker in (*workers, replicas):
            async with open_cluster_channel(worker.address, security) as channel:
                methods = await methods_of(channel, security.call_metadata())
                closed = {method for method in methods if not method.startswith(f"/{HEALTH}/")}
                wrong = ClusterSecurity(token=OTHER_TOKEN).call_metadata()
                for method, metadata in itertools.product(
                    closed, [(), wrong, [("authorization", TOKEN)], [("authorization", "")]]
                ):
                    assert await call(channel, method, metadata) == "UNAUTHENTICATED", method
                assert await is_serving(channel)
                seen |= closed
    assert seen >= METHODS_TO_SEE


async def test_no_method_of_a_worker_answers_other_certificates(files, authority):
    revoked, gone = authority.issue("gone"), authority.issue(expires_in=timedelta(days=-1))
    security = ClusterSecurity(files=files("worker", crl=authority.revoke(revoked)))
    worker = FakePrefill(SCRIPT, security=security)
    callers = {
        "revoked": (files("revoked", revoked), "UNAUTHENTICATED"),
        "expired": (files("expired", gone), "UNAVAILABLE"),
        "foreign": (files("foreign", Authority().issue()), "UNAVAILABLE"),
        "missing": (files("missing", leaf=b""), "UNAVAILABLE"),
    }
    async with running_workers(worker):
        caller = ClusterSecurity(files=files("caller"))
        async with open_cluster_channel(worker.address, caller) as channel:
            methods = await methods_of(channel, ())
            assert await is_serving(channel)
        closed = {method for method in methods if not method.startswith(f"/{HEALTH}/")}
        for name, (own_files, status) in callers.items():
            security = ClusterSecurity(files=own_files)
            async with open_cluster_channel(worker.address, security) as channel:
                for method in closed:
                    assert await call(channel, method) == status, (name, method)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            assert await call(channel, "/baton.v1.WorkerService/Drain") == "UNAVAILABLE"


@pytest.mark.parametrize("identities", [("router",), ("other", "router.internal")])
async def test_identities_limit_the_certificates(files, authority, identities):
    security = ClusterSecurity(CredentialsConfig(identities=identities), files("worker"))
    router = files("router", authority.issue("router", dns=["router.internal"]))
    async with FakePrefill(SCRIPT, security=security) as worker:
        for own_files, status in ((router, "OK"), (files("stranger"), "UNAUTHENTICATED")):
            own = ClusterSecurity(files=own_files)
            async with open_cluster_channel(worker.address, own) as channel:
                assert await call(channel, "/baton.v1.WorkerService/GetInfo") == status


async def test_a_caller_refuses_a_worker_with_another_name(files, authority):
    named = files("worker", authority.issue("worker", dns=["prefill.internal"], addresses=[]))
    worker = FakePrefill(SCRIPT, security=ClusterSecurity(files=named))
    own = files("caller")
    async with worker:
        for config, host, status in (
            (CredentialsConfig(), None, "UNAVAILABLE"),
            (CredentialsConfig(), "prefill.internal", "OK"),
            (CredentialsConfig(), "decode.internal", "UNAVAILABLE"),
            (CredentialsConfig(server_name="prefill.internal"), "decode.internal", "OK"),
        ):
            security = ClusterSecurity(config, own)
            async with open_cluster_channel(worker.address, security, host) as channel:
                assert await call(channel, "/baton.v1.WorkerService/GetInfo") == status


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "worker.internal"])
def test_a_worker_without_credentials_listens_on_loopback_alone(files, host):
    with pytest.raises(ConfigurationError, match=r"--host is .* --cluster-token-file"):
        cluster_access(ClusterSecurity(), host)
    for own in ("127.0.0.1", "::1", "localhost"):
        cluster_access(ClusterSecurity(), own)
    cluster_access(ClusterSecurity(token=TOKEN), host)
    cluster_access(ClusterSecurity(files=files()), host)


@asynccontextmanager
async def cluster(worker_security, router_security, **config):
    """Yields a router, and the workers that it calls."""
    workers = (
        FakePrefill(SCRIPT, security=worker_security),
        FakeDecode(SCRIPT, security=worker_security),
    )
    async with (
        running_workers(*workers),
        running_router(*workers, security=router_security, **config) as router,
    ):
        yield router, workers


def router_security(own, token_file=None, **config):
    """The config of a router with these certificates towards workers."""
    tls = WorkerTlsConfig(
        cluster_ssl_certfile=own.certfile,
        cluster_ssl_keyfile=own.keyfile,
        cluster_ssl_ca_certs=own.ca_certs,
    )
    return RouterSecurityConfig(
        workers=tls, cluster=CredentialsConfig(token_file=token_file, **config)
    )


async def test_every_call_of_a_router_has_its_credentials(files, tmp_path):
    token_file = str(tmp_path / "token")
    worker_security = ClusterSecurity(CredentialsConfig(token_file=token_file), files("worker"))
    own = router_security(files("router"), token_file)
    async with cluster(worker_security, own) as (router, (prefill, decode)):
        responses = await router.generate(request(max_tokens=8))
        assert token_ids_of(responses) == SCRIPT[:8]
        await prefill.changes.until(lambda: prefill.released)
        for tier in (router.fleet.prefill, router.fleet.decode):
            (replica,) = tier.connected
            await replica.worker.get_load(timeout_s=10)
    assert len(prefill.requests) == len(decode.starts) == 1
    assert prefill.num_watches == decode.num_watches == 1  # no connection was lost


@pytest.mark.parametrize(
    ("host", "named"), [("worker.test", True), ("other.test", False), ("10.0.0.1", False)]
)
async def test_workers_found_by_dns_have_that_name(files, authority, monkeypatch, host, named):
    """A certificate of the address alone is not enough: DNS answers can be forged."""
    leaf = authority.issue("worker", dns=["worker.test"])
    worker = FakeDecode(SCRIPT, security=ClusterSecurity(files=files("worker", leaf)))

    def resolve(asked, port, **options):
        assert asked == host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with running_workers(worker):
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        discovery = Discovery([f"dns:///{host}:{worker.port}"])
        await discovery.look_up()
        (address,) = discovery.addresses
        own = ClusterSecurity(files=files("router"))
        async with open_cluster_channel(address, own, discovery.name_of(address)) as channel:
            status = await call(channel, "/baton.v1.WorkerService/GetInfo")
    assert address == worker.address
    assert status == ("OK" if named else "UNAVAILABLE")


async def test_a_router_that_workers_refuse_says_so_and_connects_once_it_has_the_token(
    tmp_path, caplog
):
    token_file = tmp_path / "token"
    token_file.write_text(OTHER_TOKEN)
    decode = FakeDecode(SCRIPT, security=ClusterSecurity(token=TOKEN))
    async with running_workers(decode):
        own = RouterSecurityConfig(cluster=CredentialsConfig(token_file=str(token_file)))
        options = {"security": own, "queue_timeout_s": 0.1}
        async with running_router(decode=(decode.address,), **options) as router:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await router.generate(request(max_tokens=8))
            assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
            token_file.write_text(TOKEN + "\n")
            await router.until_connected(decode)
            assert token_ids_of(await router.generate(request(max_tokens=8))) == SCRIPT[:8]
    assert "lacks a valid credential" in caplog.text
    assert TOKEN not in caplog.text
    assert OTHER_TOKEN not in caplog.text


async def test_clients_do_not_see_that_a_worker_refuses_their_router(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    refusing = ClusterSecurity(CredentialsConfig(token_file=str(token_file)))
    prefill = FakePrefill(SCRIPT, security=refusing)
    decode = FakeDecode(SCRIPT, security=ClusterSecurity(token=TOKEN))
    own_file = tmp_path / "own"
    own_file.write_text(TOKEN)
    own = RouterSecurityConfig(cluster=CredentialsConfig(token_file=str(own_file)))
    async with (
        running_workers(prefill, decode),
        running_router(prefill, decode, security=own) as router,
    ):
        token_file.write_text(OTHER_TOKEN)
        responses = await router.generate(request(max_tokens=8))
    assert token_ids_of(responses) == SCRIPT[:8]  # decode computed the prompt
    assert not prefill.requests


class Load:
    """Requests, and calls over new connections, that go on until the end of a test."""

    def __init__(self, router, worker, security):
        self._router, self._worker, self._security = router, worker, security
        self._num_done = [0, 0]
        self._changes = Changes()

    async def run_requests(self):
        while True:
            responses = await self._router.generate(request(max_tokens=8))
            assert token_ids_of(responses) == SCRIPT[:8]
            self._count(0)

    async def run_connections(self):
        method = "/baton.v1.WorkerService/GetInfo"
        while True:
            async with open_cluster_channel(self._worker.address, self._security) as channel:
                assert await call(channel, method, self._security.call_metadata()) == "OK"
            self._count(1)

    async def until_more(self):
        """Waits until some calls that began after this moment have ended."""
        wanted = [done + 3 for done in self._num_done]
        await self._changes.until(
            lambda: all(done >= least for done, least in zip(self._num_done, wanted, strict=True))
        )

    def _count(self, which):
        self._num_done[which] += 1
        self._changes.notify()


async def test_tokens_and_certificates_are_exchanged_without_a_failed_request(tmp_path, authority):
    token_file, successor = tmp_path / "token", Authority("successor")
    token_file.write_text(TOKEN)
    old, new = authority.certificate, successor.certificate

    def write(name, signer, ca_certs):
        return write_files(tmp_path / name, signer.issue(name), ca_certs)

    config = CredentialsConfig(token_file=str(token_file))
    worker_security = ClusterSecurity(config, write("worker", authority, old))
    caller = ClusterSecurity(config, write("caller", authority, old))
    own = router_security(write("router", authority, old), str(token_file))
    async with cluster(worker_security, own) as (router, (prefill, decode)):
        load = Load(router, prefill, caller)
        running = asyncio.gather(load.run_requests(), load.run_connections())

        async def until_more():
            waiting = asyncio.ensure_future(load.until_more())
            await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
            assert not running.done(), running.exception()
            await waiting

        await until_more()
        for lines in ((TOKEN, OTHER_TOKEN), (OTHER_TOKEN, TOKEN), (OTHER_TOKEN,)):
            token_file.write_text("\n".join(lines))
            await until_more()
        for signer, ca_certs in ((authority, old + new), (successor, old + new), (successor, new)):
            for name in ("worker", "caller", "router"):
                write(name, signer, ca_certs)
                await until_more()
        assert prefill.num_infos > 1
        assert prefill.num_watches == decode.num_watches == 1  # no connection was lost
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with open_cluster_channel(
            prefill.address, ClusterSecurity(files=write("stale", authority, old + new))
        ) as channel:
            assert await call(channel, "/baton.v1.WorkerService/GetInfo") == "UNAVAILABLE"
