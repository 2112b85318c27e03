"""KV transfers of several ranks: each rank moves its part of the heads.

    rank 0       EngineCore -> RanksConnectorWorker -> its own connector; the links to the others
    rank 1 ...   RankTransfers -> the rank's own connector

A load has brought what all ranks have loaded, and a save is committed if that of every rank is.
With more ranks than KV heads several ranks load the same head, and the first of them saves it.

Work reaches a rank by its link, batches by the group's messages. So that a rank copies what its
steps have computed, and knows what to save ahead of a step: work names the last step that rank 0
has ended, and a batch how much work was sent before it. Each waits for the other.
"""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kernels.ranks import EngineRanks, RanksLostError
from kvstore.connector import KvConnectorWorker
from kvstore.jobs import ConnectorWork, LoadResult, LookupResult, SaveResult, TransferResults
from kvstore.layout import KvLayout
from kvstore.metrics import KvMetrics
from kvstore.transfer_form import WHOLE, HeadShare, TransferForm

if TYPE_CHECKING:
    from engine.runtime.model_runner import ModelRunner

__all__ = ["RankTransfers", "RanksConnectorWorker", "join_transfers", "share_of"]

_logger = logging.getLogger("baton.engine")

_Result = LookupResult | LoadResult | SaveResult
_id_of = attrgetter("job_id")


def share_of(rank: int, ranks: EngineRanks, num_kv_heads: int) -> HeadShare:
    """Returns the heads and layers that a rank has.

    Args:
        rank: number of the rank.
        ranks: all ranks of the engine.
        num_kv_heads: of the model.
    """
    width = ranks.size // ranks.num_stages
    stage = ranks.stage_of(rank)
    return HeadShare.of(rank % width, width, num_kv_heads, stage, ranks.num_stages)


@dataclass(frozen=True, slots=True)
class _Pool:
    """Makes a rank register its pool.

    Attributes:
        layout: of the whole model's blocks.
        form: how blocks look between engines.
    """

    layout: KvLayout
    form: TransferForm | None


@dataclass(frozen=True, slots=True)
class _Work:
    """Work for a rank.

    Attributes:
        number: counts the messages of this kind, from 1.
        after_step: number of the step after which it may start.
        work: the work.
    """

    number: int
    after_step: int
    work: ConnectorWork


_POLL = object()
"""Makes a rank send its results."""


@dataclass(slots=True)
class _Open:
    """A job whose result some ranks have not reported.

    Attributes:
        num_missing: number of these ranks.
        results: of the others.
    """

    num_missing: int
    results: list[Any] = field(default_factory=list)


