"""The loop of a rank other than 0, which computes what rank 0 sends, and what it reports."""

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.metrics.counts import RankReport
from engine.runtime.device import with_device_defaults
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank_batches import BatchReceiver
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.rank_transfers import RankTransfers
from kernels.ranks import EngineRanks, GroupEndedError
from kvstore.registry import open_connector

__all__ = ["Reporter", "compute_batches", "follow"]

_INTERVAL_S = 1.0
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()
_logger = logging.getLogger("baton.engine")


class Reporter:
    """Adds up a rank's times, and reports them after steps, once a second at most.

    Args:
        rank: number of the rank.
        send: sends a report to rank 0.
    """

    def __init__(self, rank: int, send: Callable[[RankReport], None]) -> None:
        self._rank, self._send = rank, send
        self._changed_at = time.monotonic()
        self._sent_at = self._changed_at - _INTERVAL_S
        self._step_s = self._idle_s = 0.0

    def step_begins(self) -> None:
        """Notes that a batch has arrived."""
        self._idle_s += self._since_change()

    def step_ends(self) -> None:
        """Notes that it is computed."""
        self._step_s += self._since_change()
        if self._changed_at - self._sent_at >= _INTERVAL_S:
            self._sent_at = self._changed_at
            times = self._step_s, self._idle_s, time.process_time()
            self._send(RankReport(self._rank, *times, _resident_bytes()))

    def _since_change(self) -> float:
        before, self._changed_at = self._changed_at, time.monotonic()
        return self._changed_at - before


def _resident_bytes() -> int:
    """Returns this process's memory; 0 if that cannot be read."""
    try:
        pages = _STATM.read_bytes().split()[1]
    except OSError:
        return 0
    return int(pages) * _PAGE_BYTES


def compute_batches(
    config: EngineConfig,
    ranks: EngineRanks,
    transfers: RankTransfers,
    security: ClusterSecurity | None,
) -> None:
    """Computes a rank's part of all batches, until rank 0 has ended.

    Args:
        config: of the engine.
        ranks: the group.
        transfers: the rank's; closed afterwards.
        security: for the connector's calls to other processes.

    Raises:
        GroupEndedError: rank 0 has closed the group.
        RanksLostError: another rank is lost.
        ConfigurationError: a flag or the checkpoint is bad.
    """
    # Rank 0 has them.
    config = replace(with_device_defaults(config), turns_folder=None, logits_processors=())
    connector = None
    try:
        if config.kv_connector:
            connector = open_connector(config.kv_connector, security, ranks.rank)
        runner = ModelRunner(config, progress=False, ranks=ranks)
        if connector is not None:
            transfers.open(connector, runner, ranks)
        batches, reporter = BatchReceiver(ranks), Reporter(ranks.rank, transfers.send_report)
        while True:
            batch, num_work_messages = batches.receive()
            reporter.step_begins()
            transfers.begin_step(num_work_messages)
            runner.execute(batch)
            transfers.end_step(batch.step)
            reporter.step_ends()
    finally:
        ranks.abort()  # no other rank waits for this one any more
        transfers.close()
        if connector is not None:
            connector[1].close()


def follow(config: EngineConfig, ranks: HostRanks, security: ClusterSecurity | None) -> None:
    """Runs a rank other than 0 that was started by itself, until rank 0 has closed the group.

    Args:
        config: of the engine.
        ranks: the group; closed afterwards.
        security: for the connector's calls to other processes.

    Raises:
        RanksLostError: rank 0 or another rank is lost.
        ConfigurationError: a flag or the checkpoint is bad.
    """
    (link,) = ranks.transfers
    try:
        compute_batches(config, ranks, RankTransfers(link, ranks), security)
    except GroupEndedError:
        _logger.info("rank 0 has ended")
    finally:
        ranks.close()
