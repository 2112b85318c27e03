"""Every way in which a client leaves a call, at every moment: its status is the client's doing, the
log has one line of it, and router and workers are as before.
"""

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio
from prometheus_client import generate_latest

from baton.v1 import generation_pb2
from engine.batch import ScheduledBatch, StepOutput
from router.config.http import HttpConfig
from router.config.served_model import ServedModelConfig
from tests.support.cluster import get_load
from tests.support.raw_grpc import RawConnection
from tests.support.running_router import RunningRouter, request
from tests.support.tiers_here import WorkerHere, running_tiers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

GENERATE = "/baton.v1.GenerationService/Generate"
STREAM = "/baton.v1.GenerationService/GenerateStream"
SEND_TIMEOUT_S = 2.0
"""Other ways of leaving take milliseconds, also on a busy machine."""
STEP_S = 0.01
"""Steps of the decode engine take so long more: a request shall not end before its client has left,
however fast the tiny model is and however late a busy machine lets the client leave.
"""
GAUGES = ("baton_router_running_requests", "baton_router_waiting_requests")
KILLED_CLIENT = """
import sys, grpc
from baton.v1 import generation_pb2, generation_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    message = generation_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
    print(next(stub.GenerateStream(message)).index, flush=True)
    sys.stdin.read()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningRouter]:
    """A router of two models, the second of which has no worker."""
    async with running_tiers(
        tmp_path_factory.mktemp("kv"),
        *("prefill", "decode"),
        http=HttpConfig(port=None, send_timeout_s=SEND_TIMEOUT_S),
        more_models=(ServedModelConfig(model="absent", decode=("127.0.0.1:1",)),),
    ) as running:
        slow_down(running.workers[-1])
        yield running


def slow_down(worker: WorkerHere) -> None:
    """Lets each step of a worker take `STEP_S` more."""
    runner = worker.engine._core._runner
    execute = runner._execute

    def execute_slowly(batch: ScheduledBatch) -> StepOutput:
        time.sleep(STEP_S)
        return execute(batch)

    runner._execute = execute_slowly


@dataclass(frozen=True)
class Moment:
    """A moment of a call.

    Attributes:
        model: the served model.
        window: bytes that the client takes; a few make the router wait to write.
        has_begun: whether the call is there.
    """

    model: str
    window: int
    has_begun: Callable[[RunningRouter, RawConnection], object]


def gauges(router: RunningRouter) -> dict[str, float]:
    """The router's gauges of requests, by series."""
    lines = generate_latest(router.service.metrics).decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(GAUGES))
    return {name: float(value) for name, _, value in samples}


def runs(router: RunningRouter, connection: RawConnection) -> bool:
    return gauges(router)["baton_router_running_requests"] == 1


def waits(router: RunningRouter, connection: RawConnection) -> bool:
    return gauges(router)['baton_router_waiting_requests{model="absent"}'] == 1


def streams(router: RunningRouter, connection: RawConnection) -> object:
    return connection.headers


MOMENTS = {
    "waits": Moment("absent", 65535, waits),
    "streams": Moment("tiny", 2**20, streams),
    "unread": Moment("tiny", 1, streams),
}
WAYS: dict[str, tuple[Callable[[RawConnection, int], None], str]] = {
    "cancels": (RawConnection.cancel, "CANCELLED"),
    "vanishes": (lambda connection, _: connection.vanish(), "CANCELLED"),
    "half_closes": (lambda connection, _: connection.half_close(), "CANCELLED"),
    "deadline": (lambda connection, _: None, "DEADLINE_EXCEEDED"),
    "stops_reading": (lambda connection, _: None, "DEADLINE_EXCEEDED"),
}
CASES = [
    (method, moment, way)
    for method in (GENERATE, STREAM)
    for moment in MOMENTS
    for way in WAYS
    # A client stops to read where there is something to read.
    if (moment == "unread" or way != "stops_reading") and (method, moment) != (GENERATE, "unread")
]


def message_to(model: str) -> generation_pb2.GenerateRequest:
    """A request that runs for as long as the tiny model can."""
    message = request(range(5, 45), max_tokens=200, ignore_eos=True)
    message.model, message.sampling.n = model, 3
    message.sampling.temperature = 1
    return message


async def until(condition: Callable[[], object]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in 20 s")


async def until_idle(router: RunningRouter) -> None:
    """Waits until all gauges of the router and the workers are what they were at the start."""
    await until(lambda: not any(gauges(router).values()))
    async with asyncio.timeout(60):
        for address in (*router.model.config.prefill, *router.model.config.decode):
            while True:
                load = await get_load(address)
                is_free = load.num_free_blocks == load.num_blocks
                if is_free and load.num_running == load.num_waiting == 0:
                    break
                await asyncio.sleep(0.005)


async def log_of(
    caplog: pytest.LogCaptureFixture, router: RunningRouter, leave: Awaitable[None]
) -> str:
    """The status in the one line of the call that a client leaves."""
    caplog.set_level(logging.INFO)
    caplog.clear()

    def lines() -> list[str]:
        return [line for line in caplog.messages if line.startswith("call method=/baton.v1.Gen")]

    await leave
    await until(lines)
    await until_idle(router)
    (line,) = lines()
    # The router says of its second model now and then that it has no worker.
    others = [record for record in caplog.records if record.name != "baton.router"]
    assert not [record for record in others if record.levelno > logging.INFO]
    return line.partition("code=")[2].split()[0]


@pytest.mark.parametrize(("method", "moment", "way"), CASES)
async def test_a_client_that_leaves(router, caplog, method, moment, way):
    begun, (leave, status) = MOMENTS[moment], WAYS[way]
    # A whole answer has no headers before its end.
    has_begun = runs if (method, moment) == (GENERATE, "streams") else begun.has_begun
    timeout = "50m" if way == "deadline" else None

    async with RawConnection.open(router.server.port, begun.window) as connection:

        async def call_and_leave() -> None:
            stream = connection.call(method, message_to(begun.model), timeout=timeout)
            if timeout is None:
                await until(lambda: has_begun(router, connection))
            leave(connection, stream)

        assert await log_of(caplog, router, call_and_leave()) == status


async def test_a_whole_answer_that_is_not_read(router, caplog):
    async with RawConnection.open(router.server.port, 1) as connection:

        async def call() -> None:
            connection.call(GENERATE, message_to("tiny"))

        assert await log_of(caplog, router, call()) == "DEADLINE_EXCEEDED"
        connection.read_on(1)  # the client learns of it once it reads
        await until(lambda: any(b"--send-timeout-s" in block for block in connection.headers))


async def test_a_client_that_is_killed(router, caplog):
    message = message_to("tiny").SerializeToString().hex()

    async def kill() -> None:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED_CLIENT, router.server.address, message),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        assert await client.stdout.readline()
        client.kill()
        await client.wait()

    assert await log_of(caplog, router, kill()) == "CANCELLED"
