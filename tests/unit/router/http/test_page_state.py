"""What the page shows of a router: how often it looks, how much, and none of its secrets."""

import asyncio
import json

import pytest

from baton.common.errors import UnauthenticatedError
from baton.v1 import cluster_pb2
from router.config.http import HttpConfig
from router.config.router import RouterConfig
from router.config.security import RouterSecurityConfig
from router.config.served_model import ServedModelConfig
from router.config.tenants import TenantsConfig
from router.http.page import state
from router.http.page.state import PageState
from rpc.server_config import ServerConfig
from rpc.tracing import TracingConfig

KEY = "the-key-of-a-client"


class Operators:
    """A router's description, which counts how often it is asked."""

    def __init__(self, *replicas: cluster_pb2.ReplicaStatus) -> None:
        self.replicas = replicas
        self.num_looks = 0
        self.asked: list[cluster_pb2.GetTraceRequest] = []

    async def GetCluster(self, request, context):
        self.num_looks += 1
        await asyncio.sleep(0)
        return cluster_pb2.GetClusterResponse(replicas=self.replicas)

    async def GetTrace(self, request, context):
        self.asked.append(request)
        stages = [cluster_pb2.TraceStage(name="rpc")] * 500
        return cluster_pb2.GetTraceResponse(
            traces=[cluster_pb2.RequestTrace(request_id="r", stages=stages)]
        )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def config_of(**parts) -> RouterConfig:
    model = ServedModelConfig(model="demo", decode=("10.0.0.1:1",))
    return RouterConfig(grpc=ServerConfig(), http=HttpConfig(), models=(model,), **parts)


def page_state(operators=None, clock=None, config=None, check=lambda *asked: None) -> PageState:
    clock = clock or Clock()
    return PageState(operators or Operators(), (), config or config_of(), check, clock)


async def read(shown: PageState) -> dict:
    return json.loads(await shown.read(None, ""))


async def test_readers_share_a_look_and_nothing_is_asked_between_them():
    operators, clock = Operators(), Clock()
    shown = page_state(operators, clock)
    assert operators.num_looks == 0
    await asyncio.gather(*(read(shown) for _ in range(10)))
    assert operators.num_looks == 1
    clock.now += (await read(shown))["interval_s"]
    await read(shown)
    assert operators.num_looks == 2


async def test_many_replicas_are_asked_less_often_and_bad_ones_are_shown_first():
    lost = cluster_pb2.REPLICA_STATE_LOST
    replicas = [cluster_pb2.ReplicaStatus(address=str(number)) for number in range(1000)]
    replicas[900].state = lost
    answer = await read(page_state(Operators(*replicas)))
    shown = [replica["address"] for replica in answer["cluster"]["replicas"]]
    assert shown == [str(number) for number in range(state._MAX_REPLICAS - 1)] + ["900"]
    assert answer["num_hidden_replicas"] == 1000 - state._MAX_REPLICAS
    assert answer["interval_s"] >= 10


async def test_a_look_at_many_replicas_leaves_the_event_loop_to_others_in_between():
    num_turns = 0

    async def take_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    replicas = [cluster_pb2.ReplicaStatus(address=str(number)) for number in range(100)]
    answer = await read(page_state(Operators(*replicas)))
    others.cancel()
    assert num_turns >= len(answer["cluster"]["replicas"]) == len(replicas)


async def test_records_are_the_latest_and_the_slowest_and_bounded():
    operators = Operators()
    answer = await read(page_state(operators))
    assert [request.slowest for request in operators.asked] == [False, True]
    for name in ("recent", "slowest"):
        assert len(answer[name][0]["stages"]) == state._MAX_STAGES


async def test_nothing_is_read_without_the_right_credential():
    def check(header, asked_host):
        raise UnauthenticatedError("no")

    operators = Operators()
    with pytest.raises(UnauthenticatedError):
        await page_state(operators, check=check).read("Bearer wrong", "")
    assert operators.num_looks == 0


async def test_flags_are_shown_without_secrets():
    config = config_of(
        security=RouterSecurityConfig(tenants=TenantsConfig(api_key=(KEY,), tenants="/etc/a-path")),
        queue_timeout_s=7.0,
        tracing=TracingConfig(otlp_traces_endpoint="http://user:secret@collector:4317"),
    )
    text = (await page_state(config=config).read(None, "")).decode()
    flags = json.loads(text)["configuration"]["router"]
    assert "--queue-timeout-s 7.0" in flags
    assert "--tenants ..." in flags
    secrets = KEY, "secret", "a-path", *config.security.tenants.api_key
    assert not any(secret in text for secret in secrets)
