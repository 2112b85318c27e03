"""`--data-parallel-size`: the flags of its workers, and what it does not work with."""

import argparse
import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton import cli
from baton.common.flags.config_flags import config_from_args
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles, CredentialsConfig
from engine.cli_args import engine_config_from_args
from kvstore.registry import has_fixed_host, has_fixed_port
from rpc.probe import wait_until_serving
from rpc.server_config import MetricsConfig, ServerConfig
from rpc.tracing import TracingConfig
from tests.support.certificates import Authority, write_files
from tests.support.fake_workers import FakeDecode
from worker.decode import add_args as add_decode_args
from worker.decode import main as decode_main
from worker.kv_events.config import KvEventsConfig
from worker.processes.spawn import ProcessSpec
from worker.processes.supervisor import RestartPolicy
from worker.replica_set import MAX_REPLICAS
from worker.replicas import (
    RemoteReplica,
    remote_replica_spec,
    replica_spec,
    tls_of_caller,
)

FLAGS = (
    *("m", "--data-parallel-size=3", "--host=0.0.0.0", "--port=7000", "--port-file=p"),
    *("--metrics-port=9000", "--metrics-host=127.0.0.2", "--drain-timeout-s=7"),
    *("--log-format=json", "--ssl-certfile=c", "--ssl-keyfile=k", "--cluster-token-file=t"),
    *("--otlp-traces-endpoint=http://traces:4317", "--revision=v2", "--tensor-parallel-size=2"),
    *("--kv-connector=redis://:secret@host:1/0", "--num-threads=2", "--no-enable-prefix-caching"),
    *("--kv-events-zmq=tcp://*:5557", "--kv-events-topic=kv@here@m"),
)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_decode_args(parser)
    return parser.parse_args(arguments)


def test_workers_have_the_flags_of_the_set_except_for_its_ports(monkeypatch):
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "t" * 32)
    given = parse(*FLAGS)
    engine = engine_config_from_args(given)
    spec = replica_spec(given, "decode", engine, 2, 7123)
    assert (spec.name, spec.module) == ("decode-2", "worker.decode")
    assert spec.environment == {
        "BATON_CLUSTER_TOKEN": "t" * 32,
        "BATON_KV_CONNECTOR": "redis://:secret@host:1/0",
    }
    assert "secret" not in " ".join(spec.arguments)
    own = parse(*spec.arguments, "--kv-connector=redis://:secret@host:1/0")
    assert own.data_parallel_size is None
    assert engine_config_from_args(own) == engine
    for config in (CertificateFiles, CredentialsConfig, TracingConfig):
        assert config_from_args(config, own) == config_from_args(config, given)
    server = config_from_args(ServerConfig, given)
    assert config_from_args(ServerConfig, own) == replace(server, port=7123, port_file=None)
    metrics = config_from_args(MetricsConfig, given)
    assert config_from_args(MetricsConfig, own) == replace(metrics, port=9002)
    events = config_from_args(KvEventsConfig, given)
    numbered = replace(events, kv_events_zmq="tcp://*:5559", kv_events_rank=2)
    assert config_from_args(KvEventsConfig, own) == numbered


def test_workers_elsewhere_have_no_address_and_no_file_of_this_machine():
    given = parse(*FLAGS)
    engine = engine_config_from_args(given)
    spec = remote_replica_spec(given, "decode", engine, 2, "u" * 32)
    assert spec.name == "decode-2"
    assert spec.environment["BATON_CLUSTER_TOKEN"] == "u" * 32
    own = parse(*spec.arguments, "--kv-connector=redis://:secret@host:1/0")
    assert (own.on, own.data_parallel_size) == ("machine", None)
    assert engine_config_from_args(own) == engine
    assert config_from_args(CertificateFiles, own) == config_from_args(CertificateFiles, given)
    assert config_from_args(CredentialsConfig, own) == CredentialsConfig()
    server = config_from_args(ServerConfig, given)
    assert config_from_args(ServerConfig, own) == replace(
        server, host="127.0.0.1", port=parse("m").port, port_file=None
    )
    assert config_from_args(MetricsConfig, own) == MetricsConfig()


class FakeRemoteProcess:
    """A process on a node, which ends when the test ends it or a message asks it to."""

    returncode = None
    pid = 42

    def __init__(self, address):
        self.address, self.ended = address, asyncio.Event()
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_eof()

    async def wait(self):
        await self.ended.wait()
        self.returncode = 1
        return 1

    def describe_end(self):
        return "ended with status 1"

    def kill(self):
        self.ended.set()

    terminate = close = kill


async def test_a_worker_elsewhere_is_listed_at_the_address_of_its_latest_start(monkeypatch):
    places = [FakeRemoteProcess(f"10.0.0.{number}:7000") for number in (1, 2)]
    waiting = iter(places)

    async def spawn(_):
        return next(waiting)

    async def wait_until_serving(address, *_):
        assert address == places[0].address

    monkeypatch.setattr("worker.replicas.wait_until_serving", wait_until_serving)
    spec = ProcessSpec("decode-0", "worker.decode", ())
    policy = RestartPolicy(first_delay_s=0.0)
    replica = RemoteReplica(spec, spawn, CertificateFiles(), lambda _: None, policy)
    moves = asyncio.Queue()
    async with asyncio.timeout(60):
        await replica.start(lambda: moves.put_nowait(replica.address))
        assert await moves.get() == replica.address == places[0].address
        places[0].kill()  # its node is lost
        assert await moves.get() == replica.address == places[1].address
        await replica.stop()
    assert places[1].ended.is_set()


