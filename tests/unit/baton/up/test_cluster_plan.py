"""`baton serve`: planned processes, their flags, the embedded store, turns on the CPU."""

import argparse
import asyncio
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli import serve
from baton.cli.serve_config import cluster_config_from_args, running_config
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import config_from_args, flags_of_config
from baton.common.flags.parser import FlagParser
from baton.up import cluster
from baton.up.plan import ClusterConfig, plan_cluster
from engine.cli_args import engine_config_from_args
from engine.config import EngineConfig
from router.config.http import HttpConfig
from router.config.router import add_args as add_router_args
from router.config.router import router_config_from_args
from router.config.security import RouterSecurityConfig
from router.config.tenants import TenantsConfig
from rpc.server_config import MetricsConfig, ServerConfig
from rpc.tracing import TracingConfig
from tests.support.ports import reserved_ports
from worker.decode import add_args as add_decode_args
from worker.prefill import add_args as add_prefill_args
from worker.processes.run_folder import embedded_store, sharing_machine
from worker.replica_processes import ReplicaSetConfig

ENGINE = EngineConfig(
    model="/models/some",
    kv_connector="shm://x",
    enable_prefix_caching=False,
    block_size=8,
    kv_cache_memory_bytes=2**20,
    kv_load_failure_policy="fail",
    kv_publish="off",
    num_threads=1,
)


def config(*, engine=ENGINE, num_prefill=2, num_decode=3, model=None, **router):
    given = ClusterConfig.grpc_only(engine, num_prefill=num_prefill, num_decode=num_decode)
    models = (replace(given.model, **(model or {})),)
    return replace(given, router=replace(given.router, models=models, **router))


def parse(add_args, arguments):
    parser = argparse.ArgumentParser()
    add_args(parser)
    return parser.parse_args(arguments)


def test_every_process_has_a_name_and_a_port_of_its_own():
    plan = plan_cluster(config())
    servers = (*plan.workers, plan.router)
    assert [server.spec.name for server in servers] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
        "decode-2",
        "router",
    ]
    assert len({server.address for server in servers}) == 6


def test_the_services_parse_the_planned_flags_to_the_same_configuration():
    marks = {"reasoning_start_str": "<think>", "reasoning_end_str": "-- end"}
    model = {"generation_config": "none", "chat_template": "{{ x }}", **marks}
    http = HttpConfig(allowed_origins=("http://a", "http://b"), max_request_bytes=4096)
    limits = {"default_timeout_s": 7.0, "max_local_prefill_tokens": 0}
    given = config(model=model, http=http, **limits)
    plan = plan_cluster(given)
    args = parse(add_decode_args, plan.decode[1].spec.arguments)
    assert engine_config_from_args(args, kv_connector=ENGINE.kv_connector) == ENGINE
    assert plan.decode[1].spec.environment["BATON_KV_CONNECTOR"] == ENGINE.kv_connector
    server = config_from_args(ServerConfig, args)
    assert plan.decode[1].address == f"{server.host}:{server.port}"
    args = parse(add_prefill_args, plan.prefill[0].spec.arguments)
    assert engine_config_from_args(args).block_size == 8
    router = router_config_from_args(parse(add_router_args, plan.router.spec.arguments))
    assert router.models == given.router.models
    assert given.model.prefill == tuple(server.address for server in plan.prefill)
    assert given.model.decode == tuple(server.address for server in plan.decode)
    assert given.model.names == (ENGINE.model_name,) == ("some",)
    assert plan.router.address == f"127.0.0.1:{router.grpc.port}"
    assert plan.router.http_address == f"127.0.0.1:{router.http.port}"
    ports = {"grpc": replace(router.grpc, port=0), "http": replace(router.http, port=0)}
    assert replace(router, **ports) == given.router


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:pass-word@store:6379/0",
        "redis+sentinel://store/name?sentinel_password=pass-word",
        "redis://store/0?password=pass-word",
        "multi://grpc://,redis+sentinel://store/name?sentinel_password=pass-word",
    ],
)
def test_secrets_are_in_the_environment_of_the_processes_and_not_on_their_command_lines(url):
    token = "t" * 32
    given = replace(config(engine=replace(ENGINE, kv_connector=url)), token=token)
    plan = plan_cluster(given)
    for server in (*plan.workers, plan.router):
        assert server.spec.environment["BATON_CLUSTER_TOKEN"] == token
        for shown in (*server.spec.arguments, repr(server), repr(given)):
            assert token not in shown
    for server in plan.workers:
        assert server.spec.environment["BATON_KV_CONNECTOR"] == url
        assert "pass-word" not in " ".join((*server.spec.arguments, repr(server)))
    assert "BATON_KV_CONNECTOR" not in plan.router.spec.environment


