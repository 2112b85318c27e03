"""A cluster of real processes for as long as a benchmark needs it, as `baton up` runs it."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from baton.up.cluster import ClusterConfig, ClusterPlan, plan_cluster, start_server, stop_in_order
from baton.up.run_folder import taking_turns
from baton.up.supervisor import SupervisedProcess

__all__ = ["running_cluster"]


@asynccontextmanager
async def running_cluster(config: ClusterConfig) -> AsyncGenerator[ClusterPlan, None]:
    """Starts the workers, then the router; ends them in order. What they write goes to stderr.

    Raises:
        ConfigurationError: a process ended before it served.
    """
    with taking_turns(config) as with_turns:
        plan = plan_cluster(with_turns)
        servers = (*plan.workers, plan.router)
        processes = [SupervisedProcess(server.spec, _write_line) for server in servers]
        *workers, router = zip(servers, processes, strict=True)
        try:
            await asyncio.gather(*(start_server(*worker) for worker in workers))
            await start_server(*router)
            yield plan
        finally:
            await stop_in_order(processes)


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
