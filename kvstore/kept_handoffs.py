"""`KeptHandoffs`: handoffs whose objects a store must not evict while requests wait. Pure."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.handoff import KvHandoff

__all__ = ["KeptHandoffs"]


@dataclass(slots=True)
class _KeptHandoff:
    handoff: KvHandoff
    touched_at: float
    num_requests: int = 1


class KeptHandoffs:
    """Says which handoff's objects are to be touched next.

    A store evicts what was touched longest ago, and without touches that would be the objects of
    the request that has waited longest. Objects were touched when they were saved, so a handoff
    that is loaded soon costs no call. Not thread-safe.

    Args:
        period_s: longest time without a touch.
        clock: seconds, monotonic.
    """

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._kept: OrderedDict[str, _KeptHandoff] = OrderedDict()  # touched longest ago first

    def keep(self, handoff: KvHandoff) -> None:
        """Keeps a handoff until `drop` was called as often as this."""
        if kept := self._kept.get(handoff.handoff_id):
            kept.num_requests += 1
        else:
            self._kept[handoff.handoff_id] = _KeptHandoff(handoff, self._clock())

    def drop(self, handoff_id: str) -> None:
        """Ends one `keep`. Unknown ids are ignored."""
        if kept := self._kept.get(handoff_id):
            kept.num_requests -= 1
            if not kept.num_requests:
                del self._kept[handoff_id]

    def take_due(self) -> KvHandoff | None:
        """Returns a handoff whose objects are to be touched now; None if there is none."""
        for handoff_id, kept in self._kept.items():
            if self._clock() - kept.touched_at < self._period_s:
                break
            kept.touched_at = self._clock()
            self._kept.move_to_end(handoff_id)
            return kept.handoff
        return None
