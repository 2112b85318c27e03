"""`--data-parallel-size`: a process that runs several workers behind its address.

It starts workers with its own flags on free ports of its host, starts them again when they die,
and answers routers which workers there are. It holds no model and passes no requests on.
"""

import argparse
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from baton.errors import ConfigurationError
from baton.flag_values import count
from baton.flags import add_flags, config_from_args, flag, flags_of_config
from baton.health import wait_until_serving
from baton.processes.output import log_writer
from baton.processes.ports import bound_ports, local_address
from baton.processes.run_folder import sharing_machine
from baton.processes.spawn import ProcessSpec
from baton.processes.supervisor import RestartPolicy, SupervisedProcess
from baton.security.client import ClientTls
from baton.security.cluster import TOKEN_VARIABLE
from baton.security.config import ClusterConfig, TlsConfig
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from engine.config import EngineConfig
from kvstore.registry import has_fixed_port
from rpc.cluster_calls import cluster_access
from rpc.metrics_config import MetricsConfig
from rpc.server import RpcServer, serve
from rpc.server_config import ServerConfig
from rpc.tracing import TracingConfig
from rpc.worker import worker_server_config
from worker.process_spec import worker_spec
from worker.replica_set import MOST_REPLICAS, Replica, ReplicaSet, ReplicaSetServicer

__all__ = [
    "ReplicaSetConfig",
    "add_replica_args",
    "free_port",
    "replica_spec",
    "run_replicas",
    "tls_of_caller",
]

_SERVICE_NAME: str = replica_set_pb2.DESCRIPTOR.services_by_name["ReplicaSetService"].full_name
_START_TIMEOUT_S = 900.0
_STOP_GRACE_S = 10.0
"""Time to end for a worker that has drained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetConfig:
    """The number of workers behind one address.

    Raises:
        ConfigurationError: the number is out of range; names the flag.
    """

    data_parallel_size: int | None = flag(
        None,
        "number of workers that this process starts and lists for routers, which `baton scale` "
        "changes (default: this process is a worker itself)",
        parse=count,
        aliases={"-dp": None},
        is_main=True,
    )

    def __post_init__(self) -> None:
        size = self.data_parallel_size
        if size is not None and not 1 <= size <= MOST_REPLICAS:
            raise ConfigurationError(
                f"--data-parallel-size is {size}; it must be in [1, {MOST_REPLICAS}]"
            )


def add_replica_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of the number of workers."""
    add_flags(parser, ReplicaSetConfig, "server")


async def run_replicas(
    args: argparse.Namespace, tier: str, engine: EngineConfig, num_replicas: int
) -> None:
    """Runs workers behind one address until SIGTERM or SIGINT, then drains them.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        num_replicas: the number of workers at first.

    Raises:
        ConfigurationError: a flag does not work with several workers, an address cannot be bound,
            or a worker cannot start.
    """
    _check(engine)
    server_config, security = worker_server_config(args)

    async def start(server: RpcServer) -> ReplicaSet:
        replicas = ReplicaSet(make_replica)
        server.add_servicer(
            replica_set_pb2_grpc.add_ReplicaSetServiceServicer_to_server,
            ReplicaSetServicer(replicas),
        )
        try:
            await replicas.scale(num_replicas)
        except BaseException:
            await replicas.close()
            raise
        server.set_serving(True)
        return replicas

    # Workers whose number of threads is given have cores of their own.
    with sharing_machine(engine, turns=engine.num_threads is None) as shared:
        make_replica = _replica_maker(args, tier, shared, server_config)
        access = cluster_access(security, server_config.host)
        await serve(server_config, (_SERVICE_NAME,), start, access)


def _check(engine: EngineConfig) -> None:
    """Refuses an engine of which a host cannot run several."""
    if engine.nnodes > 1:
        raise ConfigurationError(
            f"--data-parallel-size starts workers of one machine, and --nnodes is {engine.nnodes}; "
            "leave one of them out"
        )
    if engine.distributed_executor_backend == "external_launcher":
        raise ConfigurationError(
            "--data-parallel-size starts workers itself; with --distributed-executor-backend "
            "external_launcher, start a worker per replica"
        )
    if engine.kv_connector is not None and has_fixed_port(engine.kv_connector):
        raise ConfigurationError(
            "--data-parallel-size starts several workers, and --kv-connector has a port, which "
            "one of them can take; leave the port out of the URL"
        )


def _replica_maker(
    args: argparse.Namespace, tier: str, engine: EngineConfig, server: ServerConfig
) -> Callable[[int, Collection[str]], Replica]:
    """Returns what makes the worker with a number, at none of some addresses.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        server: of the process itself.
    """
    tls = config_from_args(TlsConfig, args)
    policy = RestartPolicy(stop_grace_s=server.drain_timeout_s + _STOP_GRACE_S)
    write_line = log_writer(server.log_format)

    def make(number: int, taken: Collection[str]) -> Replica:
        port = free_port(server.host, taken)
        spec = replica_spec(args, tier, engine, number, port)
        process = SupervisedProcess(spec, write_line, policy)
        return _WorkerProcess(process, server.host, port, tls)

    return make


def free_port(host: str, taken: Collection[str]) -> int:
    """Returns a free port of this host.

    Args:
        host: the address to listen on.
        taken: `:port` of each port to leave out: a worker may not have bound its own yet.
    """
    ports = bound_ports([(host, 0, "--port")] * (len(taken) + 1))  # one of them is not taken
    return next(port for port in ports if f":{port}" not in taken)


def replica_spec(
    args: argparse.Namespace, tier: str, engine: EngineConfig, number: int, port: int
) -> ProcessSpec:
    """Returns the process of a worker, which has the flags of this one except for its ports.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        number: the worker's number; it serves metrics at the port of the flag plus this number.
        port: the worker's port.
    """
    server, metrics = config_from_args(ServerConfig, args), config_from_args(MetricsConfig, args)
    if metrics.port:  # 0 is any free port
        metrics = replace(metrics, port=metrics.port + number)
    own = replace(server, port=port, port_file=None)
    others = (config_from_args(one, args) for one in (TlsConfig, ClusterConfig, TracingConfig))
    flags = [one for config in (own, metrics, *others) for one in flags_of_config(config)]
    token = os.environ.get(TOKEN_VARIABLE)
    environment = {} if token is None else {TOKEN_VARIABLE: token}
    return worker_spec(tier, number, engine, flags, environment)


class _WorkerProcess(Replica):
    """A worker in a process of its own.

    Args:
        process: the process, not started yet.
        host: the address that it listens on.
        port: its port.
        tls: its certificates.
    """

    def __init__(self, process: SupervisedProcess, host: str, port: int, tls: TlsConfig) -> None:
        self._process = process
        self._local_address = local_address(host, port)
        self._port = port
        self._tls = tls

    @property
    @override
    def address(self) -> str:
        return f":{self._port}"

    @override
    async def start(self, on_move: Callable[[], None]) -> None:
        tls = partial(tls_of_caller, self._tls)
        serving = wait_until_serving(self._local_address, _START_TIMEOUT_S, tls)
        await self._process.start_until(serving)

    @override
    async def stop(self) -> None:
        await self._process.stop()

    @override
    def kill(self) -> None:
        self._process.kill()


def tls_of_caller(tls: TlsConfig) -> ClientTls:
    """Returns how this process calls a worker that has the same certificate as itself."""
    if tls.ssl_certfile is None:
        return ClientTls()
    own = ClientTls.pinned(tls.ssl_certfile)
    return replace(own, ssl_certfile=tls.ssl_certfile, ssl_keyfile=tls.ssl_keyfile)
