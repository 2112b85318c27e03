"""`EngineThread`: steps an `EngineCore` in a thread, between plain messages.

Commands come down a queue. What they and the steps bring goes up to a
listener on an event loop, in order: the outputs of one step in one call.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core import EngineCore
from engine.kv_cache.events import KvEvent
from engine.request import EngineLoad, EngineRequest, RequestOutput
from kvstore.handoff import KvHandoff

__all__ = [
    "Abort",
    "Add",
    "Command",
    "EngineListener",
    "EngineThread",
    "FinishCandidate",
    "Prefetch",
    "RecordKvEvents",
    "ReleaseHandoff",
    "ResetPrefixCache",
]

_LOAD_INTERVAL_S = 0.02

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request that the engine has checked."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests; with `acknowledge`, say when nothing more comes of them."""

    request_ids: list[str]
    acknowledge: bool


@dataclass(frozen=True, slots=True)
class FinishCandidate:
    """End one candidate."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Begin to load blocks of a prompt that is still being computed."""

    handoff: KvHandoff


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Drop what the connector kept for a handoff."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget what is cached; `answer` gets the number of blocks."""

    answer: "asyncio.Future[int]"


@dataclass(frozen=True, slots=True)
class RecordKvEvents:
    """Tell a snapshot of the prefix cache and its changes from now on, or no more."""

    on: bool


Command = (
    Add | Abort | FinishCandidate | Prefetch | ReleaseHandoff | ResetPrefixCache | RecordKvEvents
)


class EngineListener(Protocol):
    """What hears of the engine, on its event loop."""

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """What a step, or a command, brought requests."""

    def on_aborted(self, request_ids: Sequence[str]) -> None:
        """An acknowledged `Abort`: no output of these requests comes after this."""

    def on_reset(self, reset: tuple["asyncio.Future[int]", int]) -> None:
        """The `answer` of a `ResetPrefixCache`, and the number for it."""

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Changes of the prefix cache."""

    def on_failed(self, cause: BaseException) -> None:
        """The engine has died; nothing comes after this."""


class EngineThread:
    """Runs the engine until `stop`, then closes it.

    Args:
        core: the engine; the thread's alone from now on, but for what is
            thread-safe.
        loop: where the listener's methods are called.
        listener: hears of the engine.

    Attributes:
        load: how busy the engine is, as of a recent step.
    """

    def __init__(
        self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener
    ) -> None:
        self.load: EngineLoad = core.load()
        self._core = core
        self._loop = loop
        self._listener = listener
        self._commands: deque[Command] = deque()
        self._is_recording = False
        self._is_stopping = False
        self._next_load_at = 0.0
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        """Begins to step."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queues a command. Any thread may call it."""
        self._commands.append(command)
        self._core.wake()

    def stop(self) -> None:
        """Ends after the present step. Does not wait. Idempotent."""
        self._is_stopping = True
        self._core.wake()

    def join(self, timeout_s: float) -> None:
        """Waits for the end."""
        self._thread.join(timeout_s)

    # On the thread.

    def _run(self) -> None:
        self._core.tell_early(self._tell)
        try:
            while not self._is_stopping:
                self._step()
                self._core.wait()
        except BaseException as error:
            _logger.exception("the engine loop died")
            self._post(self._listener.on_failed, error)
        finally:
            self._core.close()

    def _step(self) -> None:
        while self._commands:
            self._obey(self._commands.popleft())
        self._tell(self._core.step())
        self._core.start_transfers()
        if self._is_recording:
            self._tell_events(self._core.take_kv_events())
        if self._core.is_stalled or time.monotonic() >= self._next_load_at:
            self.load = self._core.load()
            self._next_load_at = time.monotonic() + _LOAD_INTERVAL_S

    def _obey(self, command: Command) -> None:
        core, listener = self._core, self._listener
        match command:
            case Add(request):
                self._tell(core.add_request(request))
            case Abort(request_ids, acknowledge):
                self._tell(core.abort(request_ids))
                if acknowledge:
                    self._post(listener.on_aborted, request_ids)
            case FinishCandidate(request_id, index):
                self._tell(core.finish_candidate(request_id, index))
            case Prefetch(handoff):
                core.prefetch(handoff)
            case ReleaseHandoff(handoff_id):
                core.release_handoff(handoff_id)
            case ResetPrefixCache(answer):
                self._post(listener.on_reset, (answer, core.reset_prefix_cache()))
            case RecordKvEvents(on):
                self._is_recording = on
                self._tell_events(core.watch_kv_events(on))

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        if outputs:
            self._post(self._listener.on_outputs, outputs)

    def _tell_events(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._post(self._listener.on_kv_events, events)

    def _post(self, handler: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(handler, argument)
        except RuntimeError:
            # The event loop was closed first; nobody is left to tell.
            self._is_stopping = True
