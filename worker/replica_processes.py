"""`--data-parallel-size`: a process that runs several workers behind its address.

It starts workers with its own flags, on free ports of its host or on the nodes of a Ray cluster,
starts them again when they die, and answers routers which workers there are. It holds no model and
passes no requests on.
"""

import argparse
import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass

from typing_extensions import override

from baton.common.container_limits import SUPERVISOR_NEEDS, WORKER_NEEDS, LimitsShare, check_needs
from baton.common.errors import BatonError, ConfigurationError, UnavailableError
from baton.common.flags.config_flags import add_flags, config_from_args, flag
from baton.common.flags.values import count
from baton.v1 import replica_set_pb2, replica_set_pb2_grpc
from engine.config import EngineConfig
from kvstore.registry import has_fixed_port
from rpc.discovery.announced import MODEL_LABEL, ROLE_LABEL
from rpc.registration import RegisteredService, RegistrationConfig
from rpc.server import RpcServer, Service, serve
from rpc.server_access import cluster_access
from rpc.worker import worker_server_config
from worker.processes.run_folder import sharing_machine
from worker.replica_set import MAX_REPLICAS, ReplicaSet, ReplicaSetServicer
from worker.replicas import replicas_here, replicas_on_ray

__all__ = ["ReplicaSetConfig", "StartingSet", "add_replica_args", "run_replicas"]

_LOGGER = logging.getLogger("baton.worker")
_SERVICE_NAME: str = replica_set_pb2.DESCRIPTOR.services_by_name["ReplicaSetService"].full_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetConfig:
    """The workers behind one address.

    Raises:
        ConfigurationError: the number is out of range, or missing; names the flag.
    """

    data_parallel_size: int | None = flag(
        None,
        "number of workers that this process starts and lists for routers, which `baton scale` "
        "changes (default: this process is a worker itself)",
        parse=count,
        aliases={"-dp": None},
        is_main=True,
    )
    on: str = flag(
        "machine",
        "where the workers of --data-parallel-size run: on this machine, or on the nodes of a Ray "
        "cluster (RAY_ADDRESS; needs the extra ray), where --kv-connector is grpc://0.0.0.0 by "
        "default",
        choices=("machine", "ray"),
    )

    def __post_init__(self) -> None:
        size = self.data_parallel_size
        if size is None and self.on != "machine":
            raise ConfigurationError(
                f"--on {self.on} places the workers of a set; set --data-parallel-size, too"
            )
        if size is not None and not 1 <= size <= MAX_REPLICAS:
            raise ConfigurationError(
                f"--data-parallel-size is {size}; it must be in [1, {MAX_REPLICAS}]"
            )


def add_replica_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the number and the place of workers."""
    add_flags(parser, ReplicaSetConfig, "server")


async def run_replicas(
    args: argparse.Namespace, tier: str, engine: EngineConfig, config: ReplicaSetConfig
) -> None:
    """Runs workers behind one address until a signal to stop, then drains them.

    Args:
        args: parsed flags of a worker.
        tier: prefill or decode.
        engine: config of each worker.
        config: the number of workers at first, and where they run.

    Raises:
        ConfigurationError: a flag does not work with several workers, an address cannot be bound,
            the Ray cluster cannot be joined, or a worker cannot start or has no room there.
    """
    _check(engine)
    assert config.data_parallel_size is not None
    num_replicas = config.data_parallel_size
    if config.on == "machine":
        needs = SUPERVISOR_NEEDS + num_replicas * WORKER_NEEDS
        check_needs(f"--data-parallel-size {num_replicas}", needs, num_replicas)
    server_config, security = worker_server_config(args)
    registration = config_from_args(RegistrationConfig, args)
    labels = {MODEL_LABEL: engine.model_name, ROLE_LABEL: tier}

    async def start(server: RpcServer) -> Service:
        replicas = StartingSet(ReplicaSet(make_replica), num_replicas, server)
        address = registration.address(server_config, server.port)
        return RegisteredService.of(replicas, registration, address, lambda: labels, security)

    access = cluster_access(security, server_config.host)
    with ExitStack() as folders:
        if config.on == "ray":
            make_replica = replicas_on_ray(args, tier, engine, server_config, security)
        else:
            # Workers whose number of threads is given have cores of their own.
            takes_turns = engine.num_threads is None
            shared = folders.enter_context(sharing_machine(engine, turns=takes_turns))
            share = LimitsShare.beside(SUPERVISOR_NEEDS, num_replicas)
            make_replica = replicas_here(args, tier, shared, server_config, share)
        await serve(server_config, (_SERVICE_NAME,), start, access)


class StartingSet(Service):
    """A set whose first workers start. Sets its server serving when they have started.

    It is a service before that, so that a signal drains the workers that serve already.

    Args:
        replicas: the set, still empty.
        num_replicas: the number of workers to start.
        server: gets the set's servicer; fails if a worker cannot start, unless the others serve
            and there is only no room for it.
    """

    def __init__(self, replicas: ReplicaSet, num_replicas: int, server: RpcServer) -> None:
        self._replicas, self._server = replicas, server
        server.add_servicer(
            replica_set_pb2_grpc.add_ReplicaSetServiceServicer_to_server,
            ReplicaSetServicer(replicas),
        )
        self._starting = asyncio.create_task(self._start(num_replicas))

    @override
    async def drain(self, timeout_s: float) -> None:
        self._starting.cancel()
        await self._replicas.drain(timeout_s)

    @override
    async def close(self) -> None:
        self._starting.cancel()
        await self._replicas.close()

    async def _start(self, num_replicas: int) -> None:
        try:
            await self._replicas.scale(num_replicas)
        except Exception as error:
            num_serving = len(self._replicas.addresses)
            if not (isinstance(error, UnavailableError) and num_serving):
                await self._fail(error)
                return
            _LOGGER.warning("serves with %d of %d workers: %s", num_serving, num_replicas, error)
        self._server.set_serving(True)

    async def _fail(self, error: Exception) -> None:
        if self._replicas.addresses:
            await self._replicas.drain(0)
        if isinstance(error, BatonError):  # for the operator, who needs no stack
            error = ConfigurationError(error.message)
        self._server.fail(error)


def _check(engine: EngineConfig) -> None:
    """Refuses an engine of which a set cannot run several."""
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
