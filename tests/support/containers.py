"""Containers of `docker-compose.yml`, and what can happen to them.

`python -m tests.support.containers` makes the images, which the tests find then.
"""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self, TextIO

from tests.support.ports import reserved_ports

ROOT = Path(__file__).resolve().parents[2]
# Programs of the distribution first: others of their names may lack the engine.
PATH = f"/usr/bin:{os.environ['PATH']}"
CANNOT_RUN_CONTAINERS = 3
IMAGE = "baton-test"
BASE_IMAGE = "python:3.11-slim"
RANK_1 = "decode-rank-1"
ROUTER_2 = "router-2"
OTHER_USER = '"23456:0"'
_PREPARE = ROOT / "scripts" / "prepare_containers.sh"
_UPGRADE = ROOT / "deploy" / "compose" / "upgrade.sh"
_PORTS = ("BATON_PORT", "BATON_GRPC_PORT", "BATON_PORT_2", "BATON_GRPC_PORT_2")
_HEALTH_INTERVAL = "2s"
_PATIENCE = "BATON_RESUME_TIMEOUT_S: 200, BATON_QUEUE_TIMEOUT_S: 200"
"""Of a router whose only decode engine starts again, which takes long on a busy machine."""

_SERVICES = ("router", "prefill", "decode")


class NoContainersError(Exception):
    """This machine cannot run containers; the message is the reason."""


@contextmanager
def container_engine() -> Iterator[dict[str, str]]:
    """Makes sure that a Docker engine and the base images are there. The last of the processes that
    use an engine which one of them has started ends it.

    Yields:
        Variables for docker-compose.

    Raises:
        NoContainersError: the machine cannot run containers.
    """
    with Path(tempfile.gettempdir(), f"baton-containers-{os.getuid()}").open("a+") as users:
        fcntl.flock(users, fcntl.LOCK_SH)  # waits while another process ends the engine
        try:
            if run_program("docker", "info", check=False).returncode != 0:
                users.write("started\n")  # soon, and also if something else fails then
                users.flush()
            prepared = run_program(str(_PREPARE), check=False, timeout_s=900)
            if prepared.returncode == CANNOT_RUN_CONTAINERS:
                raise NoContainersError(prepared.stderr.strip().splitlines()[-1])
            assert prepared.returncode == 0, prepared.stderr
            yield dict(line.split("=", 1) for line in prepared.stdout.splitlines())
        finally:
            _end_started_engine(users)


def _end_started_engine(users: TextIO) -> None:
    """Ends the engine if no other process uses it, and the file says that one which did has
    started it. Unlocks the file, which processes that were forked meanwhile keep open.
    """
    try:
        with suppress(BlockingIOError):  # others use it
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            users.seek(0)
            if users.read():
                users.truncate(0)
                run_program(str(_PREPARE), "--stop")
    finally:
        fcntl.flock(users, fcntl.LOCK_UN)


