"""Ranks of one machine as processes: rank 0 starts the others, and ends when one of them ends.

    rank 0       EngineCore -> ModelRunner, which sends each batch
    rank 1 ...   engine.runtime.ranks: ModelRunner, which computes what it receives

They share memory that has no name, so nothing is left of it when they have ended.
"""

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import MappingProxyType

from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.ranks.hosts import HostRanks, check_gpus
from engine.runtime.ranks.nccl import open_group
from engine.runtime.ranks.pipeline import PipelineLinks, PipelineRanks
from engine.runtime.ranks.place import place_of
from engine.runtime.ranks.ray_ranks import RayRanks
from engine.runtime.ranks.started_ranks import RankChildren, StartedRanks
from kernels.library.commands import library
from kernels.native.ranks import MAX_RANKS, SharedMemoryRanks
from kernels.ranks import EngineRanks, RankGroup
from kvstore.registry import PEERS, connector_capabilities, known_stores
from kvstore.url import scheme_of

__all__ = ["RankProcesses", "RankTask", "start_ranks"]


@dataclass(frozen=True, slots=True)
class RankTask:
    """The arguments of a rank's process.

    Attributes:
        config: of the engine.
        rank: number of the rank.
        file: descriptor of the memory that the ranks of its stage share; None if there is no other.
        steps: descriptor of a connection to rank 0; None if the memory has what it sends.
        before: descriptor of a connection to the stage before.
        after: descriptor of a connection to the stage after.
        security: for the connector's calls to other processes.
    """

    config: EngineConfig
    rank: int
    security: ClusterSecurity | None
    file: int | None = None
    steps: int | None = None
    before: int | None = None
    after: int | None = None

    @property
    def files(self) -> tuple[int, ...]:
        """The descriptors."""
        files = self.file, self.steps, self.before, self.after
        return tuple(file for file in files if file is not None)

    def open_ranks(self, steps: Mapping[int, int] = MappingProxyType({})) -> EngineRanks:
        """Opens the rank's access to the others; the descriptors may be closed afterwards.

        Args:
            steps: rank 0's connections to the others by rank, as `steps`.

        Raises:
            ConfigurationError: there is no such device, or no NCCL.
            MemoryError: the system refuses the memory.
            RanksLostError: rank 0 is lost.
        """
        config, size = self.config, self.config.num_ranks
        to_others = steps if self.rank == 0 else {0: self.steps}
        links = {rank: _link(file) for rank, file in to_others.items() if file is not None}
        if resolve_device(config.device, self.rank).type == "cpu":
            group = self._open_memory()
        else:
            group = open_group(config, self.rank, size, self.rank, links)
        if config.pipeline_parallel_size == 1:
            assert group is not None, "the rank has others"
            return group
        neighbours = PipelineLinks(
            links,
            before=None if self.before is None else _link(self.before),
            after=None if self.after is None else _link(self.after),
        )
        return PipelineRanks(self.rank, config, group, neighbours, size, self.rank)

    def _open_memory(self) -> RankGroup | None:
        if self.file is None:
            return None
        native, size = library(), self.config.tensor_parallel_size
        assert native is not None, "rank 0 has checked it"
        group = SharedMemoryRanks(native, self.file, self.rank % size, size)
        group.num_local = self.config.num_ranks
        return group


def _link(file: int) -> Connection:
    return Connection(os.dup(file))


def start_ranks(
    config: EngineConfig, security: ClusterSecurity | None = None
) -> "RankProcesses | HostRanks | None":
    """Starts the other ranks of an engine, or meets them; returns None if it has one rank.

    Raises:
        ConfigurationError: the machine cannot have several ranks; names the flag.
    """
    if config.num_ranks == 1:
        return None
    if config.kv_connector is not None:
        _check_connector(config.kv_connector, config.num_ranks)
    if config.distributed_executor_backend == "ray":
        return RayRanks(config, security)
    place = place_of(config)
    if place is None:
        return RankProcesses(config, security)
    if place.rank > 0:
        raise ConfigurationError(
            f"this is rank {place.rank}, which schedules nothing: `baton prefill` and "
            "`baton decode` run such ranks"
        )
    return HostRanks(place, config, security)


