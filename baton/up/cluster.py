"""A one-machine cluster: which processes it has, and its life.

workers start -> router starts -> all are healthy -> `on_ready` -> a signal
-> the router stops -> the workers stop
"""

import asyncio
import dataclasses
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigurationError
from baton.health import wait_until_serving
from baton.up.supervisor import ProcessSpec, SupervisedProcess
from engine.cli_args import FIXED_FIELDS
from engine.config import EngineConfig
from rpc.server_config import ServerConfig, join_host_port

__all__ = [
    "ClusterConfig",
    "ClusterPlan",
    "Server",
    "engine_flags",
    "plan_cluster",
    "run_cluster",
    "start_server",
    "stop_in_order",
]

_LOOPBACK = "127.0.0.1"
_LOOPBACK_OF_ALL = {"0.0.0.0": _LOOPBACK, "::": "::1"}
"""Where a router that listens on all addresses is reached from this machine."""
_START_TIMEOUT_S = 900.0
_DRAIN_TIMEOUT_S = "5"
"""For running requests upon Ctrl-C; below the supervisor's grace period."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What to run.

    Attributes:
        engine: for every worker; its role is set per tier.
        num_prefill: prefill processes; 0 computes prompts on decode.
        num_decode: decode processes, at least one.
        router: where the router listens.
        log_level: of the workers.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """

    engine: EngineConfig
    num_prefill: int
    num_decode: int
    router: ServerConfig
    log_level: str

    def __post_init__(self) -> None:
        for flag, number, least in (
            ("prefill", self.num_prefill, 0),
            ("decode", self.num_decode, 1),
        ):
            if number < least:
                raise ConfigurationError(f"--{flag} is {number}; it must be >= {least}")


@dataclass(frozen=True, slots=True)
class Server:
    """A process and the `host:port` it listens on."""

    spec: ProcessSpec
    address: str


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The processes of a cluster."""

    router: Server
    prefill: tuple[Server, ...]
    decode: tuple[Server, ...]

    @property
    def workers(self) -> tuple[Server, ...]:
        """Both tiers."""
        return self.prefill + self.decode


def plan_cluster(config: ClusterConfig) -> ClusterPlan:
    """Gives every process its port and its flags.

    Raises:
        ConfigurationError: the router's port is in use, or its host no address of this machine.
    """
    router_port, *ports = _free_ports(config)
    prefill = _plan_tier(config, "prefill", ports[: config.num_prefill])
    decode = _plan_tier(config, "decode", ports[config.num_prefill :])
    return ClusterPlan(_plan_router(config, router_port, prefill, decode), prefill, decode)


def engine_flags(config: EngineConfig, *, omit: Collection[str] = ()) -> list[str]:
    """The command-line flags that describe `config`; defaults are left out."""
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in omit or value == field.default:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def _free_ports(config: ClusterConfig) -> list[int]:
    """The router's port and one per worker, all different.

    The sockets are closed before the servers bind: a stranger may come
    between. Then a server says so and the cluster does not start.
    """
    wanted = [(config.router.host, config.router.port)]
    wanted += [(_LOOPBACK, 0)] * (config.num_prefill + config.num_decode)
    sockets = []
    try:
        for host, port in wanted:
            sockets.append(_bind(host, port))
        return [bound.getsockname()[1] for bound in sockets]
    finally:
        for bound in sockets:
            bound.close()


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or "no host name"
        raise ConfigurationError(
            f"cannot listen on {join_host_port(host, port)}: {reason}; "
            "choose another --host or --port"
        ) from None
    return bound


def _plan_tier(config: ClusterConfig, tier: str, ports: Iterable[int]) -> tuple[Server, ...]:
    flags = (
        *engine_flags(config.engine, omit=FIXED_FIELDS[tier]),
        *("--log-level", config.log_level, "--drain-timeout-s", _DRAIN_TIMEOUT_S),
    )
    return tuple(
        Server(
            ProcessSpec(
                f"{tier}-{number}",
                f"{tier}_service",
                ("--host", _LOOPBACK, "--port", str(port), *flags),
            ),
            f"{_LOOPBACK}:{port}",
        )
        for number, port in enumerate(ports)
    )


def _plan_router(
    config: ClusterConfig, port: int, prefill: Iterable[Server], decode: Iterable[Server]
) -> Server:
    arguments = [
        *("--model", config.engine.model, "--served-model-name", config.engine.model_name),
        *("--host", config.router.host, "--port", str(port)),
        *("--log-level", config.log_level, "--drain-timeout-s", _DRAIN_TIMEOUT_S),
    ]
    for flag, servers in (("--prefill", prefill), ("--decode", decode)):
        for server in servers:
            arguments += [flag, server.address]
    host = _LOOPBACK_OF_ALL.get(config.router.host, config.router.host)
    return Server(ProcessSpec("router", "router", tuple(arguments)), join_host_port(host, port))


async def run_cluster(
    plan: ClusterPlan,
    write_line: Callable[[str], None],
    on_ready: Callable[[], Awaitable[None]],
) -> None:
    """Runs the cluster until SIGINT, SIGTERM or SIGHUP; a second one kills it.

    Args:
        plan: what to run.
        write_line: takes every line that the processes write.
        on_ready: called once all of them serve.

    Raises:
        ConfigurationError: a process ended before it served.
        BatonError: of `on_ready`.
    """
    servers = (*plan.workers, plan.router)
    processes = [SupervisedProcess(server.spec, write_line) for server in servers]
    stopped = asyncio.create_task(_stop_signal(processes))
    serving = asyncio.create_task(_serve(servers, processes, on_ready))
    try:
        await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            await stopped
    finally:
        stopped.cancel()
        serving.cancel()
        await asyncio.wait({stopped, serving})
        await stop_in_order(processes)


async def _serve(
    servers: Sequence[Server],
    processes: Sequence[SupervisedProcess],
    on_ready: Callable[[], Awaitable[None]],
) -> None:
    *workers, router = zip(servers, processes, strict=True)
    await asyncio.gather(*(start_server(server, process) for server, process in workers))
    await start_server(*router)
    await on_ready()


async def start_server(server: Server, process: SupervisedProcess) -> None:
    """Starts a server's process; returns when it serves.

    Raises:
        ConfigurationError: the process ended before. It is not tried for ever.
    """
    process.start()
    ready = asyncio.create_task(wait_until_serving(server.address, _START_TIMEOUT_S))
    died = asyncio.create_task(process.died.wait())
    try:
        await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise ConfigurationError(f"{server.spec.name} could not start; its last lines say why")
        await ready
    finally:
        ready.cancel()
        died.cancel()


async def stop_in_order(processes: Sequence[SupervisedProcess]) -> None:
    """Ends workers and a router, the last of `processes`: it goes first, so that nothing new
    reaches the workers.
    """
    *workers, router = processes
    await router.stop()
    await asyncio.gather(*(worker.stop() for worker in workers))


async def _stop_signal(processes: list[SupervisedProcess]) -> None:
    """Returns on the first signal; from then on, each further one kills."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            for process in processes:
                process.kill()
        stop.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    await stop.wait()