@pytest.mark.parametrize("port", ["0", "none"])
def test_metrics_ports_that_are_free_or_off_stay_so(port):
    given = parse("m", f"--metrics-port={port}", "--port=7000")
    own = parse(*replica_spec(given, "decode", engine_config_from_args(given), 3, 7123).arguments)
    assert config_from_args(MetricsConfig, own) == config_from_args(MetricsConfig, given)


@pytest.mark.parametrize("asks_for_certificates", [True, False])
async def test_a_set_calls_its_workers_with_their_own_certificate(tmp_path, asks_for_certificates):
    authority = Authority()
    leaf = authority.issue("worker", dns=["worker.test"], addresses=[])
    ca_certs = authority.certificate if asks_for_certificates else None
    files = write_files(tmp_path, leaf, ca_certs)
    async with FakeDecode([1], security=ClusterSecurity(files=files)) as worker:
        await wait_until_serving(worker.address, 30, lambda: tls_of_caller(files))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["-dp", "0"], ["--data-parallel-size is 0"]),
        (["-dp", f"{MAX_REPLICAS + 1}"], ["--data-parallel-size is 257"]),
        (["-dp", "2", "-tp", "2", "--nnodes", "2"], ["--data-parallel-size", "--nnodes is 2"]),
        (
            ["-dp", "2", "-tp", "2", "--distributed-executor-backend", "external_launcher"],
            ["--data-parallel-size", "--distributed-executor-backend"],
        ),
        (
            ["-dp", "2", "--kv-connector", "grpc://:7000"],
            ["--data-parallel-size", "--kv-connector"],
        ),
        (["--on", "ray"], ["--on ray", "--data-parallel-size"]),
        (["-dp", "2", "--on", "ray"], ["--on is ray", "--cluster-token-file"]),
        (["-dp", "2", "--on", "ray", "--kv-connector", "shm://kv"], ["--kv-connector shm://"]),
        (["-dp", "2", "--port", "none"], ["--port is none"]),
        (["-dp", "2", "--host", "0.0.0.0"], ["--host is 0.0.0.0", "--cluster-token-file"]),
    ],
)
def test_what_does_not_work_with_several_workers_is_named(flags, named, monkeypatch, capfd):
    monkeypatch.delenv("BATON_CLUSTER_TOKEN", raising=False)
    monkeypatch.setattr("rpc.server.start_logging", lambda *_: None)
    assert decode_main(parse("demo", "--port=0", *flags)) == 2
    error = capfd.readouterr().err
    assert error.startswith("baton decode: error: ")
    assert [text for text in named if text not in error] == []


def test_a_set_that_finds_no_room_says_so_and_ends(tmp_path, monkeypatch, capfd):
    async def spawn(_):
        raise OSError("the Ray cluster had no room")

    monkeypatch.setattr("rpc.server.start_logging", lambda *_: None)
    monkeypatch.setattr("worker.replicas.RayNodes", lambda _: SimpleNamespace(spawn=spawn))
    flags = ("-dp=2", "--on=ray", f"--cluster-token-file={tmp_path}/token")
    assert decode_main(parse("demo", "--port=0", *flags)) == 2
    error = capfd.readouterr().err
    assert "baton decode: error: decode-0 could not be started: the Ray cluster had no" in error


@pytest.mark.parametrize("flag", ["--metrics-port=0", "--kv-events-zmq=tcp://*:5557"])
def test_workers_elsewhere_have_no_other_ports(flag, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("rpc.server.start_logging", lambda *_: None)
    flags = ("-dp=2", "--on=ray", flag, f"--cluster-token-file={tmp_path}/token")
    assert decode_main(parse("demo", "--port=0", *flags)) == 2
    name = flag.partition("=")[0]
    assert f"{name} is for workers of one machine" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("url", "is_fixed"),
    [
        ("grpc://", False),
        ("grpc://0.0.0.0?lease_s=3", False),
        ("grpc://0.0.0.0:7000", True),
        ("nixl://:7000", True),
        ("faulty+grpc://:7000?loss=0.1", True),
        ("multi://shm://kv,grpc://:7000", True),
        ("multi://shm://kv,grpc://", False),
        ("redis://host:6379/0", False),
        ("grpc://:port", False),
    ],
)
def test_fixed_ports_are_found_in_urls(url, is_fixed):
    assert has_fixed_port(url) is is_fixed


@pytest.mark.parametrize(
    ("url", "is_fixed"),
    [
        ("grpc://", True),  # 127.0.0.1
        ("nixl://0.0.0.0:7000", False),
        ("grpc://[::]", False),
        ("grpc://0.0.0.0?advertise=a", True),
        ("multi://redis://host:6379/0,grpc://10.0.0.1", True),
        ("redis://host:6379/0", False),
    ],
)
def test_fixed_hosts_are_found_in_urls(url, is_fixed):
    assert has_fixed_host(url) is is_fixed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-parallel-size=-1"], "--data-parallel-size is -1; it must be in [0, 256]"),
        (["-dp=300"], "--data-parallel-size is 300; it must be in [0, 256]"),
        (["-dp=4294967296"], "--data-parallel-size is 4294967296; it must be in [0, 256]"),
        (["-dp", "1", "--timeout-s=-1"], "--timeout-s is -1; it must be in"),
        (["-dp", "1", "--cluster-token-file=absent"], "--cluster-token-file absent"),
    ],
)
def test_baton_scale_refuses_bad_flags(flags, message, capsys):
    assert cli.main(["scale", "127.0.0.1:1", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_size_is_no_flag_of_other_commands():
    with pytest.raises(SystemExit):
        cli.build_parser("serve").parse_args(["serve", "--data-parallel-size", "2"])
