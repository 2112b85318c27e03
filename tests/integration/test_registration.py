"""Workers that announce themselves to a router, whose targets are `register:///`."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from baton import AsyncClient
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.flags.parser import FlagParser
from baton.common.security.client import ClientTls
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
from baton.v1 import registration_pb2, registration_pb2_grpc
from router import server as router_server
from router.config.http import HttpConfig
from router.config.security import RouterSecurityConfig
from router.config.served_model import ServedModelConfig
from rpc.channels import open_blocking_channel, open_channel
from rpc.discovery.announcements import Announcements
from rpc.probe import wait_until_serving
from rpc.registration import Registration, RegistrationConfig
from rpc.server_config import ServerConfig
from tests.support.certificates import Authority, write_files
from tests.support.checkpoints import tiny_checkpoint
from tests.support.cluster import START_TIMEOUT_S, ServerProcess
from tests.support.conditions import until
from tests.support.fake_workers import MODEL, FakeDecode, FakePrefill, running_workers
from tests.support.jobs import Job
from tests.support.ports import reserved_port
from tests.support.replica_sets import running_set
from tests.support.running_router import (
    failed_call,
    request,
    running_router,
    script_of,
    token_ids_of,
)

TIERS = ("prefill", "decode")
SCRIPT = script_of("The quick brown fox jumps over the lazy dog.")


def labels_of(worker, **labels):
    role = "prefill" if isinstance(worker, FakePrefill) else "decode"
    return {"model": worker.info.model, "role": role, **labels}


@asynccontextmanager
async def announced(address, labels, *routers, security=None):
    """Announces an address to routers, and withdraws it at the end of the block."""
    registration = Registration(routers, address, lambda: labels, security or ClusterSecurity())
    running = asyncio.create_task(registration.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def listed(router):
    """The addresses that the decode tier of a router tries now."""
    return router.fleet.decode._addresses


async def test_workers_that_announce_themselves_are_used_until_they_are_lost():
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    targets = {"prefill": ("register:///",), "decode": ("register:///",)}
    async with running_workers(prefill, decode), running_router(**targets) as router:
        to = router.server.address
        async with (
            announced(prefill.address, labels_of(prefill), to),
            announced(decode.address, labels_of(decode), to),
        ):
            await router.until_connected(prefill, decode)
            assert token_ids_of(await router.generate(request(max_tokens=8))) == SCRIPT[:8]
            assert len(prefill.requests) == len(decode.starts) == 1
        # They have withdrawn, as at the begin of a drain: connections stay.
        assert not listed(router)
        assert router.candidate_ids() == {prefill.info.worker_id, decode.info.worker_id}
        await decode.stop()
        await router.until(lambda: router.candidate_ids() == {prefill.info.worker_id})
        await until(lambda: decode.address not in router.fleet.decode._followers)  # not tried again
        assert not router.fleet.decode.problems


async def test_labels_choose_the_pools_of_models():
    decodes = [FakeDecode(SCRIPT), FakeDecode(SCRIPT), FakeDecode(SCRIPT, model="other")]
    h100, plain, other = decodes
    more = (ServedModelConfig(model="other", decode=("register:///",)),)
    options = {"decode": ("register:///?hardware=h100",), "more_models": more}
    async with running_workers(*decodes), running_router(**options) as router:
        to = router.server.address
        async with (
            announced(h100.address, labels_of(h100, hardware="h100"), to),
            announced(plain.address, labels_of(plain), to),
            announced(other.address, labels_of(other), to),
        ):
            pools = [model.fleet.decode for model in router.service.models]
            await router.until(lambda: all(pool.candidates for pool in pools))
            ids = [{replica.replica_id for replica in pool.candidates} for pool in pools]
            assert ids == [{h100.info.worker_id}, {other.info.worker_id}]
            assert pools[0]._addresses == {h100.address}


async def test_every_router_of_a_name_is_told_and_one_that_starts_again_is_told_again(monkeypatch):
    short = partial(Announcements, lease_s=0.3)  # the worker renews it every 0.1 s
    monkeypatch.setattr(router_server, "Announcements", short)
    worker = FakeDecode(SCRIPT)
    port = reserved_port()
    router_options = {"decode": ("register:///",), "grpc": ServerConfig(port=port)}
    to = f"dns:///localhost:{port}"
    async with running_workers(worker), announced(worker.address, labels_of(worker), to):
        for _ in range(2):
            async with running_router(**router_options) as router:
                await router.until_connected(worker)


@pytest.mark.parametrize("failure", [ValueError("a bug"), asyncio.CancelledError()])
async def test_a_worker_is_announced_after_any_failure(failure, caplog):
    worker, asked = FakeDecode(SCRIPT), []

    def labels():
        asked.append(1)
        if len(asked) == 1:
            raise failure
        return labels_of(worker)

    async with running_workers(worker), running_router(decode=("register:///",)) as router:
        registration = Registration(
            (router.server.address,), worker.address, labels, ClusterSecurity()
        )
        running = asyncio.create_task(registration.run())
        await router.until_connected(worker)
        assert "not announced to router" in caplog.text
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await router.until(lambda: not listed(router))


async def test_a_replica_set_announces_itself_once_for_all_its_workers():
    async with (
        running_set(SCRIPT, 2) as replicas,
        running_router(decode=("register:///",)) as router,
    ):
        labels = {"model": MODEL, "role": "decode"}
        async with announced(replicas.address, labels, router.server.address):
            await router.until_connected(*replicas.workers)


async def test_only_processes_of_the_cluster_may_announce_workers(tmp_path, caplog):
    token_file = str(tmp_path / "token")
    own = ClusterSecurity(CredentialsConfig(token_file=token_file))
    worker = FakeDecode(SCRIPT, security=own)
    security = RouterSecurityConfig(cluster=CredentialsConfig(token_file=token_file))
    options = {"decode": ("register:///",), "security": security}
    async with running_workers(worker), running_router(**options) as router:
        to = router.server.address
        stub = registration_pb2_grpc.RegistrationServiceStub(router.channel)
        message = registration_pb2.AnnounceRequest(address="a:1")
        error = await failed_call(stub.Announce(message, timeout=10))
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        async with announced(worker.address, labels_of(worker), to):
            await until(lambda: "not announced to router" in caplog.text)
        assert not listed(router)
        async with announced(worker.address, labels_of(worker), to, security=own):
            await router.until_connected(worker)


async def test_bad_announcements_name_the_field():
    async with running_router(decode=("register:///",)) as router:
        stub = registration_pb2_grpc.RegistrationServiceStub(router.channel)
        for message, field in (
            (registration_pb2.AnnounceRequest(address="nowhere"), "address is 'nowhere'"),
            (registration_pb2.AnnounceRequest(address="a:1", labels={"-": ""}), "labels is '-'"),
        ):
            error = await failed_call(stub.Announce(message, timeout=10))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in error.details()


async def test_a_router_without_a_grpc_port_takes_no_announcements():
    with pytest.raises(ConfigurationError, match="workers announce themselves to the gRPC port"):
        async with running_router(
            decode=("register:///",), grpc=ServerConfig(port=None), http=HttpConfig(port=0)
        ):
            pass


def config_of(*flags):
    parser = FlagParser()
    add_flags(parser, RegistrationConfig, "server")
    return config_from_args(RegistrationConfig, parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label", "a=b"], "--label is for announcements; set --register-with"),
        (["--advertise-address", "a"], "--advertise-address is for announcements"),
        (["--register-with", "router"], "target 'router' must be host:port"),
        (["--register-with", "register:///"], "target 'register:///': workers announce"),
        (["--register-with", "r:1", "--label", "a"], "--label 'a' must be NAME=VALUE"),
        (["--register-with", "r:1", "--label", "role=decode"], "not stated yet"),
        (["--register-with", "r:1", "--label", "a=1,a=2"], "not stated yet"),
        (["--register-with", "r:1", "--label", "_a=1"], "--label: labels is '_a'"),
        (["--register-with", "r:1", "--advertise-address", "a b"], "must be HOST or HOST:PORT"),
        (["--register-with", "r:1", "--advertise-address", "a:0"], "must be HOST or HOST:PORT"),
    ],
)
def test_bad_flags_of_registration_are_refused(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        config_of(*flags)


@pytest.mark.parametrize(
    ("host", "advertised", "address"),
    [
        ("10.0.0.7", None, "10.0.0.7:7"),
        ("::1", None, "[::1]:7"),
        ("0.0.0.0", "worker-1.workers", "worker-1.workers:7"),
        ("0.0.0.0", "10.0.0.8:99", "10.0.0.8:99"),
        ("0.0.0.0", "fd00::8", "[fd00::8]:7"),
        ("0.0.0.0", "[fd00::8]:99", "[fd00::8]:99"),
    ],
)
def test_the_announced_address(host, advertised, address):
    config = RegistrationConfig(register_with=("r:1",), advertise_address=advertised)
    assert config.address(ServerConfig(host=host), 7) == address


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_processes_of_workers_announce_themselves(tmp_path: Path):
    model = f"--model={tiny_checkpoint('llama')}"
    common = [model, "--served-model-name=tiny"]
    targets = ["--prefill=register:///", "--decode=register:///?zone=a"]
    router = ServerProcess("router", tmp_path, "router", [*common, *targets])
    name = f"dns:///localhost:{router.address.rpartition(':')[2]}"
    engine = [f"--kv-connector=file://{tmp_path}/kv", "--dtype=float32", "--num-threads=1"]
    engine += ["--max-model-len=512", "--num-gpu-blocks-override=512"]
    flags = [*common, *engine, f"--register-with={name}", "--label=zone=a"]
    workers = [ServerProcess(f"worker.{tier}", tmp_path, tier, flags) for tier in TIERS]
    try:
        await router.wait_serving()  # with decode alone
        await until(
            lambda: all(f"announced {each.address} to router" in each.log() for each in workers)
        )
        async with AsyncClient(router.address) as client:
            await Job(1).run(client)
        assert [worker.stop() for worker in workers] == [0, 0]
    finally:
        for process in (router, *workers):
            process.kill()


def is_serving(address: str, tls: ClientTls) -> bool:
    """Whether new connections find only processes that serve."""
    options = (*tls.channel_options(), ("grpc.use_local_subchannel_pool", 1))
    for _ in range(20):
        with open_blocking_channel(address, tls.channel_credentials(), options=options) as channel:
            answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=10)
            if answer.status != HealthCheckResponse.SERVING:
                return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_announces_itself_over_tls_to_a_router_of_two_processes(tmp_path: Path):
    authority, port = Authority(), reserved_port()
    files = write_files(tmp_path / "tls", authority.issue(), authority.certificate)
    tls = ClientTls(ssl_ca_certs=files.ca_certs)
    common = [f"--model={tiny_checkpoint('llama')}", "--served-model-name=tiny"]
    common += [f"{flag}={path}" for flag, path in files.paths]
    targets = ["--prefill=register:///", "--decode=register:///", "--processes=2"]
    flags = [*common, *targets, f"--grpc-port={port}"]
    router = ServerProcess("baton.cli.router", tmp_path, "router", flags)
    flags = [*common, "--max-model-len=512", "--num-gpu-blocks-override=512", "--dtype=float32"]
    flags += ["--num-threads=1", f"--register-with=dns:///localhost:{port}"]
    worker = ServerProcess("worker.decode", tmp_path, "decode", flags)
    address = f"localhost:{port}"
    try:
        await wait_until_serving(address, START_TIMEOUT_S, lambda: tls)
        await until(lambda: is_serving(address, tls))
        async with open_channel(address, tls.channel_credentials()) as channel:
            stub = registration_pb2_grpc.RegistrationServiceStub(channel)
            message = registration_pb2.AnnounceRequest(address="a:1")
            for metadata in ((), (("authorization", "Bearer of-another-cluster"),)):
                error = await failed_call(stub.Announce(message, timeout=10, metadata=metadata))
                assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        async with AsyncClient(address, ssl_ca_certs=files.ca_certs) as client:
            await Job(1).run(client)
        assert worker.stop() == 0
        assert router.stop() == 0
        assert "a:1" not in router.log()
    finally:
        for process in (router, worker):
            process.kill()