class ComposeProject:
    """The services as containers, in a context manager that removes them.

    Args:
        folder: for files of this object.
        variables: for docker-compose.
        ranks: whether decode has a second rank, in a container of its own. All services then run as
            a user that the image does not know.
        two_routers: whether there is a second router. The ports of both stay the same when their
            containers are replaced.
        limits: by service, keys of compose and their values, as in "mem_limit: 512m".
        kv_connector: URL of the workers' connector; empty for the default.
        name: tells the project from others of the same kind.
    """

    def __init__(
        self,
        folder: Path,
        variables: dict[str, str],
        *,
        ranks: bool = False,
        two_routers: bool = False,
        limits: Mapping[str, str] | None = None,
        kv_connector: str = "",
        name: str = "",
    ) -> None:
        kind = "-ranks" if ranks else "-routers" if two_routers else ""
        self._name = f"baton-test-{os.getpid()}{kind}{name and '-'}{name}"
        self._environment = {
            **variables,
            "BATON_IMAGE": IMAGE,
            "BATON_PORT": "127.0.0.1:",  # a free port
            "BATON_GRPC_PORT": "127.0.0.1:",
            "BATON_KV_CONNECTOR": kv_connector,
        }
        services = (*_SERVICES, *([RANK_1] if ranks else []))
        overrides = folder / f"{self._name}.yml"
        changes, own_changes = "", dict(limits or {})
        if ranks:
            changes = f"user: {OTHER_USER}"
            own_changes = {"router": f"{changes}, environment: {{{_PATIENCE}}}"}
        if two_routers:
            ports = (f"127.0.0.1:{port}" for port in reserved_ports(len(_PORTS)))
            self._environment |= dict(zip(_PORTS, ports, strict=True))
            changes = f"healthcheck: {{interval: {_HEALTH_INTERVAL}}}"
            services = (*_SERVICES, ROUTER_2)
        changed = [f"  {service}: {{{own_changes.get(service, changes)}}}" for service in services]
        overrides.write_text("\n".join(["services:", *changed]))
        self._images: list[str] = []
        self._routers = ("router", ROUTER_2) if two_routers else ("router",)
        program = ["docker-compose"] if shutil.which("docker-compose", path=PATH) else []
        self._command = [
            *(program or ["docker", "compose"]),
            f"--project-name={self._name}",
            f"--project-directory={ROOT}",
            f"--file={ROOT / 'docker-compose.yml'}",
            *([f"--file={ROOT / 'deploy/compose/ranks.yml'}"] if ranks else []),
            f"--file={overrides}",
            *(["--profile=two-routers"] if two_routers else []),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.compose("down", "--volumes", "--remove-orphans", "--timeout=2")
        finally:
            for container in self._list("--all"):
                run_program("docker", "rm", "--force", "--volumes", container)
            for image in self._images:
                run_program("docker", "rmi", image)

    def compose(self, *arguments: str, timeout_s: float = 300) -> str:
        """Runs a command of docker-compose; returns its output."""
        return run_program(
            *self._command, *arguments, timeout_s=timeout_s, environment=self._environment
        ).stdout

    def build(self) -> None:
        """Builds the image that all services have.

        Its files are those that .dockerignore names, and the libraries that were compiled here:
        the image's compiler, if it is of the same version, need not compile the kernels again.
        """
        with tempfile.TemporaryDirectory() as folder:
            _copy_sources(Path(folder))
            changes = Path(folder, "build.yml")
            changes.write_text(json.dumps({"services": {"router": {"build": {"context": folder}}}}))
            self.compose(f"--file={changes}", "build", "router", timeout_s=1500)

    async def scale(self, prefill: int, decode: int) -> None:
        """Starts and stops containers until there are so many, and waits until all are healthy."""
        sizes = (f"--scale=prefill={prefill}", f"--scale=decode={decode}")
        options = ("--detach", "--no-build", "--no-recreate")
        await asyncio.to_thread(self.compose, "up", *options, *sizes)
        await self.wait_healthy(prefill, decode)

    async def wait_healthy(self, prefill: int, decode: int, timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        counts = {"prefill": prefill, "decode": decode, **dict.fromkeys(self._routers, 1)}
        for service, count in counts.items():
            while len(self.containers(service, "--filter=health=healthy")) != count:
                assert time.monotonic() < deadline, f"{service} is not healthy"
                await asyncio.sleep(0.5)

    def containers(self, service: str, *filters: str) -> list[str]:
        """The ids of the running containers of a service, the oldest first."""
        return self._list(f"--filter=label=com.docker.compose.service={service}", *filters)[::-1]

    def router_address(self, service: str = "router") -> str:
        return self.compose("port", service, "50051").strip()

    def upgrade(self) -> None:
        """Replaces all containers, as docs/compose.md says, by ones of another image. Redis gets
        another setting, as it has an image of its own.
        """
        image = f"{IMAGE}:{self._name}"
        run_program("docker", "build", f"--tag={image}", "-", text=f"FROM {IMAGE}\nLABEL next=1\n")
        self._environment |= {"BATON_IMAGE": image, "BATON_REDIS_MEMORY": "1gb"}
        self._images.append(image)
        run_program(str(_UPGRADE), *self._command, timeout_s=900, environment=self._environment)

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail=200")

    def log(self, service: str) -> str:
        """Returns what the containers of a service have written."""
        return self.compose("logs", "--no-color", service)

    def kill(self, container: str) -> None:
        """Kills the container's process, so that the engine starts it again.

        After `docker kill` it would not: that counts as stopped by the user.
        """
        os.kill(int(self.inspect(container, "{{.State.Pid}}")), signal.SIGKILL)

    async def wait_started_again(self, container: str, times: int = 1) -> None:
        deadline = time.monotonic() + 60
        while int(self.inspect(container, "{{.RestartCount}}")) < times:
            assert time.monotonic() < deadline, "the container was not started again"
            await asyncio.sleep(0.2)

    @contextmanager
    def paused(self, container: str) -> Iterator[None]:
        run_program("docker", "pause", container)
        try:
            yield
        finally:
            run_program("docker", "unpause", container)

    @contextmanager
    def cut_off(self, container: str, service: str) -> Iterator[None]:
        """Takes the container out of the network of all others."""
        network = f"{self._name}_default"
        run_program("docker", "network", "disconnect", network, container)
        try:
            yield
        finally:
            run_program("docker", "network", "connect", f"--alias={service}", network, container)

    async def restart(self, container: str) -> None:
        """Restarts a container; returns once it is healthy again."""
        await asyncio.to_thread(run_program, "docker", "restart", "--time=40", container)
        deadline = time.monotonic() + 120
        while self.inspect(container, "{{.State.Health.Status}}") != "healthy":
            assert time.monotonic() < deadline, "the restarted container is not healthy"
            await asyncio.sleep(0.5)

    def execute(self, container: str, *command: str) -> str:
        return run_program("docker", "exec", container, *command).stdout

    def inspect(self, container: str, template: str) -> str:
        return run_program("docker", "inspect", f"--format={template}", container).stdout.strip()

    def _list(self, *filters: str) -> list[str]:
        project = f"--filter=label=com.docker.compose.project={self._name}"
        return run_program("docker", "ps", "--quiet", project, *filters).stdout.split()


def _copy_sources(folder: Path) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    for name in ("Dockerfile", *(line[1:] for line in lines if line.startswith("!"))):
        if (ROOT / name).is_dir():
            others = shutil.ignore_patterns("__pycache__", "objects", "results")
            shutil.copytree(ROOT / name, folder / name, ignore=others)
        else:
            shutil.copy(ROOT / name, folder)


def run_program(
    *command: str,
    check: bool = True,
    timeout_s: float = 120,
    environment: dict[str, str] | None = None,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    program = shutil.which(command[0], path=PATH)
    if program is None:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is missing")
    result = subprocess.run(
        [program, *command[1:]],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **(environment or {}), "PATH": PATH},
    )
    assert result.returncode == 0 or not check, f"{command}:\n{result.stdout}{result.stderr}"
    return result


def main() -> None:
    """Makes the images; ends with status 3 where containers cannot run."""
    try:
        with container_engine() as variables, tempfile.TemporaryDirectory() as folder:
            ComposeProject(Path(folder), variables).build()
    except NoContainersError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(CANNOT_RUN_CONTAINERS)


if __name__ == "__main__":
    main()
