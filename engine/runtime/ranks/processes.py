"""Ranks of one machine as processes: rank 0 starts the others, and ends when one of them ends.

    rank 0       EngineCore -> ModelRunner, which sends each batch
    rank 1 ...   engine.runtime.ranks: ModelRunner, which computes what it receives

They share memory that has no name, so nothing is left of it when they have ended.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import override

from baton.errors import ConfigurationError
from baton.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.ranks.hosts import HostRanks, check_device, shut_down
from engine.runtime.ranks.place import place_of
from engine.runtime.ranks.ray_ranks import RayRanks
from kernels.native.commands import library
from kernels.native.ranks import MAX_RANKS, SharedMemoryRanks
from kvstore.handoff import connector_name
from kvstore.registry import connector_capabilities, known_stores
from kvstore.url import scheme_of

__all__ = ["RankProcesses", "RankTask", "start_ranks"]

_END_TIMEOUT_S = 5.0

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank's process needs to know.

    Attributes:
        config: of the engine.
        rank: number of the rank.
        file: descriptor of the memory that the ranks share.
    """

    config: EngineConfig
    rank: int
    file: int


def start_ranks(
    config: EngineConfig, security: ClusterSecurity | None = None
) -> "RankProcesses | HostRanks | None":
    """Starts the other ranks of an engine, or meets them; returns None if it has one rank.

    Raises:
        ConfigurationError: the machine cannot have several ranks; names the flag.
    """
    if config.tensor_parallel_size == 1:
        return None
    if config.kv_connector is not None:
        _check_connector(config.kv_connector, config.tensor_parallel_size)
    if config.distributed_executor_backend == "ray":
        return RayRanks(config, security)
    place = place_of(config)
    if place is None:
        return RankProcesses(config)
    if place.rank > 0:
        raise ConfigurationError(
            f"this is rank {place.rank}, which schedules nothing: `baton prefill` and "
            "`baton decode` run such ranks"
        )
    return HostRanks(place, config, security)


class RankProcesses(SharedMemoryRanks):
    """Rank 0 of a group whose other ranks are processes that it has started.

    A process that ends before `close` aborts the group.

    Args:
        config: of the engine.

    Attributes:
        transfers: connections to the other ranks for transfers, in their order.

    Raises:
        ConfigurationError: the machine cannot have several ranks; names the flag.
    """

    def __init__(self, config: EngineConfig) -> None:
        size = config.tensor_parallel_size
        check_device(config)
        native = library() if hasattr(os, "memfd_create") else None  # which only Linux has
        if native is None:
            raise ConfigurationError(
                f"--tensor-parallel-size is {size}; several ranks need Linux and the native "
                "kernels: see `baton doctor`"
            )
        if size > MAX_RANKS:
            raise ConfigurationError(f"--tensor-parallel-size is {size}; at most {MAX_RANKS}")
        self._is_closing = False
        self._on_lost: Callable[[], None] = lambda: None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.transfers: list[Connection] = []
        self._watchers: list[threading.Thread] = []
        file = os.memfd_create("baton-ranks")
        try:
            super().__init__(native, file, 0, size)
            for rank in range(1, size):
                self._start(RankTask(config, rank, file))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(file)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Registers a function to call when another rank's process has ended."""
        self._on_lost = on_lost
        if any(process.poll() is not None for process in self._processes):
            on_lost()

    @override
    def abort(self) -> None:
        """Ends the other processes too: one that is frozen would stay."""
        super().abort()
        for process in self._processes:
            process.kill()

    @override
    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        for link in self.transfers:
            shut_down(link)  # ends the process
        for process in self._processes:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for watcher in self._watchers:
            watcher.join()
        for link in self.transfers:
            link.close()
        super().close()

    def _start(self, task: RankTask) -> None:
        """Starts a rank's process, which ends when its connection does."""
        own, theirs = socket.socketpair()
        link = Connection(own.detach())
        self.transfers.append(link)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-P", "-m", "engine.runtime.ranks", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(task.file, theirs.fileno()),
                # Signals of a terminal are for rank 0, which drains while the others compute.
                start_new_session=True,
                env=_environment(),
            )
        self._processes.append(process)
        watcher = threading.Thread(target=self._watch, args=(task.rank, process), daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        link.send(task)

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        status = process.wait()
        if not self._is_closing:
            _logger.error("rank %d has ended with status %d", rank, status)
            self.abort()
            self._on_lost()


def _check_connector(url: str, size: int) -> None:
    """Refuses connectors that ranks cannot use yet.

    Raises:
        ConfigurationError: names the flags.
    """
    is_store = scheme_of(url) in known_stores()
    if not (is_store and connector_capabilities(url).shared_between_processes):
        raise ConfigurationError(
            f"--tensor-parallel-size is {size}; --kv-connector {connector_name(url)}:// works with "
            "1 only; use shm://NAME, file:///path or redis://host:port/db"
        )


def _environment() -> dict[str, str]:
    """Returns the environment of a rank's process, which imports what this process would."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