def test_all_processes_log_and_trace_as_the_command_does():
    grpc = ServerConfig(log_level="error", log_format="json")
    tracing = TracingConfig(otlp_traces_endpoint="http://c:4317", trace_sample_rate=0.25)
    plan = plan_cluster(config(grpc=grpc, tracing=tracing))
    for add_args, server in (
        (add_prefill_args, plan.prefill[0]),
        (add_decode_args, plan.decode[0]),
        (add_router_args, plan.router),
    ):
        args = parse(add_args, server.spec.arguments)
        assert (args.log_level, args.log_format) == ("error", "json")
        assert config_from_args(TracingConfig, args) == tracing


def test_no_command_line_of_a_child_has_a_key(monkeypatch):
    tenants = TenantsConfig(api_key=("sk-one-key", "sk-two-keys"), tenants="clients.yaml")
    spec = plan_cluster(config(security=RouterSecurityConfig(tenants=tenants))).router.spec
    assert "sk-" not in f"{spec}"
    assert "sha256:" not in f"{spec.arguments}"
    for name, value in spec.environment.items():
        monkeypatch.setenv(name, value)
    parser = FlagParser.of_command("python -m router", serve.main, add_router_args)
    parsed = router_config_from_args(parser.parse_args(list(spec.arguments)))
    assert parsed.security.tenants == tenants


def test_defaults_need_no_flags():
    assert flags_of_config(EngineConfig(model="m")) == ["--model", "m"]
    assert flags_of_config(EngineConfig(model="m"), omit={"model"}) == []


def test_names_are_separated_by_commas():
    config = EngineConfig(model="m", logits_processors=["a", "b:C"])
    assert flags_of_config(config, omit={"model"}) == ["--logits-processors", "a,b:C"]


@pytest.mark.parametrize(
    ("field", "flag"), [("num_prefill", "--prefill-workers"), ("num_decode", "--decode-workers")]
)
def test_impossible_numbers_are_refused(field, flag):
    with pytest.raises(ConfigurationError, match=f"{flag} is -1"):
        config(**{field: -1})


def test_prefill_is_optional():
    plan = plan_cluster(config(num_prefill=0))
    assert plan.prefill == ()
    assert "--prefill" not in plan.router.spec.arguments


@pytest.mark.parametrize(
    ("server", "kind", "flag"),
    [("http", HttpConfig, "--port"), ("grpc", ServerConfig, "--grpc-port")],
)
def test_the_flag_of_a_port_in_use_is_named(server, kind, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}.* another {flag} "):
            plan_cluster(config(**{server: kind(port=port)}))


@pytest.mark.parametrize(("off", "on"), [("http", "grpc"), ("grpc", "http")])
def test_one_of_the_servers_can_be_off(off, on):
    kinds = {"http": HttpConfig, "grpc": ServerConfig}
    servers = {off: kinds[off](port=None), on: kinds[on](port=0)}
    plan = plan_cluster(config(**servers))
    addresses = {"http": plan.router.http_address, "grpc": plan.router.address}
    assert addresses[off] == ""
    assert addresses[on].startswith("127.0.0.1:")
    router = router_config_from_args(parse(add_router_args, plan.router.spec.arguments))
    assert (router.http.port is None, router.grpc.port is None) == (off == "http", off == "grpc")


@pytest.mark.parametrize(
    "flags",
    [
        ["m", "--prefill-workers", "2", "--decode-workers", "3"],
        ["--model", "m", "--prefill", "2", "--decode", "3"],  # as `baton up` had them
    ],
)
def test_serve_starts_the_workers_that_its_flags_name(flags):
    args = parse(serve.add_args, [*flags, "--served-model-name", "a", "b", "--allowed-origins=x,y"])
    given = cluster_config_from_args(args, "shm://x")
    assert (len(given.model.prefill), len(given.model.decode)) == (2, 3)
    assert (given.engine.model, given.engine.model_name) == ("m", "a")
    assert given.model.names == ("a", "b")
    assert (given.router.http.port, given.router.grpc.port) == (8000, 50051)
    assert given.router.http.allowed_origins == ("x", "y")


def test_the_demo_model_is_the_default():
    given = cluster_config_from_args(parse(serve.add_args, []), "shm://x")
    assert given.engine.model == given.model.model == "demo"
    assert given.model.names == ("demo",)


