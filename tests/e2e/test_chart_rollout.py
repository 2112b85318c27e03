"""The commands, variables, probes and stops of the rendered Helm chart, as processes under load: a
rolling update loses no request, and requests wait for a tier that begins at zero.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx2
import pytest

from tests.support.chart_pods import Endpoints, Pod, write_secrets
from tests.support.helm_chart import needs_helm, render_all

pytestmark = [needs_helm, pytest.mark.slow, pytest.mark.timeout(600)]

_WORKER = {"args": ["--kv-cache-memory-bytes=64MiB", "--num-threads=1"], "startupSeconds": 600}
VALUES = {
    "discovery": "registration",
    "kvConnector": "grpc://127.0.0.1",
    "redis": {"enabled": False},
    "router": {"shutdownDelaySeconds": 4},
    "prefill": _WORKER,
    "decode": _WORKER,
}
NUM_CLIENTS = 4
NUM_TOKENS = 24


class Release:
    """The pods of a release, by tier."""

    def __init__(self, manifests, folder):
        self._folder = folder
        self._deployments = {
            manifest["metadata"]["labels"]["app.kubernetes.io/component"]: manifest
            for manifest in manifests
            if manifest["kind"] == "Deployment"
        }
        (folder / "run").mkdir()
        write_secrets(manifests, folder / "run")
        self._routers_file = folder / "routers"
        self._routers_file.touch()
        self.endpoints = Endpoints()
        self.pods = {}
        self.all_pods = []

    def start(self, tier):
        replaced = {
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--metrics-host=0.0.0.0": "--metrics-host=127.0.0.1",
            "/run/baton": str(self._folder / "run"),
            "/hub": str(self._folder / "hub"),
            "$(POD_IP)": "127.0.0.1",
            "dns:///baton-routers.llm.svc:50051": f"file://{self._routers_file}",
        }
        pod = Pod(self._deployments[tier], self._folder, replaced)
        self.all_pods.append(pod)
        if tier == "router":  # the headless Service lists pods before they are ready
            with self._routers_file.open("a") as file:
                file.write(f"127.0.0.1:{pod.ports['grpc']}\n")
            self.endpoints.pods.append(pod)
        return pod

    async def replace(self, tier):
        """Does what a Deployment does with maxSurge 1 and maxUnavailable 0."""
        old = self.pods[tier]
        self.pods[tier] = self.start(tier)
        await self.pods[tier].wait_ready()
        assert await old.end() == 0, old.log
        if tier == "router":
            self.endpoints.pods.remove(old)


@asynccontextmanager
async def running_release(folder, values, tiers):
    (manifests,) = render_all([values])
    assert not isinstance(manifests, str), manifests
    release = Release(manifests, folder)
    following = asyncio.create_task(release.endpoints.follow())
    try:
        release.pods = {tier: release.start(tier) for tier in tiers}
        for pod in release.pods.values():
            await pod.wait_ready()
        await release.endpoints.has_ready.wait()
        yield release
    finally:
        following.cancel()
        for pod in release.all_pods:
            pod.kill()


async def send_until(ended, endpoints, client, answers):
    """Sends one request after the other to a router that is listed."""
    number = 0
    while not ended.is_set():
        router = endpoints.ready[number % len(endpoints.ready)]
        number += 1
        answers.append(await send(router, f"Client {client}, request {number}: " + "word " * 40))


async def send(router, prompt):
    """Returns the number of tokens of a whole stream, or what is wrong with it. The connection is
    a new one.
    """
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with httpx2.AsyncClient(timeout=300) as http:
            answer = await http.post(f"{router.url}/v1/completions", json=body)
    except httpx2.TransportError as error:
        return f"{type(error).__name__}: {error}"
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    if answer.status_code != 200 or events[-1] != "[DONE]":
        return f"{answer.status_code} {answer.text[-300:]}"
    return json.loads(events[-2])["usage"]["completion_tokens"]


async def test_a_rolling_update_of_every_pod_loses_no_request(tmp_path):
    answers, ended = [], asyncio.Event()
    async with running_release(tmp_path, VALUES, ("router", "prefill", "decode")) as release:
        clients = [
            asyncio.create_task(send_until(ended, release.endpoints, number, answers))
            for number in range(NUM_CLIENTS)
        ]
        try:
            for tier in ("decode", "prefill", "router"):
                num_before = len(answers)
                await release.replace(tier)
                assert len(answers) > num_before
        finally:
            ended.set()
            await asyncio.gather(*clients)
    assert [answer for answer in answers if answer != NUM_TOKENS] == []


async def test_requests_wait_for_the_first_worker_and_say_so_to_the_scaler(tmp_path):
    values = {
        **VALUES,
        "router": {"readyWithoutWorkers": True, "args": ["--queue-timeout-s=300"]},
        "decode": {**_WORKER, "autoscaling": {"type": "keda", "minReplicas": 0}},
        "autoscaling": {"prometheusUrl": "http://prometheus:9090"},
    }
    async with running_release(tmp_path, values, ("router",)) as release, asyncio.timeout(300):
        router = release.pods["router"]
        token = (tmp_path / "run" / "metrics-token").read_text()
        sending = asyncio.create_task(send(router, "Is anybody there?"))
        async with httpx2.AsyncClient(timeout=30) as http:
            is_waiting = False
            while not is_waiting:
                answer = await http.get(
                    f"{router.url}/metrics", headers={"authorization": f"Bearer {token}"}
                )
                is_waiting = 'baton_router_waiting_requests{model="demo"} 1.0' in answer.text
        release.start("decode")
        assert await sending == NUM_TOKENS
