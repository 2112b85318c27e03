"""`SavePolicy`: what an engine saves, and when. Pure."""

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.kv_cache.spec import KvCacheSpec
from kvstore.connector import KvConnectorScheduler

__all__ = ["SavePolicy"]


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Rules of which blocks an engine saves, and when.

    Attributes:
        prompts: whether it saves blocks of prompts, as they are computed, that it does not hand
            over. It saves those that it hands over in any case.
        ahead: whether it saves blocks of prompts before the step that computes them.
        interval: it saves generated blocks whenever this many are full; None: not while the
            sequence runs.
        at_end: whether it saves generated blocks when a sequence ends.
    """

    prompts: bool = False
    ahead: bool = False
    interval: int | None = None
    at_end: bool = False

    @classmethod
    def of(
        cls, config: EngineConfig, spec: KvCacheSpec, connector: KvConnectorScheduler
    ) -> "SavePolicy":
        """Returns what an engine saves: only blocks that another request can find."""
        # Without layer slices a block is saved at once, after its step. With overlapped steps a
        # step may start before the one before it has failed, and compute from incomplete KV.
        # States are complete with the last of their layers.
        ahead = (
            connector.saves_ahead
            and spec.states is None
            and config.transfer_layer_slices > 1
            and not config.async_scheduling
        )
        if not connector.finds_by_key:
            return cls(ahead=ahead)
        if config.kv_publish == "off":
            return cls(prompts=True, ahead=ahead)
        if any(spec.windows):  # blocks behind a window are freed while the sequence runs
            return cls(prompts=True, ahead=ahead, interval=1, at_end=True)
        interval = int(config.kv_publish) if config.kv_publish.isdecimal() else None
        return cls(prompts=True, ahead=ahead, interval=interval, at_end=True)
