"""KV transfers of several ranks: each rank moves its part of the heads.

    rank 0       EngineCore -> RanksConnectorWorker -> its own connector; the links to the others
    rank 1 ...   RankTransfers -> the rank's own connector

`JoinedResults` is what has become of the jobs of all ranks. With more ranks than KV heads several
ranks load the same head, and the first of them saves it. Connectors whose processes lend each other
their blocks need to know which rank saves what: each answers a `PoolMessage` with its
`SavedSlices`.

Work reaches a rank by its link, batches by the group's messages. So that a rank copies what its
steps have computed, and knows what to save ahead of a step: work names the last step that rank 0
has ended, and a batch how much work was sent before it. Each waits for the other.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from typing_extensions import override

from engine.metrics.counts import RankReport
from engine.runtime.kv_pool import share_of
from engine.runtime.ranks.joined_results import JoinedResults
from engine.runtime.ranks.rank_transfers import PoolMessage, WorkMessage, register
from kernels.ranks import EngineRanks, RanksLostError
from kvstore.connector import Connector, KvConnectorWorker, SavedSlices
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.jobs import ConnectorWork, TransferResults
from kvstore.layout import KvLayout
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = ["RanksConnectorWorker", "read_reports"]

_logger = logging.getLogger("baton.engine")

_REGISTRATION_S = 300.0
"""How long rank 0 waits for another to register its pool: a transport may pin all of it."""
_id_of = attrgetter("job_id")


class RanksConnectorWorker(KvConnectorWorker):
    """The worker half of rank 0, which makes all ranks move their parts.

    Args:
        own: both halves of rank 0's connector; the worker half moves its part.
        ranks: the group.
        links: connections to the other ranks, in their order.

    Attributes:
        num_work_messages: how many messages of work were sent to the others.
        on_report: called with each report of another rank, in a thread of its link.
    """

    def __init__(self, own: Connector, ranks: EngineRanks, links: Sequence[Connection]) -> None:
        self._scheduler, self._own = own
        self._ranks, self._links = ranks, links
        self._joined = JoinedResults()
        self._arrived: deque[TransferResults] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._ended_step = 0
        self._savers: list[bool] = []
        self.num_work_messages = 0
        self.on_report: Callable[[RankReport], None] = lambda _: None

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        """Receives rank 0's part of the pool, and the layout of whole blocks.

        Raises:
            RanksLostError: another rank cannot register its part.
        """
        shares = [
            share_of(rank, self._ranks, layout.num_kv_heads) for rank in range(self._ranks.size)
        ]
        # Of several ranks with the same heads the first one saves.
        self._savers = [part not in shares[:rank] for rank, part in enumerate(shares)]
        message = PoolMessage(layout, form, share.num_blocks)
        saved = [register((self._scheduler, self._own), self._ranks, pool, message)]
        self._send([message] * len(self._links))
        saved += map(_receive_slices, self._links)
        self._scheduler.join_ranks(list(compress(saved, self._savers)))
        for link in self._links:
            threading.Thread(target=self._read, args=(link,), daemon=True).start()

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._own.set_waker(wake)

    @override
    def measure(self, metrics: KvMetrics, backend: str) -> None:
        """Counts rank 0's calls; those of the others are alike."""
        self._own.measure(metrics, backend)

    @override
    def watch(self) -> None:
        """The other ranks watch on their own, from the registration of their pools on."""
        self._own.watch()

    @property
    @override
    def statuses(self) -> Sequence[BackendStatus]:
        return self._own.statuses

    @override
    def start(self, work: ConnectorWork) -> None:
        self._joined.forget(work.cancelled_lookups)
        self._joined.expect(map(_id_of, (*work.lookups, *work.loads)), self._ranks.size)
        self._joined.expect(map(_id_of, work.saves), sum(self._savers))
        self.num_work_messages += 1
        number, step = self.num_work_messages, self._ended_step
        without_saves = replace(work, saves=[])
        self._send(
            [
                WorkMessage(number, step, work if saves else without_saves)
                for saves in self._savers[1:]
            ]
        )
        self._own.start(work)

    @override
    def layers_computed(self, step: int, num_layers: int) -> None:
        self._own.layers_computed(step, num_layers)

    @override
    def step_ended(self, step: int, *, computed: bool) -> None:
        if computed:  # else the other ranks may not have got its batch
            self._ended_step = step
        self._own.step_ended(step, computed=computed)

    @override
    def poll(self) -> TransferResults:
        self._joined.add(self._own.poll())
        while self._arrived:
            self._joined.add(self._arrived.popleft())
        return self._joined.take()

    @override
    def close(self) -> None:
        self._own.close()

    def _send(self, messages: Sequence[PoolMessage | WorkMessage]) -> None:
        for link, message in zip(self._links, messages, strict=True):
            with suppress(OSError):  # the rank has ended; so will the group
                link.send(message)

    def _read(self, link: Connection) -> None:
        """Receives a rank's results and reports until it ends, and its group with it."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    message = link.recv()
                    if isinstance(message, RankReport):
                        self.on_report(message)
                    else:
                        self._arrived.append(message)
                        self._wake()
        except Exception:
            _logger.exception("a rank's message cannot be handled")
        finally:
            self._ranks.abort()


def _receive_slices(link: Connection) -> SavedSlices:
    """Waits until a rank has registered its pool; returns what it saves.

    Raises:
        RanksLostError: it has ended, or does not answer.
    """
    try:
        if link.poll(_REGISTRATION_S):
            saved: SavedSlices = link.recv()
            return saved
    except (EOFError, OSError) as error:
        raise RanksLostError("a rank has ended while it registered its pool") from error
    raise RanksLostError("a rank has not registered its pool in time")


def read_reports(
    connector: Connector | None,
    links: Sequence[Connection],
    on_report: Callable[[RankReport], None],
) -> None:
    """Makes rank 0 read what the other ranks report.

    Args:
        connector: both halves of the connector of the engine, which reads the links if there is
            one.
        links: connections to the other ranks.
        on_report: called with each report, in other threads.
    """
    if connector is not None:
        worker = connector[1]
        assert isinstance(worker, RanksConnectorWorker), "the ranks share it"
        worker.on_report = on_report
        return

    def read(link: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                report = link.recv()
                try:
                    on_report(report)
                except Exception:
                    _logger.exception("a rank's report cannot be counted")

    for link in links:
        threading.Thread(target=read, args=(link,), daemon=True).start()
