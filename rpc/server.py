"""The life of a server process, the same for the router and both tiers.

1. Listen. Health answers NOT_SERVING, every other call gets UNAVAILABLE. A server that shares its
   port leaves the calls to the others; its service listens when it has started.
2. Start the service (load a model, find replicas), which may take minutes.
3. The service reports that it is ready. Health answers SERVING.
4. On the first SIGTERM or SIGINT health answers NOT_SERVING. The service serves on for
   `--shutdown-delay-s`, in which load balancers notice, and then drains. A service whose callers
   have others to go to closes its port first, so that their next calls go there. SIGINT ends delay
   and drain; more SIGTERMs do not, as a supervisor may repeat them. SIGHUP is ignored.
5. Stop the server, close the service.

A signal during step 2 stops the server and the process. A service that can serve no more calls
`RpcServer.fail`; the process then ends with that error, so that its supervisor can start it again.
"""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from baton.common.addresses import join_host_port
from baton.common.container_limits import describe_limits
from baton.common.errors import ConfigurationError
from baton.common.flags.unknown_variables import unknown_variables
from rpc.channels import SERVER_OPTIONS
from rpc.handler_table import HandlerTable
from rpc.interceptors import CallInterceptor
from rpc.listeners import write_port_file
from rpc.logs import start_logging
from rpc.process_limits import MAX_CONNECTIONS, connection_budget, raise_descriptor_limit
from rpc.server_access import ServerAccess
from rpc.server_config import ServerConfig
from rpc.standard_services import HEALTH_SERVICE_NAME, HealthServicer, add_reflection
from rpc.stop_signals import StopSignals, ignored_hangup

__all__ = [
    "EXIT_CONFIGURATION",
    "RpcServer",
    "Service",
    "StartInterruptedError",
    "run_process",
    "serve",
]

EXIT_CONFIGURATION = 2
_EXIT_FAILURE = 1

_LOGGER = logging.getLogger("baton.rpc")
_STOP_GRACE_S = 2.0  # for answers under way after the drain; endless streams are cancelled then
_UNWINDING_TURNS = 10  # of the event loop, in which calls that gRPC has passed on begin or end
_QUIET_S = 0.002
_MAX_QUIET_WAIT_S = 0.5
_CUT_S = 0.2  # for the statuses of calls that the server ends
_GC_THRESHOLDS = (10_000, 20, 20)  # objects, collections of the first and of the second generation
_NO_END_S = 1e6  # of gRPC's own grace, as the server ends the calls itself

_Result = TypeVar("_Result")


class StartInterruptedError(Exception):
    """A signal came before the service had started. Threads that start it may still run."""


