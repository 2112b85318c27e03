"""`background_cluster`: a cluster beside a command's own work in the main thread."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from baton.up.cluster import run_cluster
from baton.up.plan import ClusterPlan

__all__ = ["background_cluster"]


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
