"""Runs the processes of a cluster that are on this machine.

The workers start first, then the router. When all of them are serving, `on_ready` is called.
On a signal the router stops first, then the workers.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from baton.common.ray_cluster import PLACING_S
from baton.up.plan import ClusterPlan, Server
from rpc.probe import wait_until_listening, wait_until_ready, wait_until_serving
from rpc.stop_signals import stop_signals_in_use
from worker.processes.supervisor import RestartPolicy, SupervisedProcess

__all__ = [
    "background_cluster",
    "run_cluster",
    "start_server",
    "start_workers",
    "stop_in_order",
    "stop_on_signal",
]

_START_TIMEOUT_S = 900.0
_SET_START_TIMEOUT_S = PLACING_S + _START_TIMEOUT_S + 60.0
"""More than a set grants its workers for finding room and for their start."""
_STOP_GRACE_S = 10.0
"""Time to end for a server that has drained. A parent grants its own processes as much."""


async def stop_on_signal(processes: Sequence[SupervisedProcess]) -> None:
    """Returns on the first SIGINT or SIGTERM; each later signal kills the processes."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            for process in processes:
                process.begin_stop()  # or it would be started again while the router drains
                process.kill()
        stop.set()

    for number in stop_signals_in_use():
        loop.add_signal_handler(number, on_signal)
    await stop.wait()


async def run_cluster(
    plan: ClusterPlan,
    write_line: Callable[[str], None],
    on_ready: Callable[[], Awaitable[None]],
    wait_for_stop: Callable[
        [Sequence[SupervisedProcess]], Coroutine[Any, Any, Any]
    ] = stop_on_signal,
) -> None:
    """Runs the cluster until `wait_for_stop` returns.

    Args:
        plan: the processes to run.
        write_line: called with every line that the processes write.
        on_ready: called once when all processes are serving.
        wait_for_stop: called with the processes; returns when they must stop.

    Raises:
        ConfigurationError: a process ended before it was serving.
        UnavailableError: the machine could not start a process.
        BatonError: `on_ready` raised it.
    """
    servers = (*plan.workers, plan.router)
    processes = [
        SupervisedProcess(server.spec, write_line, _restart_policy(server, plan.drain_timeout_s))
        for server in servers
    ]
    stopped = asyncio.create_task(wait_for_stop(processes))
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


def _restart_policy(server: Server, drain_timeout_s: float) -> RestartPolicy:
    grace_s = 2 * _STOP_GRACE_S if server.is_parent else _STOP_GRACE_S
    return RestartPolicy(stop_grace_s=drain_timeout_s + grace_s)


async def _serve(
    servers: Sequence[Server],
    processes: Sequence[SupervisedProcess],
    on_ready: Callable[[], Awaitable[None]],
) -> None:
    *workers, router = zip(servers, processes, strict=True)
    await start_workers(workers)
    await start_server(*router)
    await on_ready()


async def start_workers(workers: Iterable[tuple[Server, SupervisedProcess]]) -> None:
    """Starts the processes of workers; returns when all are serving.

    Those that share a GPU start one after the other, as each measures how much memory is left.

    Raises:
        ConfigurationError: a process ended before it was serving.
        UnavailableError: the machine could not start a process.
    """
    queues: dict[object, list[tuple[Server, SupervisedProcess]]] = {}
    for server, process in workers:
        share = server.gpu_share
        queue = share.gpus if share.is_shared else server.address
        queues.setdefault(queue, []).append((server, process))
    starts = [asyncio.ensure_future(_start_in_turn(queue)) for queue in queues.values()]
    try:
        await asyncio.gather(*starts)
    finally:  # of those that wait for their turn, none starts after an error
        for start in starts:
            start.cancel()


async def _start_in_turn(workers: Sequence[tuple[Server, SupervisedProcess]]) -> None:
    for server, process in workers:
        await start_server(server, process)


async def start_server(server: Server, process: SupervisedProcess) -> None:
    """Starts a server's process; returns when the server is serving.

    Raises:
        ConfigurationError: the process ended first.
        UnavailableError: the machine could not start the process.
    """
    await process.start_until(partial(_wait_until_serving, server))


async def _wait_until_serving(server: Server) -> None:
    timeout_s = _SET_START_TIMEOUT_S if server.is_set else _START_TIMEOUT_S
    if server.asks_for_certificates:  # this process has none
        for address in filter(None, (server.address, server.http_address)):
            await wait_until_listening(address, timeout_s)
        return
    if server.address:
        await wait_until_serving(server.address, timeout_s, lambda: server.tls)
    if server.http_address:
        await wait_until_ready(server.http_address, timeout_s, server.tls)


async def stop_in_order(processes: Sequence[SupervisedProcess]) -> None:
    """Stops the router, which is the last of `processes`, and then the workers.

    With the router stopped first, no new request reaches the workers.
    """
    *workers, router = processes
    await router.stop()
    await asyncio.gather(*(worker.stop() for worker in workers))


@contextmanager
def background_cluster(
    plan: ClusterPlan, write_line: Callable[[str], None]
) -> Generator[None, None, None]:
    """Runs a cluster while the `with` block runs, which starts when the cluster is serving.

    Signals are the main thread's; a Ctrl-C there does not reach the cluster's processes.

    Args:
        plan: the processes to run.
        write_line: called with every line that the processes write, in another thread.

    Raises:
        ConfigurationError: a process ended before it was serving.
    """
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    ready: Future[None] = Future()

    async def on_ready() -> None:
        ready.set_result(None)

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(run_cluster(plan, write_line, on_ready, lambda _: stop.wait()))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    # The thread stays alive as long as the processes: the kernel ends them with it.
    thread = threading.Thread(target=run, name="cluster")
    thread.start()
    try:
        ready.result()
        yield
    finally:
        with suppress(RuntimeError):  # the loop is closed: the cluster did not start
            loop.call_soon_threadsafe(stop.set)
        thread.join()