class Service(Protocol):
    """A started service, as its server sees it."""

    def announce_stop(self) -> None:
        """Called when the server is asked to stop, before the drain. The service takes requests
        until then, and says wherever it is asked that it will not.
        """
        return

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests; returns when the running ones have ended, or at the timeout."""

    async def close(self) -> None:
        """Releases all resources. Called after the server has stopped."""


ServiceStarter = Callable[["RpcServer"], Coroutine[Any, Any, Service]]
"""Starts a service and adds its servicers to the `RpcServer`. The service sets the server
serving when it is ready.
"""


class RpcServer:
    """A grpc.aio server with health, reflection and Baton's interceptor.

    Args:
        config: the address to listen on.
        service_names: full names of the services that will be added, for example
            `baton.v1.WorkerService`; health and reflection list them at once.
        access: who may call, and how the port is encrypted.

    Attributes:
        port: the bound port, once listening.
    """

    def __init__(
        self,
        config: ServerConfig,
        service_names: Sequence[str],
        access: ServerAccess | None = None,
    ) -> None:
        self._access = access or ServerAccess()
        self._handlers = HandlerTable(service_names)
        self.port = 0
        self._config = config
        self._health = HealthServicer(service_names)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping: asyncio.Future[None] | None = None
        options = dict(SERVER_OPTIONS)
        max_connections = min(MAX_CONNECTIONS, connection_budget())
        max_connections = self._access.max_connections or max_connections
        options["grpc.max_receive_message_length"] = self._access.max_message_bytes
        options["grpc.max_allowed_incoming_connections"] = max_connections
        options["grpc.so_reuseport"] = int(self._access.shares_port)
        if self._access.connection_age is not None:
            options |= self._access.connection_age.options
        self._interceptor = CallInterceptor(
            self._access.authorize,
            self._access.count_call,
            most_calls=self._access.max_concurrent_calls,
            most_watches=max_connections,
            send_timeout_s=self._access.send_timeout_s,
        )
        self._server = grpc.aio.server(
            interceptors=[self._interceptor],
            options=tuple(options.items()),
        )
        self._server.add_generic_rpc_handlers((self._handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection(self._server, (*service_names, HEALTH_SERVICE_NAME))

    @property
    def address(self) -> str:
        """`host:port`, once listening."""
        return join_host_port(self._config.host, self.port)

    def add_servicer(self, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Adds a servicer, before or after `listen`.

        Args:
            add_to_server: the generated `add_…Servicer_to_server`.
            servicer: the servicer to add.
        """
        add_to_server(servicer, self._handlers)

    async def listen(self) -> None:
        """Binds the address and starts to answer: health NOT_SERVING, other calls UNAVAILABLE.
        Does nothing if the config has no port.

        Raises:
            ConfigurationError: the address cannot be bound, or the port file cannot be written.
        """
        if self._config.port is None:
            return
        self.port = self._config.port
        try:
            self.port = self._bind()
        except RuntimeError:
            raise ConfigurationError(
                f"cannot listen on {self.address}: in use, or not an address of this machine"
            ) from None
        await self._server.start()
        if self._config.port_file is not None:
            write_port_file(Path(self._config.port_file), self.port)
        _LOGGER.info("listening address=%s", self.address)

    def _bind(self) -> int:
        credentials = self._access.credentials
        if credentials is None:
            return self._server.add_insecure_port(self.address)
        return self._server.add_secure_port(self.address, credentials)

    @property
    def is_serving(self) -> bool:
        """Whether health answers SERVING."""
        return self._health.is_serving

    def set_serving(self, is_serving: bool) -> None:
        """Sets the answer of health. Has no effect once the server stops."""
        if is_serving != self.is_serving:
            _LOGGER.info("health address=%s serving=%s", self.address, is_serving)
        self._health.set_serving(is_serving)

    def fail(self, cause: BaseException) -> None:
        """Called when the service can serve no more: sets NOT_SERVING; `serve` raises `cause`."""
        self._health.close()
        if not self._failure.done():
            self._failure.set_exception(cause)
            self._failure.exception()  # asyncio would log one for which nobody waits

    async def wait_failed(self, timeout_s: float | None = None) -> None:
        """Waits for a call of `fail` and raises its cause; returns at the timeout, if any."""
        await asyncio.wait((self._failure,), timeout=timeout_s)
        if self._failure.done():
            self._failure.result()

    def begin_stop(self) -> None:
        """Makes health answer NOT_SERVING for good. Other calls continue."""
        self._health.close()

    @property
    def num_calls(self) -> int:
        """How many calls run, apart from those of health and reflection."""
        return self._interceptor.num_calls

    async def refuse_new(self) -> None:
        """Closes the port and asks the clients to make further calls elsewhere (GOAWAY). Calls
        under way continue.
        """
        self.begin_stop()
        if self._stopping is None:
            is_closed = asyncio.Event()
            self._stopping = asyncio.ensure_future(self._stop_in_quiet(is_closed))
            await is_closed.wait()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits `grace_s` for those under way, then ends them."""
        self.begin_stop()
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._server.stop(_NO_END_S))
        await asyncio.wait((self._stopping,), timeout=grace_s)
        self._interceptor.cut_calls()
        await asyncio.wait((self._stopping,), timeout=_CUT_S)
        await self._server.stop(None)
        # gRPC logs a traceback for each cancelled call that the end of the event loop interrupts.
        for _ in range(_UNWINDING_TURNS):
            await asyncio.sleep(0)

    async def _take_waiting_calls(self) -> None:
        """Waits for a moment in which no call has just come: gRPC cancels those that have reached
        the process and that the event loop has not taken yet. If this loop runs late, gRPC's
        threads may have calls that came long ago.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + _MAX_QUIET_WAIT_S
        while clock() < end:
            num_begun, began_at = self._interceptor.num_begun, clock()
            await asyncio.sleep(_QUIET_S)
            for _ in range(_UNWINDING_TURNS):
                await asyncio.sleep(0)
            is_late = clock() - began_at > 2 * _QUIET_S
            if self._interceptor.num_begun == num_begun and not is_late:
                return

    async def _stop_in_quiet(self, is_closed: asyncio.Event) -> None:
        """Stops the server; sets the event when its port is closed."""
        await self._take_waiting_calls()
        is_closed.set()  # which is noticed later: gRPC closes the port in this turn of the loop
        await self._server.stop(_NO_END_S)


