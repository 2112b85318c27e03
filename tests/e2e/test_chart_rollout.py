"""The commands, variables, probes and stops of the rendered Helm chart, as processes under load:
two rolling updates of every pod lose no request and refuse none, and requests wait while a tier has
no replica.
"""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from unittest import mock

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import chart_pods
from tests.support.chart_pods import POLL_S, Pod, write_secrets
from tests.support.helm_chart import needs_helm, render_all
from tests.support.ports import reserved_port

pytestmark = [needs_helm, pytest.mark.slow, pytest.mark.timeout(600)]

DELAY_S = 2
"""A router that was told to stop takes connections for so long."""
_WORKER = {"args": ["--kv-cache-memory-bytes=64MiB", "--num-threads=1"], "startupSeconds": 600}
VALUES = {
    "discovery": "registration",
    "router": {"shutdownDelaySeconds": DELAY_S},
    "prefill": _WORKER,
    "decode": _WORKER,
}
TIERS = "router", "prefill", "decode"
NUM_CLIENTS = 2
NUM_TOKENS = 24
NUM_LATE = 2 * NUM_CLIENTS
"""So many requests come to a router that was told to stop before its clients notice."""


@pytest.fixture(autouse=True)
def forked_pods(fork_server):
    """Pods are forked from a process that has imported torch."""
    with mock.patch.object(chart_pods, "subprocess", fork_server.subprocess):
        yield


class Release:
    """The pods of a release.

    Attributes:
        pods: those that run, by component.
        all_pods: also those that were replaced.
        routers: those that clients know.
        metrics_token: opens the metrics.
    """

    def __init__(self, manifests, folder):
        self._folder = folder
        self._deployments = {
            manifest["metadata"]["labels"]["app.kubernetes.io/component"]: manifest
            for manifest in manifests
            if manifest["kind"] == "Deployment"
        }
        (folder / "run").mkdir()
        write_secrets(manifests, folder / "run")
        self.metrics_token = (folder / "run" / "metrics-token").read_text()
        self._routers_file = folder / "routers"
        self._routers_file.touch()
        self._redis_port = reserved_port()  # the address of a Service outlives its pods
        self.pods = {}
        self.all_pods = []
        self.routers = []

    @property
    def components(self):
        return list(self._deployments)

    def start(self, component):
        redis = f"127.0.0.1:{self._redis_port}"
        replaced = {
            "--host=0.0.0.0": "--host=127.0.0.1",
            "--metrics-host=0.0.0.0": "--metrics-host=127.0.0.1",
            "/run/baton": str(self._folder / "run"),
            "/run/kv": str(self._folder / "run"),
            "/hub": str(self._folder / "hub"),
            "$(POD_IP)": "127.0.0.1",
            "dns:///baton-routers.llm.svc:50051": f"file://{self._routers_file}",
            "baton-redis:6379": redis,
            'redis-server "$@"': f'redis-server "$@" --port {self._redis_port}',
            "redis-cli ping": f"redis-cli -p {self._redis_port} ping",
        }
        pod = self.pods[component] = Pod(self._deployments[component], self._folder, replaced)
        self.all_pods.append(pod)
        if component == "router":  # the headless Service lists pods before they are ready
            with self._routers_file.open("a") as file:
                file.write(f"127.0.0.1:{pod.ports['grpc']}\n")
        return pod

    async def start_ready(self, *components):
        """Starts pods, and waits until they are ready."""
        async with asyncio.TaskGroup() as starts:
            for component in components:
                starts.create_task(self.start(component).wait_ready())
        if "router" in components:
            self.routers.append(self.pods["router"])

    async def end(self, *components):
        """Ends pods, whose tiers then have no replica."""
        pods = [self.pods.pop(component) for component in components]
        for pod in pods:
            pod.stop()
        for pod in pods:
            await pod.wait_end()

    async def replace(self, component):
        """Does what a Deployment does for one pod of an update, by its strategy."""
        if self._deployments[component]["spec"]["strategy"].get("type") == "Recreate":
            await self.end(component)
            await self.start_ready(component)
            return
        old = self.pods[component]
        await self.start_ready(component)
        old.stop()
        if component == "router":
            await self._leave_late(old)
        await old.wait_end()

    async def _leave_late(self, router):
        """Lets clients send some more requests to a router that says that it stops, as a load
        balancer does that notices late. They leave it at the latest when it may refuse them.
        """
        num_late = router.num_sent + NUM_LATE
        while await router.is_ready() or router.num_sent < num_late:
            if may_refuse(router):
                break
            await asyncio.sleep(POLL_S)
        self.routers.remove(router)


@asynccontextmanager
async def running_release(folder, values):
    (manifests,) = render_all([values])
    assert not isinstance(manifests, str), manifests
    release = Release(manifests, folder)
    try:
        yield release
    finally:
        for pod in release.all_pods:
            pod.kill()


def may_refuse(router, at=None):
    """Whether a router need not take a request of this time (now, by default) any more."""
    at = time.monotonic() if at is None else at
    return router.stopped_at is not None and at > router.stopped_at + DELAY_S


