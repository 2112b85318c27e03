"""Joins a Ray cluster and reserves room in it. Outside of actors, Ray is imported here alone."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from baton.common.errors import ConfigurationError

__all__ = [
    "ADDRESS_VARIABLE",
    "PLACING_S",
    "AsyncActor",
    "BlockingActor",
    "actor_class",
    "actor_options",
    "cluster_address",
    "described",
    "in_bundle",
    "join_cluster",
    "lack_of_room",
    "reserve",
]

PLACING_S = 300.0
"""How long the cluster may take to have room: an autoscaler may add nodes."""
_ACTOR_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Variables of an actor's process, which are read when torch is imported. Ray shows them."""
ADDRESS_VARIABLE = "RAY_ADDRESS"
_USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"
_ANSWER_S = 10.0

_logger = logging.getLogger("baton.ray")


def join_cluster() -> Any:
    """Connects this process to a Ray cluster; returns the module `ray`.

    The cluster is that of the variable RAY_ADDRESS, else the one that runs on this machine, else a
    new one of this machine alone, which ends with this process and reports nothing to Ray's makers.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError:
        raise ConfigurationError("Ray is not installed: pip install 'baton-llm[ray]'") from None
    if ray.is_initialized():  # by the program that uses Baton
        return ray
    _check_address(os.environ.get(ADDRESS_VARIABLE, ""))
    os.environ.setdefault(_USAGE_REPORTS, "0")
    handler = signal.getsignal(signal.SIGTERM)
    # Ray warns that it sets no signal handler in other threads; none is wanted.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the Ray cluster cannot be joined: {error}") from error
    finally:
        # In the main thread Ray has set a handler that would end this process without a drain.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return ray


def cluster_address() -> str:
    """Returns the address of the cluster that `join_cluster` joins.

    This process stays connected only to a cluster that it began, which ends with it: Ray ends a
    connected process once the cluster's head has been away for a minute.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = join_cluster()
    address: str = ray.get_runtime_context().gcs_address
    if not ray._private.worker._global_node.is_head():  # nothing public tells who began it
        ray.shutdown()
    return address


def _check_address(address: str) -> None:
    """Refuses an address where nothing listens, for which Ray would wait a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():  # a word such as auto, which Ray understands
        return
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"{ADDRESS_VARIABLE} is {address}: {error.strerror or error}"
        ) from error


def reserve(
    ray: Any, bundles: Sequence[Mapping[str, float]], purpose: str, timeout_s: float = PLACING_S
) -> tuple[Any, Sequence[str]]:
    """Reserves room on as few nodes as possible.

    Args:
        ray: of `join_cluster`.
        bundles: the resources of each actor.
        purpose: what needs the room, for errors and the log.
        timeout_s: how long to wait for it.

    Returns:
        The placement group, and the id of each bundle's node.

    Raises:
        ConfigurationError: the cluster had no room in time; names what was asked for.
    """
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )

    resources = f"{purpose}: {' + '.join(map(described, bundles))}"
    _logger.info("asks the Ray cluster for room for %s", resources)
    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise ConfigurationError(lack_of_room(ray, resources, timeout_s))
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return group, [nodes[index] for index in range(len(bundles))]


def in_bundle(group: Any, index: int) -> Any:
    """Returns the scheduling strategy of an actor that takes a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, index)


class _Actor:
    """An object of one of Baton's classes, in the process of an actor.

    Ray imports the class of an actor by its module. This one is in `baton`, which no other package
    on the node can shadow, and whose import lets Python find Baton's packages first. Nodes need
    Baton's packages.

    Attributes:
        wrapped: the class, as `module.name`.
    """

    wrapped = ""

    def __init__(self) -> None:
        module, _, name = self.wrapped.rpartition(".")
        self._object = getattr(import_module(module), name)()


class BlockingActor(_Actor):
    """An actor whose calls run one after another, in the main thread of its process."""

    def call(self, method: str, *arguments: object) -> Any:
        """Calls a method of the object."""
        return getattr(self._object, method)(*arguments)


class AsyncActor(_Actor):
    """An actor whose calls run in an event loop, many at a time."""

    async def call(self, method: str, *arguments: object) -> Any:
        """Awaits a method of the object."""
        return await getattr(self._object, method)(*arguments)


def actor_class(ray: Any, wrapped: type, kind: type[_Actor]) -> Any:
    """Returns a class of actors for Ray, which shows the name of the wrapped class.

    Args:
        ray: of `join_cluster`.
        wrapped: a class whose constructor takes no argument; may be of any of Baton's modules.
        kind: `BlockingActor` or `AsyncActor`; has the actor's only method, `call`.
    """
    path = f"{wrapped.__module__}.{wrapped.__qualname__}"
    return ray.remote(type(wrapped.__name__, (kind,), {"wrapped": path, "__module__": __name__}))


def actor_options(resources: Mapping[str, float], strategy: Any) -> dict[str, Any]:
    """Returns the options of an actor.

    Args:
        resources: what it needs.
        strategy: where it may run.
    """
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": _ACTOR_VARIABLES},
    }


def lack_of_room(ray: Any, resources: str, timeout_s: float) -> str:
    """Returns the message of an error: what was asked for, and what the cluster has."""
    return (
        f"the Ray cluster had no room within {timeout_s:g} s for {resources}; it has "
        f"{described(ray.cluster_resources())}, free {described(ray.available_resources())}"
    )


def described(resources: Mapping[str, float]) -> str:
    """Returns CPUs and GPUs as text."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
