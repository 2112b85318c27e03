"""Runs the services of `docker-compose.yml` as processes of this machine, by their own commands.

Each service gets one process. Container names and ports become 127.0.0.1 and
ports of this machine; mounted folders become folders of this machine. Nothing else of a
command changes. Redis gets its password from here, as its entry point needs a
container.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import yaml

from tests.support.ports import reserved_port

ROOT = Path(__file__).resolve().parents[2]
CONTAINER_PORTS = {"redis": 6379, "prefill": 50051, "decode": 50051, "router": 50051}
ROUTER_HTTP = "router-http"
_REDIS_PASSWORD = "the-password-of-redis"


def load_compose(environment: dict[str, str]) -> dict[str, Any]:
    """The services without a profile, with `${NAME:-default}` filled in from `environment`."""
    text = (ROOT / "docker-compose.yml").read_text()
    filled = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda match: environment.get(match[1], match[2]), text
    )
    services = yaml.safe_load(filled)["services"]
    return {name: service for name, service in services.items() if "profiles" not in service}


def mount_of(volume: str | dict[str, Any]) -> tuple[str, str]:
    """The source and the target of an entry of `volumes`, in its short or its long form."""
    if isinstance(volume, dict):
        return volume["source"], volume["target"]
    source, target, *_ = volume.split(":")
    return source, target


def image_entrypoint() -> list[str]:
    """The exec-form ENTRYPOINT of the Dockerfile."""
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return json.loads(line)


class ComposeProcesses:
    """The services as processes, in a context manager that ends them.

    Attributes:
        addresses: `host:port` of each service; `ROUTER_HTTP` is the router's HTTP server.
        processes: each service's process.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._redis_configuration = folder / "redis.conf"
        self._services = load_compose(environment)
        names = (*CONTAINER_PORTS, ROUTER_HTTP)
        self.addresses = {name: f"127.0.0.1:{reserved_port()}" for name in names}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        (self._mounted("kv-credentials") / "password").write_text(_REDIS_PASSWORD)
        self._redis_configuration.write_text(f"requirepass {_REDIS_PASSWORD}\n")
        with self._stack:
            for name in self._services:
                self._start(name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def command(self, name: str) -> list[str]:
        """A service's command on this machine."""
        service = self._services[name]
        arguments = [self._localize(name, argument) for argument in service["command"]]
        if "build" not in service:  # a stock image, whose server is on PATH
            return [*arguments, "--port", self._port(name), "--dir", str(self._folder)]
        (program,) = image_entrypoint()
        return [str(Path(sys.executable).with_name(program)), *arguments]

    def log(self, name: str) -> str:
        """Returns the output of a service."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _localize(self, name: str, argument: str) -> str:
        flag = "--grpc-port" if name == "router" else "--port"
        own_port = f"{flag}={CONTAINER_PORTS[name]}"
        replaced = argument.replace(own_port, f"{flag}={self._port(name)}")
        if name == "router":
            replaced = replaced.replace("--port=8000", f"--port={self._port(ROUTER_HTTP)}")
        replaced = replaced.replace("host=0.0.0.0", "host=127.0.0.1")
        replaced = replaced.replace("--metrics-port=9464", "--metrics-port=0")
        for service, port in CONTAINER_PORTS.items():
            replaced = replaced.replace(f"/{service}:{port}", f"/{self.addresses[service]}")
        for volume in self._services[name].get("volumes", ()):
            source, target = mount_of(volume)
            # The value of a flag, or of an option in a URL.
            replaced = re.sub(f"={target}(?=/|$)", f"={self._mounted(source)}", replaced)
        return replaced

    def _environment(self, name: str) -> dict[str, str]:
        variables = self._services[name].get("environment", {})
        localized = {key: self._localize(name, value or "") for key, value in variables.items()}
        return localized | ({"HF_HOME": str(self._mounted("hub"))} if localized else {})

    def _mounted(self, source: str) -> Path:
        """Returns the mounted folder: one of this machine, or a named volume's."""
        if "/" in source:
            return (ROOT / source).resolve()
        volume = self._folder / source
        volume.mkdir(exist_ok=True)
        return volume

    def _port(self, name: str) -> str:
        return self.addresses[name].rpartition(":")[2]

    def _start(self, name: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            self.command(name),
            stdin=self._stack.enter_context(self._redis_configuration.open("rb")),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self._environment(name), "OMP_NUM_THREADS": "1"},
        )
        self._stack.callback(_end, process)
        self.processes[name] = process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with SIGTERM, or with SIGKILL if that takes too long."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