async def serve(
    config: ServerConfig,
    service_names: Sequence[str],
    start_service: ServiceStarter,
    access: ServerAccess | None = None,
) -> None:
    """Runs a server until a signal to stop, in the five steps of the module's docstring.

    Args:
        config: the address, and how the server stops.
        service_names: see `RpcServer`.
        start_service: starts the service, and adds its servicers.
        access: who may call, and how the port is encrypted.

    Raises:
        ConfigurationError: the address cannot be bound, or the service cannot start.
        StartInterruptedError: a signal came while the service started.
        BaseException: the cause that the service passed to `RpcServer.fail`.
    """
    server = RpcServer(config, service_names, access)
    with StopSignals() as signals:
        try:
            if access is None or not access.shares_port:
                await server.listen()
            _LOGGER.info("limits %s connections=%d", describe_limits(), connection_budget())
            service = await _unless(signals.requested, start_service(server))
            if service is None:
                raise StartInterruptedError
            await _run(server, service, signals, config)
        finally:
            await server.stop(0)


async def _run(
    server: RpcServer, service: Service, signals: StopSignals, config: ServerConfig
) -> None:
    _tune_garbage_collector()
    try:
        await _unless(signals.requested, server.wait_failed())
        server.begin_stop()
        service.announce_stop()
        delay_s, timeout_s = config.shutdown_delay_s, config.drain_timeout_s
        if delay_s > 0:
            _LOGGER.info("serving address=%s until the drain in %.1f s", server.address, delay_s)
            await _unless(signals.forced, server.wait_failed(delay_s))
        _LOGGER.info("draining address=%s timeout_s=%.1f", server.address, timeout_s)
        await _unless(signals.forced, service.drain(timeout_s))
        await server.stop(0 if signals.forced.is_set() else _STOP_GRACE_S)
    finally:
        await service.close()
        _LOGGER.info("stopped address=%s", server.address)


def _tune_garbage_collector() -> None:
    """Makes Python look for reference cycles rarely, and never among what the start has made.

    With Python's own thresholds a router spends 7% of its time on that, and a worker pauses for
    as long as it takes to visit all objects of torch.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Returns the result of `work`; cancels it and returns None if the event is set first."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


@ignored_hangup()
def run_process(
    name: str,
    log_level: str,
    log_format: str,
    run: Callable[[], Coroutine[Any, Any, None]],
) -> int:
    """Runs a server process to its end and returns its exit code.

    A `ConfigurationError` becomes one line on stderr and exit code 2. A signal while the
    service starts ends the process here, with exit code 0; so does any other error, with code 1.

    Args:
        name: the command's name for that line, for example "baton prefill".
        log_level: debug, info, warning or error; logs go to stderr.
        log_format: text or json.
        run: reads the flags and returns the coroutine to run, usually of `serve`.
    """
    start_logging(log_level, log_format)
    for warning in unknown_variables():
        _LOGGER.warning("%s", warning)
    raise_descriptor_limit()
    try:
        asyncio.run(_exit_if_interrupted(run()))
    except ConfigurationError as error:
        sys.stderr.write(f"{name}: error: {error.message}\n")
        return EXIT_CONFIGURATION
    except Exception:
        _LOGGER.critical("%s ends because of an error", name, exc_info=True)
        logging.shutdown()
        # The interpreter would wait for threads, one of which may be stuck.
        os._exit(_EXIT_FAILURE)
    return 0


async def _exit_if_interrupted(server: Coroutine[Any, Any, None]) -> None:
    try:
        await server
    except StartInterruptedError:
        _LOGGER.info("stopped while starting")
        # asyncio and the interpreter would wait for the threads that download or read a model,
        # which cannot be interrupted. No request has been served yet.
        os._exit(0)
