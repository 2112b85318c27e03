"""An engine in a process of its own, that notes when its transfers ran.

down   Add | Prefetch | Release          of a pipe that is closed at the end
up     Event                             whatever a step brought, and when
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineRequest, RequestOutput
from kvstore.connector import KvConnectorWorker
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, LoadJob, LoadResult, SaveJob, SaveResult, TransferResults
from kvstore.measured import MeasuredWorker
from kvstore.metrics import TransferMetrics
from kvstore.multi.jobs import MultiResults, MultiWork

__all__ = ["Add", "Event", "Prefetch", "Release", "serve_tier"]


@dataclass(frozen=True, slots=True)
class Add:
    """A request."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Blocks that prefill has saved of a prompt that it still computes."""

    handoff: KvHandoff


@dataclass(frozen=True, slots=True)
class Release:
    """A handoff that was loaded."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class Event:
    """What a step brought. Times are of `time.monotonic`, the same in all processes.

    Attributes:
        outputs: of requests.
        num_added: requests that had come by then.
        added_at: when the last of them did.
        transfers: starts and ends of the loads and saves that have ended since the last event.
        is_idle: whether nothing is left to do.
    """

    outputs: Sequence[RequestOutput]
    num_added: int
    added_at: float
    transfers: Sequence[tuple[float, float]] = ()
    is_idle: bool = False


class _TimedWorker(MeasuredWorker):
    """Notes when the jobs of a connector ran, or those of its members."""

    def __init__(self, worker: KvConnectorWorker) -> None:
        super().__init__(worker, TransferMetrics())
        self.transfers: list[tuple[float, float]] = []
        self._begun_at: dict[tuple[int, int], float] = {}  # by member and job

    def start(self, work: ConnectorWork) -> None:
        """See `KvConnectorWorker.start`."""
        now = time.monotonic()
        for member, share in enumerate(work.members if isinstance(work, MultiWork) else (work,)):
            jobs: tuple[LoadJob | SaveJob, ...] = (*share.loads, *share.saves)
            self._begun_at.update(((member, job.job_id), now) for job in jobs)
        super().start(work)

    def poll(self) -> TransferResults:
        """See `KvConnectorWorker.poll`."""
        results = super().poll()
        shares = results.members if isinstance(results, MultiResults) else (results,)
        for member, share in enumerate(shares):
            ended: tuple[LoadResult | SaveResult, ...] = (*share.loads, *share.saves)
            for result in ended:
                begun_at = self._begun_at.pop((member, result.job_id))
                if isinstance(result, SaveResult):
                    begun_at += result.waited
                # The bytes were there before the engine, which may have been computing, asked.
                end = begun_at + result.seconds if result.seconds else time.monotonic()
                self.transfers.append((begun_at, end))
        return results


@dataclass(slots=True)
class _Tier:
    """The engine's loop."""

    pipe: Connection
    core: EngineCore
    worker: _TimedWorker | None
    commands: deque[Add | Prefetch | Release | None] = field(default_factory=deque)
    num_added: int = 0
    added_at: float = 0.0
    is_idle: bool = True

    def run(self) -> None:
        """Steps until the other end of the pipe is closed."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell([], is_idle=True)
        while True:
            while self.commands:
                command = self.commands.popleft()
                if command is None:
                    return
                self._tell(self._obey(command), is_idle=False)
            self.core.run_step(self._tell_outputs)
            if not (self.is_idle or self.core.has_work):
                self._tell([], is_idle=True)
            self.core.wait()

    def _listen(self) -> None:
        """Another thread: the engine must not wait for the pipe."""
        try:
            while True:
                self.commands.append(self.pipe.recv())
                self.core.wake()
        except (EOFError, OSError):
            self.commands.append(None)
            self.core.wake()

    def _obey(self, command: Add | Prefetch | Release) -> list[RequestOutput]:
        match command:
            case Add(request):
                self.num_added, self.added_at = self.num_added + 1, time.monotonic()
                return self.core.add_request(request)
            case Prefetch(handoff):
                self.core.prefetch(handoff)
            case Release(handoff_id):
                self.core.release_handoff(handoff_id)
        return []

    def _tell_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self._tell(outputs, is_idle=not self.core.has_work)

    def _tell(self, outputs: Sequence[RequestOutput], *, is_idle: bool) -> None:
        self.is_idle = is_idle
        transfers = self.worker.transfers if self.worker is not None else []
        event = Event(outputs, self.num_added, self.added_at, tuple(transfers), is_idle)
        self.pipe.send(event)
        transfers.clear()


def serve_tier(pipe: Connection, settings: dict[str, Any]) -> None:
    """A process's main: builds an engine, tells that it is idle, and serves.

    Args:
        pipe: see the module.
        settings: of its `EngineConfig`.
    """
    config = EngineConfig(**settings)
    core, worker = _build(config)
    try:
        _Tier(pipe, core, worker).run()
    except BrokenPipeError:
        pass  # whoever asked has left
    finally:
        core.close()


def _build(config: EngineConfig) -> tuple[EngineCore, _TimedWorker | None]:
    """As `EngineCore.build`, with the connector's jobs timed."""
    from engine.runtime.device import with_device_defaults
    from engine.runtime.model_runner import ModelRunner
    from kvstore.registry import open_connector

    if config.kv_connector is None:
        return EngineCore.build(config), None
    scheduler, worker = open_connector(config.kv_connector)
    timed = _TimedWorker(worker)
    config = with_device_defaults(config)
    return EngineCore(config, ModelRunner(config), (scheduler, timed)), timed