class RankProcesses(StartedRanks):
    """Rank 0 of an engine whose other ranks are processes that it has started.

    A process that ends before `close` aborts the ranks.

    Args:
        config: of the engine.
        security: for the connector's calls to other processes.

    Raises:
        ConfigurationError: the machine cannot have several ranks; names the flag.
    """

    def __init__(self, config: EngineConfig, security: ClusterSecurity | None) -> None:
        _check_machine(config)
        self._is_closing = False
        self._on_lost: Callable[[], None] = lambda: None
        self._children = RankChildren(self._on_child_end)
        self.transfers = self._children.links
        with ExitStack() as files:
            first, others, steps = _tasks(config, security, files)
            super().__init__(first.open_ranks(steps), 0, config.num_ranks)
            try:
                for task in others:
                    self._children.start(task.rank, task, task.files)
            except BaseException:
                self.close()
                raise

    @override
    def watch(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        if self._children.has_ended:
            on_lost()

    @override
    def abort(self) -> None:
        """Ends the other processes too: one that is frozen would stay."""
        if self._is_closing:
            return
        self._children.kill()
        self._opened.abort()

    @override
    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._children.close()
        self._opened.close()

    def _on_child_end(self) -> None:
        self._on_lost()  # first, as NCCL may take seconds to abort
        self.abort()


def _check_machine(config: EngineConfig) -> None:
    """Refuses machines that cannot have several ranks.

    Raises:
        ConfigurationError: names the flag.
    """
    size = config.num_ranks
    if resolve_device(config.device, 0).type == "cuda":
        check_gpus(size)
        return
    if library() is None or not hasattr(os, "memfd_create"):  # which only Linux has
        raise ConfigurationError(
            f"--tensor-parallel-size times --pipeline-parallel-size is {size}; several ranks need "
            "Linux and the native kernels: see `baton doctor`"
        )
    if size > MAX_RANKS:
        raise ConfigurationError(
            f"--tensor-parallel-size times --pipeline-parallel-size is {size}; at most {MAX_RANKS}"
        )


def _tasks(
    config: EngineConfig, security: ClusterSecurity | None, opened: ExitStack
) -> tuple[RankTask, list[RankTask], Mapping[int, int]]:
    """Opens what the ranks share.

    Args:
        config: of the engine.
        security: for the connectors' calls to other processes.
        opened: closes this process's descriptors of it.

    Returns:
        The tasks of rank 0 and of the others in their order, and rank 0's connections for steps.
    """
    size, width = config.num_ranks, config.tensor_parallel_size
    tasks = [RankTask(config, rank, security) for rank in range(size)]
    is_on_cpu = resolve_device(config.device).type == "cpu"
    if width > 1 and is_on_cpu:
        for first in range(0, size, width):
            file = os.memfd_create("baton-ranks")
            opened.callback(os.close, file)
            for rank in range(first, first + width):
                tasks[rank] = replace(tasks[rank], file=file)
    steps = {}
    if config.pipeline_parallel_size > 1 or not is_on_cpu:
        for rank in range(1, size):
            steps[rank], theirs = _socket_pair(opened)
            tasks[rank] = replace(tasks[rank], steps=theirs)
    if config.pipeline_parallel_size > 1:
        for rank in range(size - width):
            after, before = _socket_pair(opened)
            tasks[rank] = replace(tasks[rank], before=before)
            tasks[rank + width] = replace(tasks[rank + width], after=after)
    return tasks[0], tasks[1:], steps


def _socket_pair(opened: ExitStack) -> tuple[int, int]:
    pair = [opened.enter_context(end) for end in socket.socketpair()]
    return pair[0].fileno(), pair[1].fileno()


def _check_connector(url: str, size: int) -> None:
    """Refuses connectors that several ranks cannot use.

    Raises:
        ConfigurationError: names the flags.
    """
    is_known = scheme_of(url) in known_stores() | PEERS
    if not (is_known and connector_capabilities(url).shared_between_processes):
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}; --kv-connector {scheme_of(url)}:// works with "
            "1 only; use shm://NAME, file:///path, redis://host:port/db, grpc:// or nixl://"
        )
