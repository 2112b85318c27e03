"""A one-machine cluster: the plan of its processes, and running them.

The workers start first, then the router. When all of them are serving, `on_ready` is called.
On a signal the router stops first, then the workers.
"""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.errors import ConfigurationError
from baton.flags import flags_of_config
from baton.health import wait_until_serving
from baton.up.supervisor import ProcessSpec, SupervisedProcess
from engine.cli_args import FIXED_FIELDS
from engine.config import EngineConfig
from rpc.server_config import ServerConfig, join_host_port

__all__ = [
    "ClusterConfig",
    "ClusterPlan",
    "Server",
    "plan_cluster",
    "run_cluster",
    "start_server",
    "stop_in_order",
]

_LOOPBACK = "127.0.0.1"
_LOOPBACK_OF_ALL = {"0.0.0.0": _LOOPBACK, "::": "::1"}
"""The address at which this machine reaches a router that listens on all addresses."""
_START_TIMEOUT_S = 900.0
_DRAIN_TIMEOUT_S = "5"
"""Time for running requests after Ctrl-C; less than the supervisor's grace period."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The configuration of a one-machine cluster.

    Attributes:
        engine: config of every worker; the plan sets its role per tier.
        num_prefill: number of prefill processes; with 0, decode computes prompts.
        num_decode: number of decode processes, at least one.
        router: address on which the router listens.
        log_level: log level of every process.
        generation_config: the router's `--generation-config`.
        reasoning_start_str: the router's `--reasoning-start-str`.
        reasoning_end_str: the router's `--reasoning-end-str`.

    Raises:
        ConfigurationError: a value is out of range; the message names the flag.
    """

    engine: EngineConfig
    num_prefill: int
    num_decode: int
    router: ServerConfig
    log_level: str
    generation_config: str = "auto"
    reasoning_start_str: str | None = None
    reasoning_end_str: str | None = None

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
        """The servers of both tiers."""
        return self.prefill + self.decode


def plan_cluster(config: ClusterConfig) -> ClusterPlan:
    """Assigns ports and flags to every process.

    Raises:
        ConfigurationError: the router's port is in use, or its host is not an address of this
            machine.
    """
    router_port, *ports = _free_ports(config)
    prefill = _plan_tier(config, "prefill", ports[: config.num_prefill])
    decode = _plan_tier(config, "decode", ports[config.num_prefill :])
    return ClusterPlan(_plan_router(config, router_port, prefill, decode), prefill, decode)


def _free_ports(config: ClusterConfig) -> list[int]:
    """Returns the router's port and one port per worker, all different.

    The sockets are closed before the servers bind, so another process may take a port in
    between. The server then fails with that error and the cluster does not start.
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
        reason = getattr(error, "strerror", None) or "not a valid host name"
        raise ConfigurationError(
            f"cannot listen on {join_host_port(host, port)}: {reason}; "
            "choose another --host or --port"
        ) from None
    return bound


def _plan_tier(config: ClusterConfig, tier: str, ports: Iterable[int]) -> tuple[Server, ...]:
    flags = (
        *flags_of_config(config.engine, omit=FIXED_FIELDS[tier]),
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
        *("--generation-config", config.generation_config),
        *("--host", config.router.host, "--port", "none", "--grpc-port", str(port)),
        *("--log-level", config.log_level, "--drain-timeout-s", _DRAIN_TIMEOUT_S),
    ]
    for flag, text in (
        ("--reasoning-start-str", config.reasoning_start_str),
        ("--reasoning-end-str", config.reasoning_end_str),
    ):
        if text is not None:
            arguments.append(f"{flag}={text}")
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
    """Runs the cluster until SIGINT, SIGTERM or SIGHUP; a second signal kills the processes.

    Args:
        plan: the processes to run.
        write_line: called with every line that the processes write.
        on_ready: called once when all processes are serving.

    Raises:
        ConfigurationError: a process ended before it was serving.
        BatonError: `on_ready` raised it.
    """
    servers = (*plan.workers, plan.router)
    processes = [SupervisedProcess(server.spec, write_line) for server in servers]
    stopped = asyncio.create_task(_wait_for_stop_signal(processes))
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
    """Starts a server's process; returns when the server is serving.

    Raises:
        ConfigurationError: the process ended first. It is not restarted at this point.
    """
    process.start()
    ready = asyncio.create_task(wait_until_serving(server.address, _START_TIMEOUT_S))
    died = asyncio.create_task(process.died.wait())
    try:
        await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise ConfigurationError(
                f"{server.spec.name} could not start; its last log lines have the reason"
            )
        await ready
    finally:
        ready.cancel()
        died.cancel()


async def stop_in_order(processes: Sequence[SupervisedProcess]) -> None:
    """Stops the router, which is the last of `processes`, and then the workers.

    With the router stopped first, no new request reaches the workers.
    """
    *workers, router = processes
    await router.stop()
    await asyncio.gather(*(worker.stop() for worker in workers))


async def _wait_for_stop_signal(processes: list[SupervisedProcess]) -> None:
    """Returns on the first stop signal; each later signal kills the processes."""
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
