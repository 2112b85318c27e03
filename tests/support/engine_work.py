"""`has_work`: whether an engine has anything left to do."""

from engine.loop.core import EngineCore


def has_work(core: EngineCore) -> bool:
    """Whether steps are needed: for requests, for a step in flight, or for transfers, which may be
    of finished requests.
    """
    scheduler = core.scheduler
    return core._loop.is_in_flight or bool(scheduler.num_unfinished or scheduler.num_transfers)
