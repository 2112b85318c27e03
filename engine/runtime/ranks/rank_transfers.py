"""`RankTransfers`: the KV transfers of a rank other than 0, and the messages that it gets for them.

`engine.runtime.ranks.transfers` describes how the ranks share the work.
"""

import logging
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from engine.metrics.counts import RankReport
from engine.runner import LayersComputed
from engine.runtime.kv_pool import share_of
from kernels.ranks import EngineRanks, RanksLostError
from kvstore.connector import Connector, KvConnectorWorker, SavedSlices
from kvstore.jobs import ConnectorWork, TransferResults
from kvstore.layout import KvLayout
from kvstore.transfer_form import BlockSlicing, TransferForm

__all__ = ["PoolMessage", "RankTransfers", "WorkMessage", "register"]

_logger = logging.getLogger("baton.engine")

_END_S = 5.0
"""How long a rank may still compute when rank 0 has ended; the end may be an orderly one."""
_POLL_INTERVAL_S = 1.0
"""Longest time between two polls of a rank's connector, which keeps leases when it is polled."""
_POLL = object()
"""Makes a rank send its results."""


@dataclass(frozen=True, slots=True)
class PoolMessage:
    """Makes a rank register its pool, and answer with its `SavedSlices`.

    Attributes:
        layout: of the whole model's blocks.
        form: how blocks look between engines.
        num_blocks: number of blocks for tokens.
    """

    layout: KvLayout
    form: TransferForm | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class WorkMessage:
    """Work for a rank.

    Attributes:
        number: counts the messages of this kind, from 1.
        after_step: number of the step after which it may start.
        work: the work.
    """

    number: int
    after_step: int
    work: ConnectorWork


class RankRunner(Protocol):
    """The part of a rank's runner that its transfers use."""

    @property
    def kv_pool(self) -> Any:
        """The rank's part of the pool."""

    def watch_layers(self, on_layers: LayersComputed) -> None:
        """Registers a function that steps call as layers are computed."""


class RankTransfers:
    """The transfers of a rank other than 0, and its reports.

    Args:
        link: connection to rank 0.
        ranks: aborted if this rank still waits for another some time after rank 0 has ended. None
            to end the process at once.
    """

    def __init__(self, link: Connection, ranks: EngineRanks | None) -> None:
        self._link, self._ranks = link, ranks
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of calls of the connector
        self._sending = threading.Lock()
        self._progress = threading.Condition()
        self._num_work_messages = 0  # started
        self._ended_step = 0
        self._is_over = False  # rank 0 has ended, or this rank is closed
        self._is_closed = threading.Event()
        self._connector: KvConnectorWorker | None = None
        threading.Thread(target=self._read, daemon=True).start()

    def open(self, connector: Connector, runner: RankRunner, ranks: EngineRanks) -> None:
        """Starts to move blocks of a runner's pool.

        Args:
            connector: both halves of the rank's own connector.
            runner: the rank's runner.
            ranks: the group.
        """
        self._connector = connector[1]
        self._connector.set_waker(lambda: self._messages.put(_POLL))
        runner.watch_layers(self._layers_computed)
        arguments = connector, runner, ranks
        threading.Thread(
            target=self._move, args=arguments, name="baton-rank-kv", daemon=True
        ).start()

    def close(self) -> None:
        """Ends the moves: no call of the connector follows."""
        self._end_moves()
        self._is_closed.set()

    def _end_moves(self) -> None:
        with self._lock:
            self._is_over = True
        with self._progress:
            self._progress.notify_all()

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
                if not self._is_over:
                    self._connector.step_ended(step, computed=True)
            with self._progress:
                self._ended_step = step
                self._progress.notify_all()

    def send_report(self, report: RankReport) -> None:
        """Sends rank 0 a report."""
        self._send(report)

    def _send(self, message: object) -> None:
        with suppress(OSError), self._sending:  # rank 0 has ended, which `_read` notices
            self._link.send(message)

    def _layers_computed(self, step: int, num_layers: int) -> None:
        assert self._connector is not None
        with self._lock:
            if not self._is_over:
                self._connector.layers_computed(step, num_layers)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._link.recv())
        except (EOFError, OSError):
            self._end_moves()
            if self._ranks is None:
                try:
                    if self._connector is not None:
                        self._connector.close()
                finally:
                    os._exit(0)
            elif not self._is_closed.wait(_END_S):
                self._ranks.abort()

    def _move(self, connector: Connector, runner: RankRunner, ranks: EngineRanks) -> None:
        try:
            self._handle(self._messages.get(), connector, runner, ranks)  # registers the pool
            while not self._is_over:
                self._handle(self._next_message(), connector, runner, ranks)
        except Exception:
            if self._is_over:
                return
            _logger.exception("rank %d cannot move KV", ranks.rank)
            ranks.abort()
            os._exit(1)  # the thread that computes may wait for this one

    def _next_message(self) -> Any:
        try:
            return self._messages.get(timeout=_POLL_INTERVAL_S)
        except queue.Empty:
            return _POLL

    def _handle(
        self, message: Any, connector: Connector, runner: RankRunner, ranks: EngineRanks
    ) -> None:
        if message is _POLL:
            self._poll(connector[1])
        elif isinstance(message, PoolMessage):
            self._send(register(connector, ranks, runner.kv_pool, message))
            connector[1].watch()
        else:
            self._start(message, connector[1])

    def _poll(self, connector: KvConnectorWorker) -> None:
        """Sends what has ended to rank 0."""
        with self._lock:
            results = TransferResults() if self._is_over else connector.poll()
        if results and not self._is_over:
            self._send(results)

    def _start(self, message: WorkMessage, connector: KvConnectorWorker) -> None:
        """Starts work once the step before it has ended here, too."""
        with self._progress:
            self._progress.wait_for(lambda: self._ended_step >= message.after_step or self._is_over)
        with self._lock:
            if message.work and not self._is_over:
                connector.start(message.work)
        with self._progress:
            self._num_work_messages = message.number
            self._progress.notify_all()


def register(
    connector: Connector, ranks: EngineRanks, pool: Any, message: PoolMessage
) -> SavedSlices:
    """Registers a rank's pool, which has its share of heads and layers; returns what it saves."""
    scheduler, worker = connector
    share = share_of(ranks.rank, ranks, message.layout.num_kv_heads)
    share = replace(share, num_blocks=message.num_blocks)
    layout = share.layout_of(message.layout)
    worker.register_pool(pool, layout, message.form, share)
    slicing = BlockSlicing.of(layout, message.form, share)
    return SavedSlices(scheduler.params, slicing.slice_numbers)