@pytest.mark.parametrize("host", ["no such host", "a" * 70, "256.0.0.1", "::nonsense"])
def test_an_invalid_host_is_refused(host):
    with pytest.raises(ConfigurationError, match=f"cannot listen on .*{host}"):
        plan_cluster(config(grpc=ServerConfig(host=host)))


@pytest.mark.parametrize(
    ("host", "reachable"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")],
)
def test_the_address_of_the_router_is_reachable_from_this_machine(host, reachable):
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    router = plan_cluster(config(grpc=ServerConfig(host=host))).router
    assert router.address.rpartition(":")[0] == reachable
    parsed = router_config_from_args(parse(add_router_args, router.spec.arguments))
    assert parsed.grpc.host == host


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    use_as_shared_memory(monkeypatch, tmp_path)
    return tmp_path


def use_as_shared_memory(monkeypatch, folder):
    monkeypatch.setattr("worker.processes.run_folder.SHARED_MEMORY", folder)


def test_the_embedded_store_is_removed_with_the_cluster(shared_memory):
    with embedded_store() as url:
        folder = shared_memory / f"baton-{url.removeprefix('shm://')}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "objects").mkdir()
    assert not folder.exists()


def test_the_embedded_store_lies_in_a_temporary_folder_if_shared_memory_is_small(
    shared_memory, monkeypatch
):
    usage = shutil._ntuple_diskusage(64 << 20, 60 << 20, 4 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with embedded_store() as url:
        folder = Path(url.removeprefix("file://"))
        assert folder.is_dir()
        assert folder.parent == Path(tempfile.gettempdir())
    assert not folder.exists()


def test_folders_left_by_a_killed_cluster_are_removed(shared_memory):
    hold = (
        "import sys; from pathlib import Path; from worker.processes import run_folder as module\n"
        "module.SHARED_MEMORY = Path(sys.argv[1])\n"
        "with module.run_folder() as folder: print(folder, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, shared_memory]
    holders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    dead, alive = (Path(holder.stdout.readline().strip()) for holder in holders)
    foreign = shared_memory / "baton-upper"
    foreign.mkdir()
    holders[0].kill()
    holders[0].communicate()
    with embedded_store():
        assert not dead.exists()
        assert alive.exists()
        assert foreign.exists()
    holders[1].communicate("")
    assert not alive.exists()


def test_the_embedded_store_is_a_temporary_folder_without_shared_memory(tmp_path, monkeypatch):
    use_as_shared_memory(monkeypatch, tmp_path / "absent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with embedded_store() as url:
        assert url.startswith(f"file://{tmp_path}/baton-up-")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_all_workers_on_the_cpu_share_one_folder(device, shared_memory):
    given = config(engine=replace(ENGINE, device=device))
    with sharing_machine(given.engine, turns=True) as sharing:
        plan = plan_cluster(replace(given, engine=sharing))
        decode = [
            engine_config_from_args(parse(add_decode_args, server.spec.arguments))
            for server in plan.decode
        ]
        prefill = [
            engine_config_from_args(parse(add_prefill_args, server.spec.arguments))
            for server in plan.prefill
        ]
        (folder,) = shared_memory.iterdir()
        assert {engine.turns_folder for engine in decode + prefill} == {str(folder)}
        assert {engine.weights_folder for engine in decode + prefill} == {str(folder)}
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_workers_on_gpus_share_no_folder(device, shared_memory):
    given = replace(ENGINE, device=device)
    with sharing_machine(given, turns=True) as sharing:
        assert sharing is given
        assert list(shared_memory.iterdir()) == []


def test_a_single_worker_does_not_take_turns(shared_memory):
    flags = ("--prefill-workers=0", "--decode-workers=1")
    with running_config(parse(serve.add_args, flags)) as running:
        assert running.engine.turns_folder is None
        assert running.engine.weights_folder is not None


def test_folders_that_flags_name_are_kept(tmp_path, shared_memory):
    given = replace(ENGINE, weights_folder=str(tmp_path), turns_folder=str(tmp_path))
    with sharing_machine(given, turns=True) as sharing:
        assert sharing == given


@pytest.mark.parametrize(("flags", "takes_turns"), [((), True), (("--no-turns",), False)])
def test_workers_take_turns_unless_a_flag_disables_it(flags, takes_turns, shared_memory):
    with running_config(parse(serve.add_args, flags)) as running:
        assert (running.engine.turns_folder is not None) == takes_turns
        # The embedded store and the token's folder, too.
        assert len(list(shared_memory.iterdir())) == 3
    assert list(shared_memory.iterdir()) == []


def test_workers_on_ray_are_a_set_for_each_tier(shared_memory):
    flags = ("--prefill-workers", "2", "--metrics-port", "0", "--port", "0", "--grpc-port", "0")
    with running_config(parse(serve.add_args, flags), "10.0.0.1:6379") as running:
        plan = plan_cluster(running)
        assert running.engine.kv_connector == "grpc://0.0.0.0"
        assert running.engine.weights_folder is running.engine.turns_folder is None
        tiers = (plan.prefill, running.model.prefill, 2), (plan.decode, running.model.decode, 1)
        for servers, targets, size in tiers:
            (server,), (target,) = servers, targets
            assert server.address == target
            assert server.metrics_url == ""
            assert server.spec.environment["BATON_CLUSTER_TOKEN"] == running.token
            assert server.spec.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
            parsed = parse(add_decode_args, server.spec.arguments)
            assert config_from_args(ReplicaSetConfig, parsed) == ReplicaSetConfig(
                data_parallel_size=size, on="ray"
            )
            assert config_from_args(MetricsConfig, parsed) == MetricsConfig()
        assert [server.spec.name for server in plan.workers] == ["prefill", "decode"]
        assert plan.router.metrics_url
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
async def test_processes_have_time_for_what_they_do_themselves(shared_memory, monkeypatch, address):
    graces_s, starts_s = {}, []

    class Process:
        """Records its grace period, and starts at once."""

        def __init__(self, spec, write_line, policy):
            graces_s[spec.name] = policy.stop_grace_s

        async def start_until(self, wait_serving):
            await wait_serving()

        async def stop(self):
            pass

    async def wait_until_serving(address, timeout_s, tls):
        starts_s.append(timeout_s)

    is_ready = asyncio.Event()

    async def on_ready():
        is_ready.set()

    monkeypatch.setattr(cluster, "SupervisedProcess", Process)
    monkeypatch.setattr(cluster, "wait_until_serving", wait_until_serving)
    flags = ("--drain-timeout-s=30", "--port=none", "--grpc-port=0")
    with running_config(parse(serve.add_args, flags), address) as running:
        plan = plan_cluster(running)
        await cluster.run_cluster(plan, print, on_ready, lambda _: is_ready.wait())
    assert graces_s.pop("router") == 40
    if address is None:
        assert graces_s == {"prefill-0": 40, "decode-0": 40}
        assert starts_s == [900] * 3
    else:  # their workers have 40 s to stop, and 300 s to find room before they load
        assert graces_s == {"prefill": 50, "decode": 50}
        assert starts_s == [1260, 1260, 900]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
async def test_addresses_that_cannot_be_printed_end_no_cluster(monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(serve, "_print_addresses", fail)
    await serve._on_ready(None, None, with_demo=False)


def test_on_ray_decode_may_compute_prompts_too(shared_memory):
    flags = ("--prefill-workers", "0", "--port", "0", "--grpc-port", "0")
    args = parse(serve.add_args, flags)
    with running_config(args, "10.0.0.1:6379") as running:
        assert plan_cluster(running).prefill == ()


def _metrics_ports(metrics: MetricsConfig) -> list[int]:
    plan = plan_cluster(config(metrics=metrics))
    servers = (plan.router, *plan.workers)
    for server in servers:
        port = server.metrics_address.rpartition(":")[2]
        arguments = server.spec.arguments
        assert arguments[arguments.index("--metrics-port") + 1] == port
        assert server.metrics_url == f"http://127.0.0.1:{port}/metrics"
    return [int(server.metrics_address.rpartition(":")[2]) for server in servers]


def test_metrics_are_served_at_free_ports_or_at_those_after_the_routers():
    free = _metrics_ports(MetricsConfig(port=0))
    assert len(set(free)) == 6
    assert 0 not in free
    following = reserved_ports(6)
    assert _metrics_ports(MetricsConfig(port=following[0])) == following


def test_without_a_port_no_process_serves_metrics():
    plan = plan_cluster(config())
    for server in (plan.router, *plan.workers):
        assert "--metrics-port" not in server.spec.arguments
        assert server.metrics_url == ""


def test_ports_for_metrics_beyond_the_last_one_are_refused():
    with pytest.raises(ConfigurationError, match="--metrics-port"):
        plan_cluster(config(metrics=MetricsConfig(port=65533)))
