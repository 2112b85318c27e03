"""`--on ray` without Ray: what workers need, and what becomes of their actors."""

import asyncio
import signal
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.cli import main
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from worker.processes import ray_nodes
from worker.processes.ray_nodes import (
    RayNodes,
    RemoteProcess,
    ServerActor,
    engine_on_ray,
    worker_resources,
)
from worker.processes.spawn import ProcessSpec

ENGINE = EngineConfig(model="m", kv_connector="grpc://0.0.0.0")
SPEC = ProcessSpec("decode-0", "worker.decode", ("--seed", "1"))


class RayError(Exception):
    """What Ray raises when a call fails."""


class RayActorError(RayError):
    """What Ray raises when an actor or its node is lost."""


class ActorUnavailableError(RayActorError):
    """What Ray raises when the connection to an actor is lost."""


class FakeActor:
    """The handle of a `ServerActor`: `answers` has the result of each call, by method, or a list of
    results.
    """

    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    @property
    def call(self):
        return SimpleNamespace(remote=self._call)

    def options(self, **options):
        self.calls.append(("options", options))
        return self

    def remote(self):
        return self

    def _call(self, method, *arguments):
        self.calls.append((method, *arguments))
        answer = self.answers.get(method)
        return FakeResult(answer.pop(0) if isinstance(answer, list) else answer)


class FakeResult:
    """A reference to a result, which is an error or never comes if it is one or None."""

    def __init__(self, answer):
        self._future = Future()
        if isinstance(answer, Exception):
            self._future.set_exception(answer)
        elif answer is not None:
            self._future.set_result(answer)

    def future(self):
        return self._future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()


