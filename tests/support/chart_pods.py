"""Pods of the Helm chart as processes of this machine, and what Kubernetes does with them: probes,
endpoints of a Service, and the end of a pod.
"""

import asyncio
import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from rpc.probe import check_health
from tests.support.helm_chart import ROOT
from tests.support.ports import reserved_port

START_TIMEOUT_S = 180.0
_POLL_S = 0.1


class Pod:
    """One pod: the rendered command and variables, with paths and ports of this machine.

    Args:
        deployment: the rendered Deployment.
        folder: gets the log and what the pod writes.
        replaced: by text, what takes its place in the command and the variables.
    """

    def __init__(self, deployment, folder, replaced):
        spec = deployment["spec"]["template"]["spec"]
        (self._container,) = spec["containers"]
        self.grace_s = spec["terminationGracePeriodSeconds"]
        self.ports = {port["name"]: reserved_port() for port in self._container["ports"]}
        for port in self._container["ports"]:
            number = port["containerPort"]
            replaced = {**replaced, f"port={number}": f"port={self.ports[port['name']]}"}

        def local(text):
            for name, value in replaced.items():
                text = text.replace(name, value)
            return text

        variables = {
            entry["name"]: local(entry["value"])
            for entry in self._container["env"]
            if "value" in entry
        }
        self._log = folder / f"{self._container['name']}-{self.ports['grpc']}.log"
        with self._log.open("wb") as log:
            program = str(Path(sys.executable).with_name("baton"))
            self._process = subprocess.Popen(
                [program, *map(local, self._container["args"])],
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

    async def is_ready(self):
        """Asks as the rendered readiness probe does, but for its timeout: machines are shared."""
        probe = self._container["readinessProbe"]
        if "grpc" in probe:
            service = probe["grpc"].get("service", "")
            address = f"127.0.0.1:{self.ports['grpc']}"
            return await check_health(address, service=service, timeout_s=30) == "SERVING"
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
            await asyncio.sleep(_POLL_S)

    async def end(self):
        """Ends the process as Kubernetes does; returns its exit code, or None if it outlives its
        grace period.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.to_thread(self._process.wait, self.grace_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self):
        self._process.kill()
        self._process.wait()


class Endpoints:
    """The addresses of a Service: those of its pods that were ready when they were last asked."""

    def __init__(self):
        self.pods = []
        self.ready = []
        self.has_ready = asyncio.Event()

    async def follow(self):
        """Asks the pods again and again, about as often as kubelet does."""
        while True:
            self.ready = [pod for pod in self.pods if await pod.is_ready()]
            if self.ready:
                self.has_ready.set()
            await asyncio.sleep(1)


def write_secrets(manifests, folder):
    """Writes the rendered Secrets as the kubelet mounts them."""
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            for key, value in manifest["data"].items():
                (folder / key).write_bytes(base64.b64decode(value))
