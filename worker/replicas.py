"""The workers of a replica set as processes: on this machine, or on the nodes of a Ray cluster."""

import argparse
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from typing_extensions import override

from baton.common.container_limits import LimitsShare
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import config_from_args, flags_of_config
from baton.common.security.client import ClientTls
from baton.common.security.cluster import TOKEN_VARIABLE, ClusterSecurity
from baton.common.security.config import CertificateFiles, CredentialsConfig
from engine.config import EngineConfig
from rpc.probe import wait_until_serving
from rpc.server_config import MetricsConfig, ServerConfig
from rpc.tracing import TracingConfig
from worker.kv_events.config import KvEventsConfig
from worker.processes.output import log_writer
from worker.processes.ports import free_port, local_address
from worker.processes.ray_nodes import RayNodes, RemoteProcess
from worker.processes.spawn import ProcessSpec, worker_spec
from worker.processes.supervisor import RestartPolicy, SupervisedProcess
from worker.replica_set import MakeReplica, WorkerReplica

__all__ = [
    "RemoteReplica",
    "remote_replica_spec",
    "replica_spec",
    "replicas_here",
    "replicas_on_ray",
    "tls_of_caller",
]

_START_TIMEOUT_S = 900.0
_STOP_GRACE_S = 10.0
"""Time to end for a worker that has drained."""


def replicas_here(
    args: argparse.Namespace,
    tier: str,
    engine: EngineConfig,
    server: ServerConfig,
    share: LimitsShare | None = None,
) -> MakeReplica:
    """Returns the maker of the workers of this machine.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        server: of the process itself.
        share: each worker's share of the container's limits; None for all of them.
    """
    tls = config_from_args(CertificateFiles, args)
    write_line, policy = log_writer(server.log_format), _restart_policy(server)

    def make(number: int, taken: Collection[str]) -> WorkerReplica:
        port = free_port(server.host, taken)
        spec = replica_spec(args, tier, engine, number, port)
        if share is not None:
            spec = replace(spec, environment={**spec.environment, **share.environment})
        process = SupervisedProcess(spec, write_line, policy)
        return _LocalReplica(process, server.host, port, tls)

    return make


def replicas_on_ray(
    args: argparse.Namespace,
    tier: str,
    engine: EngineConfig,
    server: ServerConfig,
    security: ClusterSecurity,
) -> MakeReplica:
    """Returns the maker of the workers on a Ray cluster, which this process joins.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        server: of the process itself.
        security: of the process itself.

    Raises:
        ConfigurationError: the cluster cannot be joined, workers would take calls without a
            credential, or a flag is for workers of this machine; names the flag.
    """
    security.check_host("--on", "ray")
    if config_from_args(MetricsConfig, args).port is not None:
        raise ConfigurationError(
            "--metrics-port is for workers of one machine; with --on ray leave it out"
        )
    if config_from_args(KvEventsConfig, args).kv_events_zmq is not None:
        raise ConfigurationError(
            "--kv-events-zmq is for workers of one machine; with --on ray leave it out"
        )
    tls = config_from_args(CertificateFiles, args)
    write_line, policy = log_writer(server.log_format), _restart_policy(server)
    nodes = RayNodes(engine)

    def make(number: int, _: Collection[str]) -> WorkerReplica:
        spec = remote_replica_spec(args, tier, engine, number, security.token)
        return RemoteReplica(spec, nodes.spawn, tls, write_line, policy)

    return make


def _restart_policy(server: ServerConfig) -> RestartPolicy:
    return RestartPolicy(stop_grace_s=server.drain_timeout_s + _STOP_GRACE_S)