class FakeRay:
    """The module."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
    )

    def __init__(self, actor):
        self.actor, self.killed = actor, []
        self.kill_error = None

    def remote(self, _):
        return self.actor

    def kill(self, actor):
        self.killed.append(actor)
        if self.kill_error is not None:
            raise self.kill_error

    def cluster_resources(self):
        return {"CPU": 2.0}

    available_resources = cluster_resources


async def until(is_reached):
    for _ in range(1000):
        if is_reached():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it takes too long")


@pytest.fixture
def nodes_of(monkeypatch):
    """Makes `RayNodes` of a cluster whose actors answer as given, and the fake module."""

    def make(**answers):
        ray = FakeRay(FakeActor(**answers))
        monkeypatch.setattr(ray_nodes, "join_cluster", lambda: ray)
        return RayNodes(ENGINE), ray

    return make


async def test_a_worker_is_started_and_has_an_address(nodes_of):
    nodes, ray = nodes_of(start=("10.0.0.7:1234", 42))
    process = await nodes.spawn(SPEC)
    assert (process.address, process.pid) == ("10.0.0.7:1234", 42)
    (_, options), start = ray.actor.calls
    assert options["num_cpus"] == 1
    assert options["scheduling_strategy"] == "SPREAD"
    assert start == ("start", SPEC)


@pytest.mark.parametrize("answer", [None, RayError("the node died")])
async def test_a_worker_that_cannot_be_placed_is_an_error(nodes_of, monkeypatch, answer):
    monkeypatch.setattr(ray_nodes, "PLACING_S", 0.01)
    nodes, ray = nodes_of(start=answer)
    with pytest.raises(OSError, match=r"no room .* for decode-0: 1 CPU|the node died"):
        await nodes.spawn(SPEC)
    assert ray.killed == [ray.actor]


async def test_a_start_that_is_cancelled_leaves_no_actor(nodes_of):
    nodes, ray = nodes_of()
    starting = asyncio.create_task(nodes.spawn(SPEC))
    await until(lambda: len(ray.actor.calls) == 2)  # it waits for the actor
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ray.killed == [ray.actor]


async def test_an_actor_ends_once_its_process_is_closed():
    ray = FakeRay(FakeActor(read=b"", wait=3))
    process = RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42)
    assert await process.read(10) == b""
    assert await process.wait() == 3
    assert ray.killed == []
    process.close()
    assert ray.killed == [ray.actor]


async def test_a_lost_connection_to_an_actor_does_not_end_its_worker(monkeypatch):
    monkeypatch.setattr(ray_nodes, "_RETRY_S", 0.0)
    ray = FakeRay(FakeActor(wait=[ActorUnavailableError(), ActorUnavailableError(), 0]))
    process = RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42)
    assert await process.wait() == 0
    assert ray.actor.calls == [("wait",)] * 3


async def test_an_actor_is_read_by_one_call_at_a_time():
    actor = ServerActor()
    actor._process = SimpleNamespace(stdout=asyncio.StreamReader())
    lost, again = (asyncio.create_task(actor.read(10)) for _ in range(2))
    for chunk in (b"first", b"second"):
        await asyncio.sleep(0.01)
        actor._process.stdout.feed_data(chunk)
    assert await lost == b"first"
    assert await again == b"second"


async def test_a_read_that_fails_is_not_the_end_of_the_output():
    ray = FakeRay(FakeActor(read=RayError("a bug")))
    process = RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42)
    with pytest.raises(RayError, match="a bug"):
        await process.read(10)


async def test_a_signal_is_sent_again_if_the_connection_is_lost(monkeypatch):
    monkeypatch.setattr(ray_nodes, "_RETRY_S", 0.0)
    ray = FakeRay(FakeActor(send_signal=[ActorUnavailableError(), True]))
    process = RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42)
    process.terminate()
    await until(lambda: len(ray.actor.calls) == 2)
    assert ray.actor.calls == [("send_signal", signal.SIGTERM)] * 2


async def test_a_process_is_closed_although_ray_cannot_kill_its_actor():
    ray = FakeRay(FakeActor())
    ray.kill_error = RayError("the head is away")
    RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42).close()
    assert ray.killed == [ray.actor]


async def test_an_actor_that_comes_after_a_cancel_is_killed(nodes_of, monkeypatch):
    nodes, ray = nodes_of()
    begun, may_return = threading.Event(), threading.Event()

    def remote(actor):
        begun.set()
        assert may_return.wait(10)
        return actor

    monkeypatch.setattr(FakeActor, "remote", remote)
    starting = asyncio.create_task(nodes.spawn(SPEC))
    assert await asyncio.to_thread(begun.wait, 10)  # other tasks run in the meantime
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ray.killed == []
    may_return.set()
    await until(lambda: ray.killed == [ray.actor])


def test_a_numbered_gpu_is_refused():
    engine_on_ray(replace(ENGINE, device="cuda"))
    with pytest.raises(ConfigurationError, match="--device is cuda:1"):
        engine_on_ray(replace(ENGINE, device="cuda:1"))


async def test_a_process_on_a_node_that_is_lost_counts_as_killed():
    lost = RayActorError("the node died")
    ray = FakeRay(FakeActor(read=lost, wait=lost, send_signal=lost))
    process = RemoteProcess(ray, ray.actor, "10.0.0.7:1234", 42)
    process.terminate()
    assert await process.read(10) == b""
    assert await process.wait() == process.returncode == -9


def test_a_worker_needs_the_cores_of_all_its_processes():
    for flags, resources in (
        ({}, {"CPU": 1}),
        ({"num_threads": 4, "tensor_parallel_size": 2}, {"CPU": 8}),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, {"CPU": 1}),
        ({"device": "cuda"}, {"CPU": 1, "GPU": 1}),
    ):
        assert worker_resources(EngineConfig(model="m", **flags)) == resources


@pytest.mark.parametrize("url", ["shm://kv", "file:///kv"])
def test_a_store_of_one_machine_is_refused(url):
    with pytest.raises(ConfigurationError, match=r"with --on ray use grpc://0\.0\.0\.0"):
        engine_on_ray(replace(ENGINE, kv_connector=url))


@pytest.mark.parametrize("given", [None, "redis://host:1/0"])
def test_peers_are_the_default_connector(given):
    engine = engine_on_ray(replace(ENGINE, kv_connector=given))
    assert engine.kv_connector == (given or "grpc://0.0.0.0")


def test_without_ray_the_command_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--on", "ray", "--port", "0", "--grpc-port", "0"]) == 2
    assert "pip install 'baton-llm[ray]'" in capsys.readouterr().err
