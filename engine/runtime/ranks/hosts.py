"""`HostRanks`: ranks whose processes are started apart, on one or several hosts.

launcher   starts each process: torchrun, LeaderWorkerSet, Ray
--nnodes   the command on a machine is its first rank, and starts its others as children
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import torch
from typing_extensions import override

from baton.errors import ConfigurationError
from baton.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.ranks.children import RankChildren
from engine.runtime.ranks.gloo import GlooRanks
from engine.runtime.ranks.meeting import END, Meeting, shut_down
from engine.runtime.ranks.nccl import NcclRanks, load_nccl
from engine.runtime.ranks.pipeline import PipelineLinks, PipelineRanks
from engine.runtime.ranks.place import RankPlace
from engine.runtime.ranks.started import StartedRanks
from kernels.ranks import EngineRanks, RankGroup, RanksLostError

__all__ = ["HostRanks", "HostTask", "check_device", "check_gpus"]


@dataclass(frozen=True, slots=True)
class HostTask:
    """What the process of a rank needs to meet the others.

    Attributes:
        place: of the rank.
        config: of the engine.
        security: its token is proved by all ranks; also for the connector's calls.
    """

    place: RankPlace
    config: EngineConfig
    security: ClusterSecurity | None

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return self.place.rank


class HostRanks(StartedRanks):
    """A rank of an engine whose processes are started apart. The first one of a machine may start
    the others there.

    Args:
        place: this process's place.
        config: of the engine.
        security: its token is proved by all ranks.

    Raises:
        ConfigurationError: the ranks did not meet, there is no token, or the machine lacks GPUs.
    """

    def __init__(
        self, place: RankPlace, config: EngineConfig, security: ClusterSecurity | None
    ) -> None:
        check_device(config)
        self._has_started = False
        self._is_closing = False
        self._is_lost = False
        self._on_lost: Callable[[], None] = lambda: None
        key, num_stages = _key_of(place, security), config.pipeline_parallel_size
        is_on_cpu = resolve_device(config.device).type == "cpu"
        if place.starts_others and not is_on_cpu:
            check_gpus(place.num_local)
        self._met = Meeting(place, num_stages, key, self._check_others, has_gloo=is_on_cpu)
        self._children = RankChildren()
        try:
            for other in place.places_to_start():
                self._children.start(other.rank, HostTask(other, config, security))
            self._meet()
        except BaseException:
            self._children.kill()
            self._children.close()
            raise
        self.transfers = self._met.transfers
        super().__init__(_opened(self._met, config), place.rank, place.size)
        self._watchers = [
            threading.Thread(target=self._watch, args=(link,), daemon=True)
            for link in (self._met.steps.values() if self.rank == 0 else ())
        ]
        for watcher in self._watchers:
            watcher.start()

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._has_started = True
        super().limit_waits(timeout_s)

    @override
    def abort(self) -> None:
        """Ends the connections, which the other ranks notice; sums fail when the process ends."""
        if not self._is_closing:
            self._is_lost = True
            self._shut_down()

    @override
    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self.rank == 0 and self._has_started and not self._is_lost:
            with suppress(RanksLostError):
                self.send(END)
        self._shut_down()
        for watcher in self._watchers:
            watcher.join()
        self._opened.close()
        self._met.close()
        self._children.close()

    @override
    def watch(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        if self._is_lost:
            on_lost()

    def _meet(self) -> None:
        place = self._met.place
        try:
            self._met.meet()
        except (OSError, EOFError, RuntimeError, AuthenticationError) as error:
            raise ConfigurationError(
                f"rank {place.rank} of {place.size} did not meet the others at "
                f"{place.address}:{place.port}: {error}"
            ) from error

    def _check_others(self) -> None:
        """Called while this rank waits for others; raises if they will not come."""
        if self._children.has_ended:
            raise ConfigurationError("a rank that this process has started did not meet the others")

    def _shut_down(self) -> None:
        self._opened.abort()
        for link in self.transfers:
            shut_down(link)

    def _watch(self, link: Connection) -> None:
        """Waits until a rank has ended: the others send nothing by this connection."""
        with suppress(OSError, EOFError):
            link.recv_bytes()
        if not self._is_closing:
            self.abort()
            self._on_lost()


def _opened(met: Meeting, config: EngineConfig) -> EngineRanks:
    """Returns the access to the other ranks through the connections of a meeting."""
    place, width = met.place, config.tensor_parallel_size
    is_staged = met.num_stages > 1
    group: RankGroup | None = None
    if width > 1:
        steps = () if is_staged else list(met.steps.values())
        rank = place.rank % width
        if met.has_gloo:
            group = GlooRanks(rank, width, place.num_local, met.gloo, steps)
        else:
            device = resolve_device(config.device, place.local_rank)
            sizes = width, place.num_local, place.local_rank
            group = NcclRanks(rank, *sizes, device, steps, load_nccl())
    if not is_staged:
        assert group is not None, "one rank meets no others"
        return group
    links = PipelineLinks(met.steps, met.before, met.after)
    return PipelineRanks(place.rank, config, group, links, place.num_local)


def check_device(config: EngineConfig) -> None:
    """Refuses devices on which several ranks cannot compute.

    Raises:
        ConfigurationError: names the flags.
    """
    if config.pipeline_parallel_size > 1 and resolve_device(config.device).type != "cpu":
        raise ConfigurationError(
            f"--pipeline-parallel-size is {config.pipeline_parallel_size}; several stages compute "
            "on CPUs only so far: set --device cpu, or use --tensor-parallel-size"
        )


def check_gpus(num_local: int) -> None:
    """Refuses a machine with fewer GPUs than it has ranks, which this process starts.

    Raises:
        ConfigurationError: names the flag.
    """
    if torch.cuda.device_count() < num_local:
        raise ConfigurationError(
            f"--tensor-parallel-size gives this machine {num_local} ranks, and it has "
            f"{torch.cuda.device_count()} GPUs; each rank needs one"
        )


def _key_of(place: RankPlace, security: ClusterSecurity | None) -> bytes:
    token = None if security is None else security.token
    if token is None:
        raise ConfigurationError(
            f"ranks that are started apart meet at {place.address}:{place.port}; `baton prefill` "
            "and `baton decode` do so with a token: set --cluster-token-file or BATON_CLUSTER_TOKEN"
        )
    return token.encode()
