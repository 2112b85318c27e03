"""`EngineThread`: runs an `EngineCore` in a thread of its own.

The event loop and the thread exchange plain messages. Commands go down a queue. Outputs and
answers go up to a listener on the event loop, in order: the outputs of one step in one call.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton.common.errors import InternalError
from engine.core import EngineCore
from engine.kv_cache.events import KvEvent
from engine.request import EngineLoad, EngineOutput, EngineRequest
from kvstore.handoff import KvHandoff

__all__ = [
    "Abort",
    "Add",
    "AwaitSaves",
    "Command",
    "EngineListener",
    "EngineThread",
    "FinishCandidate",
    "Move",
    "Prefetch",
    "RecordKvEvents",
    "ReleaseHandoff",
    "ResetPrefixCache",
]

_LOAD_INTERVAL_S = 0.02
# For saves under way when the engine stops; a drain has waited for them before.
_SAVES_S = 2.0

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class Add:
    """Adds a request that the engine has checked."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends requests. With `acknowledge`, `on_aborted` follows their last output."""

    request_ids: list[str]
    acknowledge: bool


@dataclass(frozen=True, slots=True)
class FinishCandidate:
    """Ends one candidate of a request."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class Move:
    """Ends a request that continues on another engine, once its KV is saved."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Starts to load blocks of a prompt that a prefill engine is still computing."""

    handoff: KvHandoff


@dataclass(frozen=True, slots=True)
class ReleaseHandoff:
    """Ends a handoff's lease and deletes what was saved for it alone."""

    handoff_id: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Empties the prefix cache; `answer` gets the number of blocks it held."""

    answer: "asyncio.Future[int]"


@dataclass(frozen=True, slots=True)
class AwaitSaves:
    """Sets `answer` as soon as no KV is being saved or lent."""

    answer: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class RecordKvEvents:
    """Starts to report the prefix cache: a snapshot, then its changes. Or stops."""

    on: bool


Command = (
    Add
    | Abort
    | FinishCandidate
    | Move
    | Prefetch
    | ReleaseHandoff
    | ResetPrefixCache
    | AwaitSaves
    | RecordKvEvents
)


class EngineListener(Protocol):
    """Receives outputs and answers on the event loop."""

    def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Receives the outputs of a step or a command."""

    def on_aborted(self, request_ids: Sequence[str]) -> None:
        """Acknowledges an `Abort`: no output of these requests follows."""

    def on_reset(self, reset: tuple["asyncio.Future[int]", int]) -> None:
        """Receives the `answer` of a `ResetPrefixCache`, and the number to set."""

    def on_saved(self, answer: "asyncio.Future[None]") -> None:
        """Receives the `answer` of an `AwaitSaves`."""

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Receives a snapshot or changes of the prefix cache."""

    def on_failed(self, cause: BaseException) -> None:
        """Reports that the engine has died; no other call follows."""


class EngineThread:
    """Steps an engine until `stop`, then closes it.

    Args:
        core: the engine. From now on only this thread calls methods that are not thread-safe.
        loop: the event loop that calls the listener's methods.
        listener: receives outputs and answers.

    Attributes:
        load: how busy the engine was at a recent step.
    """

    def __init__(
        self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener
    ) -> None:
        self.load: EngineLoad = core.load()
        self._core = core
        self._loop = loop
        self._listener = listener
        self._commands: deque[Command] = deque()
        self._await_saves: list[asyncio.Future[None]] = []
        self._is_recording = False
        self._is_stopping = False
        self._next_load_at = 0.0
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Queues a command. Any thread may call it."""
        self._commands.append(command)
        self._core.wake()

    def stop(self) -> None:
        """Ends the thread after the current step. Does not wait. Idempotent."""
        self._is_stopping = True
        self._core.wake()

    def stack(self) -> str:
        """Returns where the thread is now, as a traceback; empty if it does not run."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended."""
        self._thread.join(timeout_s)

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._step()
                self._core.wait()
            self._core.finish_saves(_SAVES_S)
        except BaseException as error:
            _logger.exception("the engine loop died")
            self._post(self._listener.on_failed, error)
        finally:
            self._core.close()

    def _step(self) -> None:
        while self._commands:
            self._execute(self._commands.popleft())
        self._core.run_step(self._deliver)
        if self._is_recording:
            self._deliver_events(self._core.take_kv_events())
        if self._await_saves and not self._core.has_saves:
            for answer in self._await_saves:
                self._post(self._listener.on_saved, answer)
            self._await_saves.clear()
        if self._core.is_stalled or time.monotonic() >= self._next_load_at:
            self.load = self._core.load()
            self._next_load_at = time.monotonic() + _LOAD_INTERVAL_S

    def _execute(self, command: Command) -> None:
        core = self._core
        match command:
            case Add(request):
                self._deliver(self._add(request))
            case Abort():
                self._abort(command)
            case FinishCandidate(request_id, index):
                self._deliver(core.finish_candidate(request_id, index))
            case Move(request_id):
                self._deliver(core.move(request_id))
            case _:
                self._execute_other(command)

    def _execute_other(self, command: Command) -> None:
        """Executes a command that concerns no request of this engine."""
        core, listener = self._core, self._listener
        match command:
            case Prefetch(handoff):
                core.prefetch(handoff)
            case ReleaseHandoff(handoff_id):
                core.release_handoff(handoff_id)
            case ResetPrefixCache(reset):
                self._post(listener.on_reset, (reset, core.reset_prefix_cache()))
            case AwaitSaves(answer):
                self._await_saves.append(answer)
            case RecordKvEvents(on):
                self._is_recording = on
                self._deliver_events(core.watch_kv_events(on))

    def _add(self, request: EngineRequest) -> Sequence[EngineOutput]:
        """Adds a request. A bug that it meets ends this request alone."""
        request_id = request.spec.request_id
        try:
            return self._core.add_request(request)
        except Exception:
            _logger.exception("request %s could not be added", request_id)
            error = InternalError("the engine failed on this request")
            return [self._core.fail_request(request_id, error)]

    def _abort(self, command: Abort) -> None:
        self._deliver(self._core.abort(command.request_ids))
        if command.acknowledge:
            self._post(self._listener.on_aborted, command.request_ids)

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        if outputs:
            self._post(self._listener.on_outputs, outputs)

    def _deliver_events(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._post(self._listener.on_kv_events, events)

    def _post(self, handler: Callable[[Any], None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(handler, argument)
        except RuntimeError:
            # The event loop was closed first, so the listener is gone.
            self._is_stopping = True
