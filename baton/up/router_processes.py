"""`baton router --processes`: a router of several processes at the same ports.

    parent     reserves the ports; starts the processes, and starts them again when they die;
               or hang; adds up their metrics. No request passes through it.
    process    `python -m router` with the router's flags and a `ProcessPlace`; a whole router

The kernel gives each connection to one of the processes that listen (SO_REUSEPORT). A signal to
stop drains all. If the parent is killed, the kernel kills the processes.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.common.addresses import join_host_port
from baton.common.container_limits import ROUTER_NEEDS, SUPERVISOR_NEEDS, check_needs
from baton.common.errors import ConfigurationError
from baton.common.security.cluster import TOKEN_VARIABLE, ClusterSecurity
from baton.up.process_metrics import ProcessesCollector
from router.config.router import RouterConfig, flags_of_router
from router.processes.place import ProcessPlace
from router.processes.process_server import MetricsServicer, ProcessServer
from router.processes.shared_counts import create_shared_counts, shared_counts_bytes
from rpc.listeners import reserve_port, write_port_file
from rpc.metrics_server import MetricsAccess, serving_metrics
from rpc.probe import wait_until_serving, wait_until_silent
from rpc.server_config import ServerConfig
from rpc.stop_signals import StopSignals
from worker.processes.output import log_writer
from worker.processes.run_folder import run_folder
from worker.processes.spawn import ProcessSpec
from worker.processes.supervisor import RestartPolicy, SupervisedProcess

__all__ = ["RouterProcesses", "process_specs", "run_router_processes"]

_LOGGER = logging.getLogger("baton.router")
_START_TIMEOUT_S = 900.0
_STOP_GRACE_S = 10.0
"""Time to end for a process that has drained."""
_SILENCE_S = 15.0
"""A process whose event loop answers nothing for so long hangs. It keeps its connections, and the
kernel gives it new ones.
"""
_DUMP_TIMEOUT_S = 2.0
"""Time to log its stacks for a process that hangs; one that is stopped by a signal cannot."""


async def run_router_processes(
    config: RouterConfig, num_processes: int, models_file: str | None
) -> None:
    """Runs a router of several processes until a signal to stop, then drains them.

    Args:
        config: the router's.
        num_processes: their number.
        models_file: `--models`; None for the one model of the config.

    Raises:
        ConfigurationError: an address cannot be bound or shared, or a process cannot start.
    """
    if config.http.uds is not None:
        raise ConfigurationError(
            f"--uds is {config.http.uds}; the kernel divides connections to ports alone among "
            "processes, so leave --processes or --uds out"
        )
    needs = SUPERVISOR_NEEDS + num_processes * ROUTER_NEEDS
    check_needs(f"baton router --processes {num_processes}", needs)
    with StopSignals() as signals, ExitStack() as stack:
        folder = stack.enter_context(run_folder(2 * shared_counts_bytes(num_processes)))
        create_shared_counts(folder, num_processes)
        ports = stack.enter_context(ExitStack())
        config_of_process = _reserve_ports(config, ports)
        specs = process_specs(config_of_process, num_processes, folder, models_file)
        router = RouterProcesses(specs, config.grpc)
        async with _serving_metrics(config, [place.target for place in specs], folder):
            try:
                if await _unless_requested(signals, router.start()):
                    _write_port_files(config, config_of_process)
                    await signals.requested.wait()
            finally:
                ports.close()  # another router may take them while this one drains
                await router.stop(signals.forced)


def process_specs(
    config: RouterConfig, num_processes: int, folder: Path, models_file: str | None = None
) -> Mapping[ProcessPlace, ProcessSpec]:
    """Returns the processes of a router by their places.

    Args:
        config: of each process, with the ports that they share.
        num_processes: their number.
        folder: what they share.
        models_file: `--models`; None for the one model of the config.
    """
    flags = tuple(flags_of_router(config, models_file))
    token = os.environ.get(TOKEN_VARIABLE)
    secrets = {**config.security.tenants.environment, **({TOKEN_VARIABLE: token} if token else {})}
    places = [ProcessPlace(i, num_processes, str(folder)) for i in range(num_processes)]
    return {
        place: ProcessSpec(
            f"router-{place.index}", "router", flags, {**secrets, **place.environment}
        )
        for place in places
    }


class RouterProcesses:
    """The processes of a router, which start again when they die.

    Args:
        specs: the processes by their places.
        server: how they log, and how long they drain.
    """

    def __init__(self, specs: Mapping[ProcessPlace, ProcessSpec], server: ServerConfig) -> None:
        write_line = log_writer(server.log_format)
        stop_s = server.shutdown_delay_s + server.drain_timeout_s
        policy = RestartPolicy(stop_grace_s=stop_s + _STOP_GRACE_S)
        self._processes = {
            place: SupervisedProcess(spec, write_line, policy) for place, spec in specs.items()
        }

    async def start(self) -> None:
        """Starts the processes; returns when all of them listen.

        Raises:
            ConfigurationError: one of them ended first.
            UnavailableError: the machine could not start one.
        """
        starts = [
            asyncio.ensure_future(
                process.start_until(
                    partial(_wait_until_listening, place),
                    partial(_wait_until_stuck, place, process),
                )
            )
            for place, process in self._processes.items()
        ]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)

    async def stop(self, forced: asyncio.Event) -> None:
        """Drains the processes; returns when all of them have ended.

        Args:
            forced: ends the drain when it is set.
        """
        interrupting = asyncio.create_task(self._interrupt_when(forced))
        try:
            await asyncio.gather(*(process.stop() for process in self._processes.values()))
        finally:
            interrupting.cancel()

    async def _interrupt_when(self, forced: asyncio.Event) -> None:
        await forced.wait()
        for process in self._processes.values():
            _send(process, signal.SIGINT)


async def _wait_until_listening(place: ProcessPlace) -> None:
    """Waits until a process listens at all of its ports, which is when its own socket answers."""
    await wait_until_serving(place.target, _START_TIMEOUT_S)


async def _wait_until_stuck(place: ProcessPlace, process: SupervisedProcess) -> None:
    """Waits until a process hangs, and lets it log the stacks of its threads, which ends it."""
    await wait_until_silent(place.target, _SILENCE_S)
    _LOGGER.error("%s has not answered for %g s; ending it", process.spec.name, _SILENCE_S)
    _send(process, signal.SIGUSR2)
    await asyncio.sleep(_DUMP_TIMEOUT_S)


def _send(process: SupervisedProcess, number: signal.Signals) -> None:
    """Sends a signal to a process, if it runs."""
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _unless_requested(signals: StopSignals, start: Coroutine[Any, Any, None]) -> bool:
    """Waits for a start; cancels it and returns False if a signal to stop comes first."""
    starting = asyncio.ensure_future(start)
    stopping = asyncio.create_task(signals.requested.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
        return starting.done()
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.wait({starting})


@asynccontextmanager
async def _serving_metrics(
    config: RouterConfig, targets: Sequence[str], folder: Path
) -> AsyncIterator[None]:
    """Serves the metrics of all processes at the port for metrics, if there is one, and to the
    processes, of which each answers `/metrics` with them.

    Raises:
        ConfigurationError: the address cannot be bound, or a file cannot be read.
    """
    security = config.security
    cluster = ClusterSecurity.from_environment(security.cluster, security.worker_files)
    access = MetricsAccess(config.metrics, cluster, has_clients=not security.tenants.is_open)
    registry, port = CollectorRegistry(), ExitStack()
    collector = ProcessesCollector(targets)
    registry.register(collector)
    server = ProcessServer(ProcessPlace.parent_of(folder), MetricsServicer(registry))
    await server.start()
    try:
        port.enter_context(serving_metrics(config.metrics, registry, access, security.clients))
        yield
    finally:
        await asyncio.to_thread(port.close)
        await server.stop()
        await collector.close()


def _reserve_ports(config: RouterConfig, stack: ExitStack) -> RouterConfig:
    """Returns the config of a process, with ports that no other process can take while the stack is
    open.

    Raises:
        ConfigurationError: an address cannot be bound.
    """
    http, grpc = config.http, config.grpc
    return replace(
        config,
        http=replace(http, port=_reserve_port(http.host, http.port, stack), port_file=None),
        grpc=replace(grpc, port=_reserve_port(grpc.host, grpc.port, stack), port_file=None),
        metrics=replace(config.metrics, port=None),
    )


def _reserve_port(host: str, port: int | None, stack: ExitStack) -> int | None:
    if port is None:
        return None
    try:
        sockets = reserve_port(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot listen on {join_host_port(host, port)}: {reason}"
        ) from None
    for reserved in sockets:
        stack.enter_context(reserved)
    return int(sockets[0].getsockname()[1])


def _write_port_files(config: RouterConfig, bound: RouterConfig) -> None:
    for wanted, server in ((config.http, bound.http), (config.grpc, bound.grpc)):
        if server.port is None:
            continue
        if wanted.port_file is not None:
            write_port_file(Path(wanted.port_file), server.port)
        _LOGGER.info("all processes listen address=%s", join_host_port(server.host, server.port))
