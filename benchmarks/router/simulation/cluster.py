"""`SimulatedCluster`: replicas, and the routers that hear of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Generic, TypeVar

from baton.v1 import worker_pb2
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import Machine, SimulatedReplica
from benchmarks.router.simulation.router import SimulatedRouter

__all__ = ["SimulatedCluster"]

_REPORT_DELAY_S = 0.001
_EVENT_DELAY_S = 0.02
"""From a change of a pool to the routers' indexes: the rest of an engine's step, and a hop."""

_Message = TypeVar("_Message")


class _Mail(Generic[_Message]):
    """Delivers messages late, in order: timers of one moment may overtake each other.

    Args:
        delay_s: how late.
        deliver: takes the id of a worker and its message.
    """

    def __init__(self, delay_s: float, deliver: Callable[[str, _Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._deliver = deliver
        self._messages: deque[tuple[str, _Message]] = deque()

    def send(self, replica: SimulatedReplica, message: _Message) -> None:
        """Sends a message of a replica."""
        self._messages.append((replica.worker_id, message))
        self._loop.call_later(self._delay_s, self._deliver_next)

    def _deliver_next(self) -> None:
        self._deliver(*self._messages.popleft())


class SimulatedCluster:
    """Replicas of both tiers, whose events and load reports go to all routers, a little late. Made
    within a running loop.

    Args:
        prefill: what each replica of the prefill tier runs on.
        decode: what each replica of the decode tier runs on.

    Attributes:
        prefill: the replicas of the prefill tier.
        decode: the replicas of the decode tier.
    """

    def __init__(self, prefill: Sequence[Machine], decode: Sequence[Machine]) -> None:
        events = _Mail(_EVENT_DELAY_S, self._deliver_events)
        reports = _Mail(_REPORT_DELAY_S, self._deliver_report)
        send = events.send, reports.send
        self.prefill = [
            SimulatedPrefill(f"prefill-{number:04}", machine, *send)
            for number, machine in enumerate(prefill)
        ]
        self.decode = [
            SimulatedDecode(f"decode-{number:04}", machine, *send)
            for number, machine in enumerate(decode)
        ]
        self._replicas: Sequence[SimulatedReplica] = (*self.prefill, *self.decode)
        self._routers: Sequence[SimulatedRouter] = ()

    def start(self, routers: Sequence[SimulatedRouter]) -> None:
        """Connects the routers."""
        self._routers = routers
        for replica in self._replicas:
            replica.start()

    def believed_to_held(self) -> float | None:
        """Returns how many blocks the routers' indexes have, over those in the pools; None while
        the pools are empty.
        """
        num_held = sum(replica.kv.pool.num_cached for replica in self._replicas)
        if not num_held:
            return None
        believed = (sum(router.believed_blocks().values()) for router in self._routers)
        return fmean(believed) / num_held

    def _deliver_events(self, worker_id: str, events: Sequence[worker_pb2.KvEvent]) -> None:
        for router in self._routers:
            router.take_events(worker_id, events)

    def _deliver_report(self, worker_id: str, report: worker_pb2.WorkerLoad) -> None:
        for router in self._routers:
            router.take_report(worker_id, report)
