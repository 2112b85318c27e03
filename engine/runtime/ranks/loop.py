"""The loop of a rank other than 0, which computes the batches that rank 0 sends."""

import logging
from dataclasses import replace

from baton.common.security.cluster import ClusterSecurity
from engine.config import EngineConfig
from engine.runtime.model_runner import ModelRunner
from engine.runtime.rank_batches import BatchReceiver
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.rank_transfers import RankTransfers
from engine.runtime.ranks.reports import Reporter
from kernels.ranks import EngineRanks, GroupEndedError
from kvstore.registry import open_connector

__all__ = ["compute_batches", "follow"]

_logger = logging.getLogger("baton.engine")


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
    config = replace(config, turns_folder=None, logits_processors=())  # rank 0 has them
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
