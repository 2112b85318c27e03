"""The process of a rank other than 0: `engine.runtime.ranks.started_ranks` starts it."""

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from baton.common.errors import ConfigurationError
from engine.runtime.ranks.hosts import HostRanks, HostTask
from engine.runtime.ranks.loop import compute_batches, follow
from engine.runtime.ranks.processes import RankTask
from engine.runtime.ranks.rank_transfers import RankTransfers
from kernels.ranks import RanksLostError

__all__ = ["main"]

_EXIT_LOST = 1


def main() -> int:
    """Computes the batches of rank 0 until it has ended; returns the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # Of the whole group of processes. Rank 0 ends this one when it is done.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link = Connection(int(sys.argv[1]))
    task: RankTask | HostTask = link.recv()
    try:
        if isinstance(task, HostTask):
            ranks = HostRanks(task.place, task.config, task.security)
            follow(task.config, ranks, task.security)
            return 0
        _compute(task, link)
    except (RanksLostError, ConfigurationError) as error:
        logging.getLogger("baton.engine").error("rank %d: %s", task.rank, error)
    return _EXIT_LOST


def _compute(task: RankTask, link: Connection) -> None:
    """Computes with ranks that share memory; the process ends when rank 0's has."""
    transfers = RankTransfers(link, None)
    ranks = task.open_ranks()
    for file in task.files:
        os.close(file)
    compute_batches(task.config, ranks, transfers, task.security)


if __name__ == "__main__":
    sys.exit(main())
