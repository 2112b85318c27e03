"""Ranks that register their parts of the pool, and move blocks of them."""

import os
import queue
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.metrics.counts import EngineMetrics, RankReport
from engine.runtime.ranks import loop, rank_transfers, transfers
from engine.runtime.ranks.loop import Reporter
from engine.runtime.ranks.rank_transfers import PoolMessage, RankTransfers, WorkMessage
from engine.runtime.ranks.transfers import RanksConnectorWorker
from kernels.ranks import RanksLostError
from kvstore.connector import SavedSlices
from kvstore.jobs import ConnectorWork, TransferResults

WAIT_S = 20
REPORT = RankReport(3, 0.1, 0.2, 0.3, 4)


class Worker:
    """The worker half of a rank's connector."""

    def __init__(self) -> None:
        self.is_polled = threading.Event()
        self.started: list[ConnectorWork] = []
        self.ended: list[int] = []

    def set_waker(self, wake: Any) -> None: ...

    def watch(self) -> None: ...

    def poll(self) -> TransferResults:
        self.is_polled.set()
        return TransferResults()

    def start(self, work: ConnectorWork) -> None:
        self.started.append(work)

    def step_ended(self, step: int, *, computed: bool) -> None:
        self.ended.append(step)


def open_transfers(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[RankTransfers, Worker, Connection]:
    """Returns the transfers of a rank that has registered its pool, its connector, and rank 0's
    end of the link.
    """
    monkeypatch.setattr(rank_transfers, "register", lambda *_: SavedSlices(b"", ()))
    own, theirs = Pipe()
    ranks: Any = SimpleNamespace(rank=1, abort=lambda: None)
    rank, worker = RankTransfers(theirs, ranks), Worker()
    runner: Any = SimpleNamespace(kv_pool=None, watch_layers=lambda _: None)
    connector: Any = (None, worker)
    rank.open(connector, runner, ranks)
    layout: Any = None
    own.send(PoolMessage(layout, None, 2))
    assert own.poll(WAIT_S)
    own.recv()
    return rank, worker, own


def join_mover() -> None:
    """Waits until the thread that moves blocks has ended."""
    for thread in threading.enumerate():
        if thread.name == "baton-rank-kv":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_a_rank_without_work_polls_its_connector_which_keeps_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_transfers, "_POLL_INTERVAL_S", 0.01)
    rank, worker, _own = open_transfers(monkeypatch)
    assert worker.is_polled.wait(WAIT_S)
    rank.close()
    join_mover()


def test_work_that_waits_for_a_step_ends_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, worker, own = open_transfers(monkeypatch)
    own.send(WorkMessage(1, 5, ConnectorWork(deletes=[b"key"])))  # starts after step 5
    rank.close()
    join_mover()
    rank.end_step(5)
    assert worker.started == []
    assert worker.ended == []


def test_a_rank_reports_what_it_saves() -> None:
    own, theirs = Pipe()
    theirs.send(SavedSlices(b"params", (1, 3)))
    assert transfers._receive_slices(own) == SavedSlices(b"params", (1, 3))


def test_reports_reach_rank_0_without_a_connector() -> None:
    own, theirs = Pipe()
    arrived: queue.SimpleQueue[RankReport] = queue.SimpleQueue()
    transfers.read_reports(None, [own], arrived.put)
    ranks: Any = SimpleNamespace(abort=lambda: None)
    reporter = Reporter(3, RankTransfers(theirs, ranks).send_report)
    reporter.step_begins()
    reporter.step_ends()
    report = arrived.get(timeout=WAIT_S)
    assert report.rank == 3
    assert report.resident_bytes > 1 << 20
    assert report.cpu_s > 0
    metrics = EngineMetrics()
    metrics.rank_reported(report)
    values = metrics.snapshot().values
    assert values["baton_engine_rank_step_seconds", "3"] == report.step_s
    assert values["baton_engine_rank_resident_bytes", "3"] == report.resident_bytes


def test_a_rank_that_ends_while_it_registers_is_lost() -> None:
    own, theirs = Pipe()
    theirs.close()
    with pytest.raises(RanksLostError, match="has ended"):
        transfers._receive_slices(own)


def test_a_rank_that_does_not_register_in_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_REGISTRATION_S", 0.01)
    own, theirs = Pipe()
    with theirs, pytest.raises(RanksLostError, match="in time"):
        transfers._receive_slices(own)


def test_results_for_a_rank_0_that_has_ended_are_no_failure() -> None:
    own, theirs = Pipe()
    ranks: Any = SimpleNamespace(abort=lambda: None)
    rank = RankTransfers(theirs, ranks)
    with socket.socket(fileno=os.dup(own.fileno())) as end:
        end.shutdown(socket.SHUT_RD)  # so that sending fails, before `_read` notices the end
    worker: Any = SimpleNamespace(poll=lambda: TransferResults(released=(1,)))
    rank._poll(worker)


def test_a_rank_that_still_waits_when_rank_0_has_ended_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_transfers, "_END_S", 0.01)
    own, theirs = Pipe()
    is_aborted = threading.Event()
    ranks: Any = SimpleNamespace(abort=is_aborted.set)
    RankTransfers(theirs, ranks)
    own.close()
    assert is_aborted.wait(WAIT_S)


def test_a_message_that_cannot_be_handled_ends_the_group() -> None:
    own, theirs = Pipe()
    is_aborted = threading.Event()
    ranks: Any = SimpleNamespace(abort=is_aborted.set)
    halves: Any = (None, None)
    worker = RanksConnectorWorker(halves, ranks, [own])

    def fail(report: RankReport) -> None:
        raise ValueError("bad report")

    worker.on_report = fail
    theirs.send(REPORT)
    worker._read(own)  # though the rank has not ended
    assert is_aborted.is_set()


def test_reports_are_read_on_after_one_that_cannot_be_counted() -> None:
    own, theirs = Pipe()
    arrived: queue.SimpleQueue[RankReport] = queue.SimpleQueue()

    def count(report: RankReport) -> None:
        arrived.put(report)
        raise ValueError("bad report")

    transfers.read_reports(None, [own], count)
    for _ in range(2):
        theirs.send(REPORT)
        assert arrived.get(timeout=WAIT_S) == REPORT


def test_a_rank_whose_memory_cannot_be_read_reports_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loop, "_STATM", tmp_path / "statm")
    sent: list[RankReport] = []
    reporter = Reporter(3, sent.append)
    reporter.step_begins()
    reporter.step_ends()
    assert [report.resident_bytes for report in sent] == [0]
