"""`baton serve` as a process of its own, and what it prints."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["ServedCluster", "read_until", "running", "running_serve"]

_END_S = 60.0


class ServedCluster:
    """A running cluster, as its first lines describe it.

    Attributes:
        pid: of `baton serve`, whose children are the servers.
        url: the base URL of the HTTP API.
        grpc: the address of the router's gRPC server.
        token_file: where the cluster's token is.
        token: the cluster's token.
        targets: addresses of metrics by process, such as "router" and "decode-0".
    """

    def __init__(self, pid: int, lines: list[str]) -> None:
        text = "".join(lines)
        self.pid = pid
        self.url, self.grpc, self.token_file = (
            re.findall(rf"^{name} +(\S+)$", text, re.MULTILINE)[0]
            for name in ("http", "grpc", "token")
        )
        self.token = Path(self.token_file).read_text().strip()
        shown = re.findall(r"^metrics +http://(\S+)/metrics of (\S+)", text, re.MULTILINE)
        self.targets = {name: address for address, name in shown}


@contextlib.contextmanager
def running(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a process, which ends with the context. What it wrote that nothing has read is printed,
    for a test that fails.
    """
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            print(process.communicate(timeout=_END_S)[0])
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Returns the lines of a process's output up to the first one with a text."""
    lines: list[str] = []
    assert process.stdout is not None
    while text not in (lines[-1] if lines else ""):
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)
    return lines


@contextlib.contextmanager
def running_serve(
    *flags: Any, variables: Mapping[str, str] | None = None
) -> Iterator[ServedCluster]:
    """Runs a small cluster of the demo model on free ports, those of its metrics included."""
    command = [
        *(Path(sys.executable).with_name("baton"), "serve", "--port", 0, "--grpc-port", 0),
        *("--metrics-port", 0, "--num-gpu-blocks-override", 64, "--max-model-len", 512),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    with running(command, env=environment) as process:
        yield ServedCluster(process.pid, read_until(process, "Ctrl-C"))
