"""Starts workers on the nodes of a Ray cluster.

    the process that places them    SupervisedProcess -> RayNodes, RemoteProcess
    a node                          ServerActor -> the worker, which ends with its actor

An actor starts one process. Restarts get a new actor, on any node that has room. Ray ends actors
whose driver has ended.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.module_process import end_with_parent
from baton.common.ray_cluster import (
    ADDRESS_VARIABLE,
    PLACING_S,
    AsyncActor,
    actor_class,
    actor_options,
    described,
    join_cluster,
    lack_of_room,
)
from engine.config import EngineConfig
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities
from worker.processes.ports import free_port
from worker.processes.spawn import ProcessSpec, spawn_here

__all__ = [
    "RayNodes",
    "RemoteProcess",
    "ServerActor",
    "engine_on_ray",
    "worker_resources",
]

_PEERS_OF_MACHINES = "grpc://0.0.0.0"
"""The connector of workers on several machines: it needs no server."""
_LOST = -signal.SIGKILL
_RETRY_S = 0.5


class ServerActor:
    """Starts one process on its node, in an actor."""

    def __init__(self) -> None:
        self._reading = asyncio.Lock()

    async def start(self, spec: ProcessSpec) -> tuple[str, int]:
        """Starts the process on a free port.

        Returns:
            Its address, and its process id.
        """
        import ray

        end_with_parent()  # Ray's process for the node, whose actors would outlive it
        # A worker whose ranks are actors joins this cluster, too.
        os.environ[ADDRESS_VARIABLE] = ray.get_runtime_context().gcs_address
        if not ray.get_gpu_ids():  # then Ray hides no GPU, not even those that others reserved
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        host = ray.util.get_node_ip_address()
        port = free_port(host)
        arguments = ("--host", host, "--port", str(port), *spec.arguments)
        self._process = await spawn_here(replace(spec, arguments=arguments))
        return f"{host}:{port}", self._process.pid

    async def read(self, num_bytes: int) -> bytes:
        """Returns output of the process; nothing at its end."""
        # A call whose connection was lost still waits here when its caller tries again.
        async with self._reading:
            return await self._process.stdout.read(num_bytes)

    async def wait(self) -> int:
        """Returns how the process ended, when it has."""
        return await self._process.wait()

    async def send_signal(self, number: int) -> None:
        """Sends the process a signal."""
        self._process.send_signal(number)


class RemoteProcess:
    """A process of a `ServerActor`, with the methods that `SupervisedProcess` calls.

    Args:
        ray: the module.
        actor: the actor's handle.
        address: `host:port` of the server.
        pid: of the process, on its node.

    Attributes:
        returncode: how the process ended; None before.
        stdout: this object.
    """

    def __init__(self, ray: Any, actor: Any, address: str, pid: int) -> None:
        self._ray, self._actor, self.address, self.pid = ray, actor, address, pid
        self.returncode: int | None = None
        self.stdout = self

    async def read(self, num_bytes: int) -> bytes:
        """Returns output of the process; nothing at its end, or if its node is lost."""
        try:
            return bytes(await self._call(lambda: self._actor.call.remote("read", num_bytes)))
        except self._ray.exceptions.RayActorError:
            return b""

    async def wait(self) -> int:
        """Returns how the process ended, as if killed if its node is lost."""
        try:
            self.returncode = int(await self._call(lambda: self._actor.call.remote("wait")))
        except self._ray.exceptions.RayError:
            self.returncode = _LOST
        return self.returncode

    def describe_end(self) -> str:
        """Returns how it ended, for a log."""
        return f"ended with status {self.returncode}"

    def terminate(self) -> None:
        """Sends SIGTERM, perhaps twice: workers ignore the second one."""
        self._terminating = asyncio.create_task(self._terminate())

    def kill(self) -> None:
        """Kills the process by killing its actor."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)

    def close(self) -> None:
        """Gives the actor's room back."""
        self.kill()

    async def _terminate(self) -> None:
        with suppress(self._ray.exceptions.RayError):  # then the process has ended
            await self._call(lambda: self._actor.call.remote("send_signal", signal.SIGTERM))

    async def _call(self, start: Callable[[], Any]) -> Any:
        """Calls the actor, again if only the connection to it was lost.

        Raises:
            RayError: the actor or its node is lost.
        """
        while True:
            try:
                return await start()
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(_RETRY_S)


class RayNodes:
    """The nodes of a Ray cluster, which this process joins.

    Args:
        engine: config of the workers that are to run there.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._resources = worker_resources(engine)
        self._ray = join_cluster()

    async def spawn(self, spec: ProcessSpec) -> RemoteProcess:
        """Starts a worker on a node that has room; its flags must leave its address out.

        Raises:
            OSError: no node had room in time, or the node could not start it.
        """
        try:
            actor = await self._create_actor()
            try:
                return await self._start(spec, actor)
            except BaseException:
                self._ray.kill(actor)
                raise
        except self._ray.exceptions.RayError as error:
            raise OSError(str(error)) from error

    async def _create_actor(self) -> Any:
        """Creates an actor in a thread: while Ray's head is away, the call does not return."""
        options = actor_options(self._resources, "SPREAD")
        factory = actor_class(self._ray, ServerActor, AsyncActor).options(**options)
        creating = asyncio.create_task(asyncio.to_thread(factory.remote))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            creating.add_done_callback(self._kill_created)
            raise

    def _kill_created(self, creating: "asyncio.Task[Any]") -> None:
        if not creating.cancelled() and creating.exception() is None:
            self._ray.kill(creating.result())

    async def _start(self, spec: ProcessSpec, actor: Any) -> RemoteProcess:
        # As an argument of a call, the token in it does not appear in Ray's dashboard.
        starting = asyncio.wrap_future(actor.call.remote("start", spec).future())
        try:
            await asyncio.wait({starting}, timeout=PLACING_S)
        finally:
            starting.cancel()  # changes nothing if it is done
        if starting.cancelled():
            purpose = f"{spec.name}: {described(self._resources)}"
            raise OSError(await asyncio.to_thread(lack_of_room, self._ray, purpose, PLACING_S))
        address, pid = starting.result()
        return RemoteProcess(self._ray, actor, address, pid)


def engine_on_ray(engine: EngineConfig) -> EngineConfig:
    """Returns the config of a worker that Ray places, with its default connector.

    Refuses a connector of one machine, as Ray may place the workers on several, and a certain GPU:
    Ray assigns one, which is then the only one that its worker sees.

    Raises:
        ConfigurationError: names the flag.
    """
    url = engine.kv_connector or _PEERS_OF_MACHINES
    if not connector_capabilities(url).shared_between_hosts:
        raise ConfigurationError(
            f"--kv-connector {connector_name(url)}:// reaches the processes of one machine; with "
            "--on ray use grpc://0.0.0.0, nixl://0.0.0.0 or redis://host:port/db"
        )
    if engine.device.startswith("cuda:"):
        raise ConfigurationError(
            f"--device is {engine.device}; with --on ray use cuda, cpu or auto (cpu)"
        )
    return replace(engine, kv_connector=url)


def worker_resources(engine: EngineConfig) -> Mapping[str, float]:
    """Returns the resources of a worker on its node: the cores of its threads, or a GPU.

    Ranks that are actors reserve their own room.
    """
    if engine.device.startswith("cuda"):
        return {"CPU": 1, "GPU": 1}
    has_processes = engine.distributed_executor_backend == "mp"
    num_ranks = engine.num_ranks if has_processes else 1
    return {"CPU": (engine.num_threads or 1) * num_ranks}
