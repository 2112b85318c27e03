"""The plan of a cluster: its processes on this machine, their ports and their flags.

The workers run on this machine, or on the nodes of a Ray cluster: then each tier is one process
here, a replica set, which places them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.common.addresses import join_host_port
from baton.common.container_limits import (
    ROUTER_NEEDS,
    SUPERVISOR_NEEDS,
    WORKER_NEEDS,
    LimitsShare,
    Needs,
    check_needs,
)
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flags_of_config
from baton.common.ray_cluster import ADDRESS_VARIABLE
from baton.common.security.client import ClientTls
from baton.common.security.cluster import TOKEN_VARIABLE
from baton.up.gpus import GpuShare, share_gpus, visible_gpus
from engine.config import EngineConfig
from router.config.http import HttpConfig
from router.config.processes import ProcessesConfig
from router.config.router import RouterConfig, flags_of_router
from router.config.served_model import ServedModelConfig
from rpc.server_config import MetricsConfig, ServerConfig
from worker.processes.ports import bound_ports, local_address
from worker.processes.spawn import ProcessSpec, worker_spec
from worker.replica_processes import ReplicaSetConfig

__all__ = ["ClusterConfig", "ClusterPlan", "RayTiers", "Server", "plan_cluster", "worker_targets"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RayTiers:
    """Workers on a Ray cluster.

    Attributes:
        address: of the Ray cluster.
        num_workers: the number of workers by tier.
    """

    address: str
    num_workers: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The configuration of a cluster.

    Attributes:
        engine: config of every worker; the plan sets its role per tier.
        router: config of the router. The replicas of its one model are the workers that the
            cluster starts; `worker_targets` chooses their ports.
        router_processes: number of processes of the router.
        ray: where the workers run; None for this machine. A target of the router is a tier then.
        token: what the cluster's processes show each other; None for nothing. It is not shown.
        token_file: where operators find it; None if there is no file.
    """

    engine: EngineConfig
    router: RouterConfig
    router_processes: int = 1
    ray: RayTiers | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    @classmethod
    def grpc_only(
        cls, engine: EngineConfig, *, num_prefill: int = 1, num_decode: int = 1
    ) -> "ClusterConfig":
        """Returns the config of a cluster whose router serves gRPC on a free port.

        Args:
            engine: config of every worker.
            num_prefill: number of prefill workers; with 0, decode computes prompts.
            num_decode: number of decode workers.
        """
        prefill, decode = worker_targets(num_prefill, num_decode)
        model = ServedModelConfig(
            model=engine.model,
            served_model_name=(engine.model_name,),
            prefill=prefill,
            decode=decode,
        )
        grpc = ServerConfig(log_level="warning", drain_timeout_s=5.0)
        router = RouterConfig(grpc=grpc, http=HttpConfig(port=None), models=(model,))
        return cls(engine=engine, router=router)

    @property
    def model(self) -> ServedModelConfig:
        """The router's model."""
        (model,) = self.router.models
        return model

    @property
    def other_needs(self) -> Needs:
        """Of the processes that are no workers. A router of several processes has a supervisor."""
        num_processes = self.router_processes
        num_supervisors = 1 if num_processes == 1 else 2
        return num_supervisors * SUPERVISOR_NEEDS + num_processes * ROUTER_NEEDS

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of every process. A flag would show the token to all users of the machine."""
        token = {} if self.token is None else {TOKEN_VARIABLE: self.token}
        return token if self.ray is None else {**token, ADDRESS_VARIABLE: self.ray.address}

    @property
    def targets(self) -> Sequence[str]:
        """The addresses of the workers of both tiers on this machine, or of the sets of them."""
        return (*self.model.prefill, *self.model.decode)


@dataclass(frozen=True, slots=True)
class Server:
    """A process and where it listens.

    Attributes:
        spec: the process.
        address: `host:port` of its gRPC server; empty if that is off.
        http_address: `host:port` of its HTTP server; empty if it has none.
        metrics_address: `host:port` for metrics; empty if it has none.
        tls: how this machine verifies it.
        asks_for_certificates: whether it takes calls only of clients with a certificate.
        is_parent: whether it ends processes of its own before it ends.
        is_set: whether it starts the workers of a tier itself, on a Ray cluster.
        gpu_share: the GPUs that it uses.
    """

    spec: ProcessSpec
    address: str
    http_address: str = ""
    metrics_address: str = ""
    tls: ClientTls = field(default_factory=ClientTls)
    asks_for_certificates: bool = False
    is_parent: bool = False
    is_set: bool = False
    gpu_share: GpuShare = field(default_factory=GpuShare)

    @property
    def url(self) -> str:
        """The base URL of its HTTP API."""
        return f"{self._scheme}://{self.http_address}/v1"

    @property
    def page_url(self) -> str:
        """The URL of its page for browsers."""
        return f"{self._scheme}://{self.http_address}/"

    @property
    def metrics_url(self) -> str:
        """The URL of its metrics; empty if it has no port for them."""
        return f"{self._scheme}://{self.metrics_address}/metrics" if self.metrics_address else ""

    @property
    def _scheme(self) -> str:
        return "https" if self.tls.is_on else "http"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes of a cluster.

    Attributes:
        router: the router.
        prefill: the servers of the prefill tier.
        decode: the servers of the decode tier.
        drain_timeout_s: the time that each process has for its running requests when it stops.
    """

    router: Server
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]
    drain_timeout_s: float

    @property
    def workers(self) -> tuple[Server, ...]:
        """The servers of both tiers."""
        return self.prefill + self.decode


