"""Ranks that a process has started: their processes, and how rank 0 learns that one has ended."""

import logging
import os
import socket
import subprocess
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from typing_extensions import override

from baton.common.container_limits import EndWatch
from baton.common.module_process import module_command, path_variable
from engine.runtime.ranks.meeting import shut_down
from kernels.ranks import EngineRanks, RankGroup

__all__ = ["RankChildren", "StartedRanks"]

_MODULE = "engine.runtime.ranks"
_END_TIMEOUT_S = 5.0
_logger = logging.getLogger("baton.engine")


class StartedRanks(EngineRanks):
    """Ranks that were started and have met.

    Args:
        opened: the access to the other ranks.

    Attributes:
        transfers: connections for transfers: rank 0's to the others in their order, or the one to
            rank 0.
    """

    transfers: list[Connection]

    def __init__(self, opened: EngineRanks, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.num_local, self.local_rank = opened.num_local, opened.local_rank
        self.stage, self.num_stages = opened.stage, opened.num_stages
        self._opened = opened

    @abstractmethod
    def watch(self, on_lost: Callable[[], None]) -> None:
        """Registers a function to call when another rank has ended."""

    @property
    @override
    def group(self) -> RankGroup | None:
        return self._opened.group

    @override
    def limit_waits(self, timeout_s: float) -> None:
        self._opened.limit_waits(timeout_s)

    @override
    def send(self, data: bytes) -> None:
        self._opened.send(data)

    @override
    def receive(self, *, waits_forever: bool = False) -> bytes:
        return self._opened.receive(waits_forever=waits_forever)

    @override
    def send_tokens(self, data: bytes) -> None:
        self._opened.send_tokens(data)

    @override
    def receive_tokens(self, *, waits: bool = True) -> bytes | None:
        return self._opened.receive_tokens(waits=waits)

    @override
    def send_hidden(self, hidden: torch.Tensor) -> None:
        self._opened.send_hidden(hidden)

    @override
    def receive_hidden(self, hidden: torch.Tensor) -> None:
        self._opened.receive_hidden(hidden)


class RankChildren:
    """Processes of ranks, which run `engine.runtime.ranks`. They end with this process, also when
    it is killed or they are frozen.

    Args:
        on_end: called in a thread when one has ended before `close`.

    Attributes:
        links: a connection to each process, in the order of their start.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.links: list[Connection] = []
        self._on_end = on_end
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._is_closing = False

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [process.pid for process in self._processes]

    @property
    def has_ended(self) -> bool:
        """Whether one of them has ended."""
        return any(process.poll() is not None for process in self._processes)

    def start(self, rank: int, task: object, files: Sequence[int] = ()) -> None:
        """Starts a rank's process.

        Args:
            rank: number of the rank.
            task: what the process receives first.
            files: descriptors in it, which the process inherits.
        """
        parent_end, theirs = socket.socketpair()
        link = Connection(parent_end.detach())
        self.links.append(link)
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - this program
                module_command(_MODULE, str(theirs.fileno()), ends_with_parent=True),
                stdin=subprocess.DEVNULL,
                pass_fds=(*files, theirs.fileno()),
                # Signals of a terminal are for rank 0, which drains while the others compute.
                start_new_session=True,
                env={**os.environ, **path_variable()},
            )
        self._processes.append(process)
        watcher = threading.Thread(
            target=self._watch, args=(rank, process, EndWatch()), daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()
        with suppress(BrokenPipeError):  # it has ended, which the watcher reports
            link.send(task)

    def kill(self) -> None:
        """Ends the processes at once."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """Ends the connections, and waits for the processes; kills those that stay."""
        self._is_closing = True
        for link in self.links:
            shut_down(link)
        for process in self._processes:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for watcher in self._watchers:
            watcher.join()
        for link in self.links:
            link.close()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]", end: EndWatch) -> None:
        status = process.wait()
        if self._is_closing:
            return
        if status != 0:  # a rank that rank 0 has ended may end before `close`
            _logger.error("rank %d %s", rank, end.describe(status))
        self._on_end()