def replica_spec(
    args: argparse.Namespace, tier: str, engine: EngineConfig, number: int, port: int
) -> ProcessSpec:
    """Returns the process of a worker, which has the flags of this one except for its ports.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        number: the worker's number; it serves metrics, and publishes KV events, at the ports of
            the flags plus this number.
        port: the worker's port.
    """
    server, metrics = config_from_args(ServerConfig, args), config_from_args(MetricsConfig, args)
    if metrics.port:  # 0 is any free port
        metrics = replace(metrics, port=metrics.port + number)
    replica_server = replace(server, port=port, port_file=None, shutdown_delay_s=0.0)
    events = config_from_args(KvEventsConfig, args).of_replica(number)
    others = (
        config_from_args(one, args) for one in (CertificateFiles, CredentialsConfig, TracingConfig)
    )
    flags = [
        one
        for config in (replica_server, metrics, events, *others)
        for one in flags_of_config(config)
    ]
    return worker_spec(tier, number, engine, flags, _variables(os.environ.get(TOKEN_VARIABLE)))


def remote_replica_spec(
    args: argparse.Namespace, tier: str, engine: EngineConfig, number: int, token: str | None
) -> ProcessSpec:
    """Returns the process of a worker on another machine, which chooses its address.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        number: the worker's number.
        token: of the cluster: a file of it may not be there.
    """
    server = config_from_args(ServerConfig, args)
    flags = flags_of_config(server, omit=("host", "port", "port_file", "shutdown_delay_s"))
    flags += flags_of_config(config_from_args(CredentialsConfig, args), omit=("token_file",))
    for config in (CertificateFiles, TracingConfig):
        flags += flags_of_config(config_from_args(config, args))
    return worker_spec(tier, number, engine, flags, _variables(token))


def _variables(token: str | None) -> Mapping[str, str]:
    return {} if token is None else {TOKEN_VARIABLE: token}


class _LocalReplica(WorkerReplica):
    """A worker in a process of this machine.

    Args:
        process: the process, not started yet.
        host: the address that it listens on.
        port: its port.
        tls: its certificates.
    """

    def __init__(
        self, process: SupervisedProcess, host: str, port: int, tls: CertificateFiles
    ) -> None:
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
        await self._process.start_until(self._wait_until_serving)

    @override
    async def stop(self) -> None:
        await self._process.stop()

    @override
    def kill(self) -> None:
        self._process.kill()

    async def _wait_until_serving(self) -> None:
        tls = partial(tls_of_caller, self._tls)
        await wait_until_serving(self._local_address, _START_TIMEOUT_S, tls)


class RemoteReplica(WorkerReplica):
    """A worker in a process of another machine, where each start gives it an address.

    Args:
        spec: the process.
        spawn: starts it.
        tls: its certificates.
        write_line: called with each line of its output.
        policy: delays of restarts and of the stop.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        spawn: Callable[[ProcessSpec], Awaitable[RemoteProcess]],
        tls: CertificateFiles,
        write_line: Callable[[str], None],
        policy: RestartPolicy,
    ) -> None:
        self._spawn = spawn
        self._tls = tls
        self._address = ""
        self._process = SupervisedProcess(spec, write_line, policy, self._spawn_and_list)

    @property
    @override
    def address(self) -> str:
        return self._address

    @override
    async def start(self, on_move: Callable[[], None]) -> None:
        self._on_move = on_move
        await self._process.start_until(self._wait_until_serving)

    @override
    async def stop(self) -> None:
        await self._process.stop()

    @override
    def kill(self) -> None:
        self._process.kill()

    async def _spawn_and_list(self, spec: ProcessSpec) -> RemoteProcess:
        process = await self._spawn(spec)
        self._address = process.address
        self._on_move()
        return process

    async def _wait_until_serving(self) -> None:
        tls = partial(tls_of_caller, self._tls)
        await wait_until_serving(self._address, _START_TIMEOUT_S, tls)


def tls_of_caller(tls: CertificateFiles) -> ClientTls:
    """Returns how this process calls a worker that has the same certificate as itself."""
    if tls.certfile is None:
        return ClientTls()
    pinned = ClientTls.pinned(tls.certfile)
    return replace(pinned, ssl_certfile=tls.certfile, ssl_keyfile=tls.keyfile)