class RanksConnectorWorker(KvConnectorWorker):
    """The worker half of rank 0, which makes all ranks move their parts.

    Args:
        own: the worker half that moves rank 0's part.
        ranks: the group.
        links: connections to the other ranks, in their order.
    """

    def __init__(
        self, own: KvConnectorWorker, ranks: EngineRanks, links: Sequence[Connection]
    ) -> None:
        self._own, self._ranks, self._links = own, ranks, links
        self._open: dict[int, _Open] = {}
        self._arrived: deque[TransferResults] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._ended_step = 0
        self._savers: list[bool] = []
        self.num_work_messages = 0

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """Receives rank 0's part of the pool, and the layout of whole blocks."""
        shares = [
            share_of(rank, self._ranks, layout.num_kv_heads) for rank in range(self._ranks.size)
        ]
        # Of several ranks with the same heads the first one saves.
        self._savers = [share not in shares[:rank] for rank, share in enumerate(shares)]
        _register(self._own, self._ranks, pool, _Pool(layout, form))
        self._send([_Pool(layout, form)] * len(self._links))
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
    def start(self, work: ConnectorWork) -> None:
        for job_id in work.cancelled_lookups:
            self._open.pop(job_id, None)
        for job_id in (*map(_id_of, work.lookups), *map(_id_of, work.loads)):
            self._open[job_id] = _Open(self._ranks.size)
        for job_id in map(_id_of, work.saves):
            self._open[job_id] = _Open(sum(self._savers))
        self.num_work_messages += 1
        without_saves = replace(work, saves=[])
        self._send(
            [
                _Work(self.num_work_messages, self._ended_step, work if saves else without_saves)
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
        ended: list[_Result] = []
        for results in (self._own.poll(), *self._take_arrived()):
            for result in _all_of(results):
                job = self._open.get(result.job_id)
                if job is None:
                    continue  # a look-up that was cancelled
                job.results.append(result)
                job.num_missing -= 1
                if not job.num_missing:
                    del self._open[result.job_id]
                    ended.append(_joined(job.results))
        return TransferResults(
            tuple(result for result in ended if isinstance(result, LookupResult)),
            tuple(result for result in ended if isinstance(result, LoadResult)),
            tuple(result for result in ended if isinstance(result, SaveResult)),
        )

    @override
    def close(self) -> None:
        self._own.close()

    def _take_arrived(self) -> list[TransferResults]:
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def _send(self, messages: Sequence[_Pool | _Work]) -> None:
        for link, message in zip(self._links, messages, strict=True):
            with suppress(OSError):  # the rank has ended; so will the group
                link.send(message)

    def _read(self, link: Connection) -> None:
        """Receives a rank's results until it ends, and its group with it."""
        with suppress(EOFError, OSError):
            while True:
                self._arrived.append(link.recv())
                self._wake()
        self._ranks.abort()


def join_transfers(
    own: KvConnectorWorker, ranks: EngineRanks, links: Sequence[Connection], runner: "ModelRunner"
) -> RanksConnectorWorker:
    """Makes all ranks move their parts of the KV.

    Args:
        own: the connector's worker half of rank 0.
        ranks: the group.
        links: connections to the other ranks, in their order.
        runner: that of rank 0.
    """
    worker = RanksConnectorWorker(own, ranks, links)
    runner.count_work(lambda: worker.num_work_messages)
    return worker


class RankTransfers:
    """The transfers of a rank other than 0.

    Args:
        link: connection to rank 0.
        ends_process: whether to end the process when rank 0's has ended.
    """

    def __init__(self, link: Connection, *, ends_process: bool) -> None:
        self._link = link
        self._ends_process = ends_process
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of calls of the connector
        self._progress = threading.Condition()
        self._num_work_messages = 0  # started
        self._ended_step = 0
        self._is_over = False  # rank 0 has ended
        self._connector: KvConnectorWorker | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def open(self, connector: KvConnectorWorker, runner: "ModelRunner", ranks: EngineRanks) -> None:
        """Starts to move blocks of a runner's pool.

        Args:
            connector: the rank's own worker half.
            runner: the rank's runner.
            ranks: the group.
        """
        self._connector = connector
        connector.set_waker(lambda: self._messages.put(_POLL))
        runner.watch_layers(self._layers_computed)
        arguments = connector, runner, ranks
        threading.Thread(target=self._move, args=arguments, daemon=True).start()

    def begin_step(self, num_work_messages: int) -> None:
        """Waits until the work that rank 0 has sent before a batch has started.

        Raises:
            RanksLostError: the work cannot come any more.
        """
        if self._connector is None:
            return
        with self._progress:
            self._progress.wait_for(
                lambda: self._num_work_messages >= num_work_messages or self._is_over
            )
            if self._num_work_messages < num_work_messages:
                raise RanksLostError("rank 0 is lost")

    def end_step(self, step: int) -> None:
        """Notes that a step has computed its blocks."""
        if self._connector is not None:
            with self._lock:
                self._connector.step_ended(step, computed=True)
            with self._progress:
                self._ended_step = step
                self._progress.notify_all()

    def _layers_computed(self, step: int, num_layers: int) -> None:
        assert self._connector is not None
        with self._lock:
            self._connector.layers_computed(step, num_layers)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._link.recv())
        except (EOFError, OSError):
            if self._ends_process:
                os._exit(0)
            with self._progress:
                self._is_over = True
                self._progress.notify_all()

    def _move(
        self, connector: KvConnectorWorker, runner: "ModelRunner", ranks: EngineRanks
    ) -> None:
        try:
            while True:
                self._handle(self._messages.get(), connector, runner, ranks)
        except Exception:
            if self._is_over:
                return
            _logger.exception("rank %d cannot move KV", ranks.rank)
            ranks.abort()
            os._exit(1)  # the thread that computes may wait for this one

    def _handle(
        self, message: Any, connector: KvConnectorWorker, runner: "ModelRunner", ranks: EngineRanks
    ) -> None:
        if message is _POLL:
            with self._lock:
                results = connector.poll()
            if results and not self._is_over:
                self._link.send(results)
        elif isinstance(message, _Pool):
            _register(connector, ranks, runner.kv_pool, message)
        else:
            with self._progress:
                self._progress.wait_for(lambda: self._ended_step >= message.after_step)
            if message.work:
                with self._lock:
                    connector.start(message.work)
            with self._progress:
                self._num_work_messages = message.number
                self._progress.notify_all()


def _register(connector: KvConnectorWorker, ranks: EngineRanks, pool: Any, message: _Pool) -> None:
    """Registers a rank's pool, which has its share of the heads and layers."""
    share = share_of(ranks.rank, ranks, message.layout.num_kv_heads)
    connector.register_pool(pool, share.layout_of(message.layout), message.form, share)


def _all_of(results: TransferResults) -> Sequence[_Result]:
    return (*results.lookups, *results.loads, *results.saves)


def _joined(results: Sequence[Any]) -> _Result:
    """Returns the result that holds for all ranks."""
    first = results[0]
    if isinstance(first, LookupResult):
        fewest: LookupResult = min(results, key=lambda result: result.num_blocks)
        return fewest
    seconds = max(result.seconds for result in results)
    if isinstance(first, LoadResult):
        least: LoadResult = min(results, key=lambda result: result.num_blocks)
        return replace(least, seconds=seconds)
    worst: SaveResult = min(results, key=lambda result: result.committed)
    return replace(worst, seconds=seconds)
