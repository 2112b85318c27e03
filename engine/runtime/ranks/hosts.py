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

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.device import resolve_device
from engine.runtime.ranks.linked import GlooRanks
from engine.runtime.ranks.meeting import END, Meeting, shut_down
from engine.runtime.ranks.nccl import open_group
from engine.runtime.ranks.pipeline import PipelineLinks, PipelineRanks
from engine.runtime.ranks.place import RankPlace
from engine.runtime.ranks.started_ranks import RankChildren, StartedRanks
from kernels.ranks import EngineRanks, RankGroup, RanksLostError

__all__ = ["HostRanks", "HostTask", "check_gpus"]


@dataclass(frozen=True, slots=True)
class HostTask:
    """The data by which the process of a rank meets the others.

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
        self._has_started = False
        self._is_closing = False
        self._is_lost = False
        self._on_lost: Callable[[], None] = lambda: None
        key, num_stages = _meeting_key(place, security), config.pipeline_parallel_size
        is_on_cpu = resolve_device(config.device).type == "cpu"
        if place.starts_others and not is_on_cpu:
            check_gpus(place.num_local)
        self._met = Meeting(place, num_stages, key, self._check_others, has_gloo=is_on_cpu)
        self._children = RankChildren()
        try:
            for other in place.places_to_start():
                self._children.start(other.rank, HostTask(other, config, security))
            opened = self._meet(config)
        except BaseException:
            self._children.kill()
            self._children.close()
            raise
        self.transfers = self._met.transfers
        super().__init__(opened, place.rank, place.size)
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

    def _meet(self, config: EngineConfig) -> EngineRanks:
        place = self._met.place
        try:
            self._met.meet()
            return _opened(self._met, config)
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
            self._is_lost = True
            self._on_lost()  # first, as NCCL may take seconds to abort
            self.abort()


def _opened(met: Meeting, config: EngineConfig) -> EngineRanks:
    """Returns the access to the other ranks through the connections of a meeting."""
    place, width = met.place, config.tensor_parallel_size
    group: RankGroup | None = None
    if not met.has_gloo:
        group = open_group(config, place.rank, place.num_local, place.local_rank, met.steps)
    elif width > 1:
        steps = list(met.steps.values())
        group = GlooRanks(place.rank % width, width, place.num_local, met.gloo, steps)
    if met.num_stages == 1:
        assert group is not None, "one rank meets no others"
        return group
    links = PipelineLinks(met.steps, met.before, met.after)
    return PipelineRanks(place.rank, config, group, links, place.num_local, place.local_rank)


def check_gpus(num_local: int) -> None:
    """Refuses a machine with fewer GPUs than it has ranks, which this process starts.

    Raises:
        ConfigurationError: names the flag.
    """
    if torch.cuda.device_count() < num_local:
        raise ConfigurationError(
            "--tensor-parallel-size times --pipeline-parallel-size gives this machine "
            f"{num_local} ranks, and it has {torch.cuda.device_count()} GPUs; each rank needs one"
        )


def _meeting_key(place: RankPlace, security: ClusterSecurity | None) -> bytes:
    token = None if security is None else security.token
    if token is None:
        raise ConfigurationError(
            f"ranks that are started apart meet at {place.address}:{place.port}; `baton prefill` "
            "and `baton decode` do so with a token: set --cluster-token-file or BATON_CLUSTER_TOKEN"
        )
    return token.encode()