async def send_until(ended, routers, client, answers):
    """Sends one request after the other to the listed routers in turn."""
    number = 0
    while not ended.is_set():
        router = routers[number % len(routers)]
        number += 1
        answer = await send(router, f"Client {client}, request {number}: " + "word " * 40)
        if answer is not None:
            answers.append(answer)


async def send(router, prompt):
    """Returns the number of tokens of a whole stream, or what is wrong with it; None if this
    process was so slow to send the request that the router may have closed. The connection is a
    new one; a router that stops closes those on which no request has come.
    """
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_at = None

    async def note(event, _):
        nonlocal sent_at
        if event == "http11.send_request_body.complete":
            sent_at = time.monotonic()

    router.num_sent += 1
    try:
        async with httpx2.AsyncClient(timeout=300) as http:
            url = f"{router.url}/v1/completions"
            answer = await http.post(url, json=body, extensions={"trace": note})
    except httpx2.TransportError as error:
        return None if may_refuse(router, sent_at) else f"{type(error).__name__}: {error}"
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    usage = None
    if answer.status_code == 200 and events[-1] == "[DONE]":
        usage = json.loads(events[-2]).get("usage")
    return usage["completion_tokens"] if usage else f"{answer.status_code} {answer.text[-300:]}"


async def test_two_rolling_updates_of_every_pod_lose_no_request(tmp_path):
    """All Deployments are updated at once, as by `helm upgrade`."""
    answers, ended = [], asyncio.Event()
    async with running_release(tmp_path, VALUES) as release:
        assert set(release.components) == {*TIERS, "redis"}
        await release.start_ready("redis", *TIERS)
        clients = [
            asyncio.create_task(send_until(ended, release.routers, number, answers))
            for number in range(NUM_CLIENTS)
        ]
        try:
            for _ in range(2):
                num_before = len(answers)
                async with asyncio.TaskGroup() as update:
                    for component in release.components:
                        update.create_task(release.replace(component))
                assert len(answers) > num_before
        finally:
            ended.set()
            await asyncio.gather(*clients)
    assert [answer for answer in answers if answer != NUM_TOKENS] == []


async def test_requests_wait_while_a_tier_has_no_replica(tmp_path):
    """First for the first workers, then for others, after both tiers were scaled to zero. With one
    decode worker, prompts wait for the prefill tier.
    """
    scaled = {**_WORKER, "autoscaling": {"type": "keda", "minReplicas": 0}}
    args = ["--queue-timeout-s=300", "--no-prefill-policy=wait", "--max-local-prefill-tokens=0"]
    values = {
        **VALUES,
        "kvConnector": "grpc://127.0.0.1",
        "redis": {"enabled": False},
        "router": {"readyWithoutWorkers": True, "args": args},
        "prefill": scaled,
        "decode": scaled,
        "autoscaling": {"prometheusUrl": "http://prometheus:9090"},
    }
    async with running_release(tmp_path, values) as release, asyncio.timeout(400):
        await release.start_ready("router")
        async with waiting_requests(release):
            await release.start_ready("prefill", "decode")
        await release.end("prefill", "decode")
        async with waiting_requests(release):
            await release.start_ready("decode")
            await wait_for_gauges(release, num_waiting=NUM_CLIENTS, num_decode=1)
            await release.start_ready("prefill")


@asynccontextmanager
async def waiting_requests(release):
    """Sends requests that wait, since there is no replica, and are answered after the block."""
    router = release.pods["router"]
    numbers = range(NUM_CLIENTS)
    prompts = [f"{len(release.all_pods)}, request {number}: " + "word " * 40 for number in numbers]
    async with asyncio.TaskGroup() as requests:
        sent = [requests.create_task(send(router, prompt)) for prompt in prompts]
        await wait_for_gauges(release, num_waiting=NUM_CLIENTS, num_decode=0)
        yield
    assert [request.result() for request in sent] == [NUM_TOKENS] * NUM_CLIENTS


async def wait_for_gauges(release, num_waiting, num_decode):
    """Waits until the router's metrics, which scalers follow, have these numbers of waiting
    requests and of decode replicas, no prefill replica, and no series of replicas that have ended.
    """
    headers = {"authorization": f"Bearer {release.metrics_token}"}
    async with httpx2.AsyncClient(timeout=30) as http:
        while True:
            answer = await http.get(f"{release.pods['router'].url}/metrics", headers=headers)
            families = {f.name: f.samples for f in text_string_to_metric_families(answer.text)}
            (waiting,) = families["baton_router_waiting_requests"]
            ready = {
                sample.labels["tier"]: sample.value
                for sample in families["baton_router_replicas"]
                if sample.labels["state"] == "ready"
            }
            by_replica = [
                len(families.get(f"baton_router_replica_{name}", ()))
                for name in ("backlog_seconds", "requests")
            ]
            is_counted = ready == {"decode": num_decode, "prefill": 0}
            is_counted = is_counted and by_replica == [num_decode] * 2
            if is_counted and waiting.value == num_waiting:
                return
            await asyncio.sleep(POLL_S)
