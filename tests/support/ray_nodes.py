"""A Ray cluster of several nodes on this machine, in processes of its own.

Ray is installed in .venv-integrations, whose interpreter runs what needs it with the other packages
of this environment. `python -m tests.support.ray_nodes CPUS...` is the cluster.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

__all__ = ["RayNodes", "running_ray"]

ROOT = Path(__file__).parents[2]
INTEGRATIONS = ROOT / ".venv-integrations" / "bin" / "python"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join((str(ROOT), sysconfig.get_paths()["purelib"])),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray would kill workers where tests beside them take most of the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # A node ends, and its workers with it, if its agents have not started within 30 s. These are
    # programs in Python, which may take that long on a busy machine.
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    # For the answer of a node that lives: a connection that is refused needs no wait.
    "RAY_health_check_timeout_ms": "60000",
    "OMP_NUM_THREADS": "1",
    "no_proxy": "127.0.0.1",
}

_RUN_S = 300.0
_END_S = 120.0


class RayNodes:
    """A running cluster.

    Attributes:
        python: an interpreter that can import Ray and Baton.
        environment: the variables of a process that joins it.
    """

    def __init__(self, python: str, process: "subprocess.Popen[str]") -> None:
        self.python, self._process = python, process
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "the cluster did not start"
        self.environment = {**ENVIRONMENT, "RAY_ADDRESS": address}

    def run(self, *command: object) -> "subprocess.CompletedProcess[str]":
        """Runs a module of Python, which joins the cluster, to its end."""
        return subprocess.run(
            [self.python, "-m", *map(str, command)],
            check=False,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )


def _python() -> str:
    """Returns an interpreter that can import Ray; skips the test if there is none."""
    if find_spec("ray"):
        return sys.executable
    command = [INTEGRATIONS, "-c", "import ray"]
    if not INTEGRATIONS.exists() or subprocess.run(command, check=False).returncode:
        pytest.skip("Ray is not installed; `make test-slow` installs it")
    return str(INTEGRATIONS)


@contextmanager
def running_ray(*cpus: int) -> Iterator[RayNodes]:
    """Runs a cluster of nodes with these numbers of CPUs; the first is its head."""
    python = _python()
    process = subprocess.Popen(
        [python, "-m", "tests.support.ray_nodes", *map(str, cpus)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield RayNodes(python, process)
    finally:
        try:
            process.communicate(timeout=_END_S)
        finally:
            process.kill()


def main() -> None:
    """Runs the nodes until standard input ends."""
    # Ray's sockets lie in this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        from ray.cluster_utils import Cluster

        head, *others = map(int, sys.argv[1:])
        # No dashboard, and no port that another cluster of this machine has.
        options = {"include_dashboard": False, "dashboard_agent_listen_port": 0}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, **options})
        for number in others:
            cluster.add_node(num_cpus=number)
        print(cluster.address, flush=True)
        sys.stdin.read()
        cluster.shutdown()


if __name__ == "__main__":
    main()
