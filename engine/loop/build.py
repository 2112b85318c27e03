"""`build_engine`: makes an engine of a configuration: its model, its ranks and its connector."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.loop.core import EngineCore
from kernels.ranks import RanksLostError

if TYPE_CHECKING:
    from baton.common.security.cluster import ClusterSecurity

__all__ = ["build_engine"]


def build_engine(config: EngineConfig, security: "ClusterSecurity | None" = None) -> EngineCore:
    """Loads the model and opens the connector.

    Args:
        config: limits.
        security: for the connector's calls to other processes.

    Raises:
        ConfigurationError: the checkpoint, a flag or the connector is bad.
    """
    from engine.runtime.device import with_device_defaults
    from engine.runtime.model_runner import ModelRunner
    from engine.runtime.ranks.processes import start_ranks
    from engine.runtime.ranks.transfers import RanksConnectorWorker, read_reports
    from kvstore.registry import open_connector

    # The connector first: a bad URL is an error before minutes of loading.
    connector = open_connector(config.kv_connector, security) if config.kv_connector else None
    with ExitStack() as opened:
        if connector is not None:
            opened.callback(connector[1].close)
        config = with_device_defaults(config)
        ranks = start_ranks(config, security)
        if ranks is not None:
            opened.callback(ranks.close)
        try:
            runner = ModelRunner(config, ranks=ranks)
            opened.callback(runner.close)
            if ranks is not None and connector is not None:
                worker = RanksConnectorWorker(connector, ranks, ranks.transfers)
                runner.count_work(lambda: worker.num_work_messages)
                connector = connector[0], worker
            core = EngineCore(config, runner, connector)
        except RanksLostError as error:
            raise ConfigurationError(
                "a rank of --tensor-parallel-size has ended while it loaded; its log has the reason"
            ) from error
        if ranks is not None:
            ranks.watch(lambda: core.end(RanksLostError("a rank of the engine has ended")))
            read_reports(connector, ranks.transfers, core.metrics.rank_reported)
        opened.pop_all()
    return core