def worker_targets(num_prefill: int, num_decode: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns addresses on free ports for prefill and for decode workers.

    Args:
        num_prefill: number of prefill workers.
        num_decode: number of decode workers.

    Raises:
        ConfigurationError: a number is too small; names the flag.
    """
    for flag, number, least in (
        ("prefill-workers", num_prefill, 0),
        ("decode-workers", num_decode, 1),
    ):
        if number < least:
            raise ConfigurationError(f"--{flag} is {number}; it must be >= {least}")
    ports = bound_ports([(_LOOPBACK, 0, "--port")] * (num_prefill + num_decode))
    targets = tuple(join_host_port(_LOOPBACK, port) for port in ports)
    return targets[:num_prefill], targets[num_prefill:]


def plan_cluster(config: ClusterConfig) -> ClusterPlan:
    """Chooses the router's ports, and the flags of every process.

    Raises:
        ConfigurationError: a port is in use, or the router's host is not an address of this
            machine; names the flag.
    """
    engine = config.engine
    if engine.nnodes > 1 or engine.distributed_executor_backend == "external_launcher":
        raise ConfigurationError(
            "--nnodes and --distributed-executor-backend external_launcher start one engine on "
            "several machines; this command starts the processes of one: use `baton prefill`, "
            "`baton decode` and `baton router`"
        )
    num_here = 0 if config.ray is not None else len(config.targets)
    check_needs(
        f"baton serve with {num_here} workers",
        config.other_needs + num_here * WORKER_NEEDS,
        num_here,
    )
    router, metrics = _with_ports(config)
    grpc, model = router.grpc, config.model
    server = ServerConfig(
        log_level=grpc.log_level,
        log_format=grpc.log_format,
        drain_timeout_s=grpc.drain_timeout_s,
    )
    worker_flags = [*flags_of_config(server), *flags_of_config(router.tracing)]
    of_worker = zip(metrics, _gpu_shares(config), strict=True)
    prefill, decode = (
        tuple(
            _worker_server(config, tier, number, target, worker_flags, *next(of_worker))
            for number, target in enumerate(targets)
        )
        for tier, targets in (("prefill", model.prefill), ("decode", model.decode))
    )
    server_of_router = _router_server(router, config.router_processes, config.environment)
    return ClusterPlan(server_of_router, prefill, decode, grpc.drain_timeout_s)


def _router_server(
    router: RouterConfig, num_processes: int, environment: Mapping[str, str]
) -> Server:
    module, flags = "router", tuple(flags_of_router(router))
    if num_processes > 1:
        several = ProcessesConfig(processes=num_processes)
        module, flags = "baton.cli.router", (*flags_of_config(several), *flags)
    keys = router.security.tenants.environment
    spec = ProcessSpec("router", module, flags, {**environment, **keys})
    clients = router.security.clients
    return Server(
        spec,
        _reached(router.grpc),
        _reached(router.http),
        _reached(router.metrics),
        tls=ClientTls.pinned(clients.certfile) if clients.certfile else ClientTls(),
        asks_for_certificates=clients.ssl_cert_reqs == "required",
        is_parent=num_processes > 1,
    )


def _worker_server(
    config: ClusterConfig,
    tier: str,
    number: int,
    target: str,
    flags: Iterable[str],
    metrics: MetricsConfig,
    gpu_share: GpuShare,
) -> Server:
    host, _, port = target.rpartition(":")
    own = ["--host", host, "--port", port, *flags, *flags_of_config(metrics)]
    if config.ray is not None:
        size = config.ray.num_workers[tier]
        own += flags_of_config(ReplicaSetConfig(data_parallel_size=size, on="ray"))
    engine = gpu_share.divide_memory(config.engine)
    environment = {**config.environment, **gpu_share.environment}
    if config.ray is None:
        environment |= LimitsShare.beside(config.other_needs, len(config.targets)).environment
    spec = worker_spec(tier, number, engine, own, environment)
    if config.ray is not None:
        spec = replace(spec, name=tier)  # those with numbers are its workers
    is_set = config.ray is not None
    metrics_address = _reached(metrics)
    return Server(
        spec,
        target,
        metrics_address=metrics_address,
        is_parent=is_set,
        is_set=is_set,
        gpu_share=gpu_share,
    )


def _gpu_shares(config: ClusterConfig) -> list[GpuShare]:
    """Returns the GPUs of each worker of this machine."""
    num_workers = len(config.targets)
    if config.ray is not None or config.engine.device == "cpu":
        return [GpuShare()] * num_workers
    return share_gpus(visible_gpus(), config.engine, num_workers)


def _with_ports(config: ClusterConfig) -> tuple[RouterConfig, Sequence[MetricsConfig]]:
    """Returns the router's config with ports in place of 0, and the workers' metrics.

    Worker ports are bound at the same time, so that none of them is chosen again.
    """
    router = config.router
    wanted = [
        (server.host, server.port, flag)
        for server, flag in ((router.http, "--port"), (router.grpc, "--grpc-port"))
        if server.port is not None
    ]
    for target in config.targets:
        host, _, port = target.rpartition(":")
        wanted.append((host, int(port), "--port"))
    metrics = _metrics_configs(config)
    wanted += [(one.host, one.port, "--metrics-port") for one in metrics if one.port is not None]
    ports = iter(bound_ports(wanted))
    http, grpc = router.http, router.grpc
    if http.port is not None:
        http = replace(http, port=next(ports))
    if grpc.port is not None:
        grpc = replace(grpc, port=next(ports))
    for _ in config.targets:
        next(ports)
    metrics = [one if one.port is None else replace(one, port=next(ports)) for one in metrics]
    own, *of_workers = metrics
    return replace(router, http=http, grpc=grpc, metrics=own), of_workers


def _metrics_configs(config: ClusterConfig) -> list[MetricsConfig]:
    """Returns where the router serves metrics, and each worker of this machine: at the ports that
    follow the router's, or at free ones.
    """
    metrics, step = config.router.metrics, 1 if config.router.metrics.port else 0
    if metrics.port is None or config.ray is not None:
        return [metrics, *[MetricsConfig()] * len(config.targets)]
    return [
        replace(metrics, port=metrics.port + step * number)
        for number in range(1 + len(config.targets))
    ]


def _reached(server: ServerConfig | HttpConfig | MetricsConfig) -> str:
    """Returns the address at which this machine reaches a server; empty if it is off."""
    return "" if server.port is None else local_address(server.host, server.port)
