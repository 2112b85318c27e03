"""Pods of the Helm chart as processes of this machine, and what Kubernetes does with them: probes,
and the end of a pod.
"""

import asyncio
import base64
import os
import signal
import subprocess
import sys
import time

import httpx2

from rpc.probe import check_health
from tests.support.helm_chart import ROOT
from tests.support.ports import reserved_port

START_TIMEOUT_S = 180.0
POLL_S = 0.1
_GRACE_S = 30  # Kubernetes' own


class Pod:
    """One pod: the rendered command and variables, with paths and ports of this machine.

    Args:
        deployment: the rendered Deployment.
        folder: gets the log and what the pod writes.
        replaced: by text, what takes its place in the command, the variables and the probes.

    Attributes:
        ports: the ports by name.
        num_sent: how many requests clients have sent to it; they count them.
        stopped_at: when SIGTERM was sent (`time.monotonic()`); None before.
    """

    def __init__(self, deployment, folder, replaced):
        spec = deployment["spec"]["template"]["spec"]
        (self._container,) = spec["containers"]
        self._grace_s = spec.get("terminationGracePeriodSeconds", _GRACE_S)
        self.ports = {port["name"]: reserved_port() for port in self._container["ports"]}
        self._replaced = dict(replaced)
        for port in self._container["ports"]:
            local_port = self.ports[port["name"]]
            self._replaced[f"port={port['containerPort']}"] = f"port={local_port}"
        self.num_sent = 0
        self.stopped_at = None
        program = [sys.executable, "-m", "tests.support.baton_command"]
        variables = {
            entry["name"]: self._local(entry["value"])
            for entry in self._container.get("env", ())
            if "value" in entry
        }
        first_port = next(iter(self.ports.values()))
        self._log = folder / f"{self._container['name']}-{first_port}.log"
        command = self._container.get("command", program) + self._container["args"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*map(self._local, command)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdout=log,
                stderr=log,
            )

    @property
    def url(self):
        return f"http://127.0.0.1:{self.ports['http']}"

    @property
    def log(self):
        return self._log.read_text(errors="replace")

    def _local(self, text):
        for name, value in self._replaced.items():
            text = text.replace(name, value)
        return text

    async def is_ready(self):
        """Asks as the rendered readiness probe does, but for its timeout: machines are shared."""
        probe = self._container["readinessProbe"]
        if "grpc" in probe:
            service = probe["grpc"].get("service", "")
            address = f"127.0.0.1:{self.ports['grpc']}"
            return await check_health(address, service=service, timeout_s=30) == "SERVING"
        if "exec" in probe:
            command = map(self._local, probe["exec"]["command"])
            nowhere = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(*command, stdout=nowhere, stderr=nowhere)
            return await process.wait() == 0
        assert probe["httpGet"]["port"] == "http"
        url = f"{self.url}{probe['httpGet']['path']}"
        try:
            async with httpx2.AsyncClient(timeout=30) as client:
                return (await client.get(url)).is_success
        except httpx2.TransportError:
            return False

    async def wait_ready(self):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not await self.is_ready():
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            await asyncio.sleep(POLL_S)

    def stop(self):
        """Ends the process as Kubernetes does; `wait_end` waits for it."""
        self.stopped_at = time.monotonic()
        self._process.send_signal(signal.SIGTERM)

    async def wait_end(self):
        """Waits for the end of the process within its grace period.

        Raises:
            AssertionError: it outlives the period, or ends with an error.
        """
        try:
            code = await asyncio.to_thread(self._process.wait, self._grace_s)
        except subprocess.TimeoutExpired:
            code = None
        assert code == 0, self.log

    def kill(self):
        self._process.kill()
        self._process.wait()


def write_secrets(manifests, folder):
    """Writes the rendered Secrets as the kubelet mounts them."""
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            for key, value in manifest["data"].items():
                (folder / key).write_bytes(base64.b64decode(value))
