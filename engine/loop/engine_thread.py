"""`EngineThread`: runs an `EngineCore` in a thread of its own.

Calls of the scheduler go down a queue, and run between steps. Outputs and answers go up to the
event loop, in order: the outputs of one step in one call.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from engine.kv_cache.events import KvEvent
from engine.kv_transfer.costs import MAX_SILENCE_S
from engine.loop.core import EngineCore
from engine.request import EngineLoad, EngineOutput
from engine.schedule.scheduler import Scheduler

__all__ = ["EngineListener", "EngineThread"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Outputs = Sequence[EngineOutput]

_LOAD_INTERVAL_S = 0.02
# For saves under way when the engine stops; a drain has waited for them before.
_SAVES_S = 2.0

_logger = logging.getLogger("baton.engine")


class EngineListener(Protocol):
    """Receives outputs on the event loop."""

    def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Receives the outputs of a step or a call."""

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Receives a snapshot or changes of the prefix cache."""

    def on_failed(self, cause: BaseException) -> None:
        """Reports that the engine has died; no other call follows."""


class EngineThread:
    """Steps an engine until `stop`, then closes it.

    Args:
        core: the engine. From now on only this thread calls methods that are not thread-safe.
        loop: the event loop that calls the listener's methods.
        listener: receives outputs.

    Attributes:
        load: how busy the engine was at a recent step.
    """

    def __init__(
        self, core: EngineCore, loop: asyncio.AbstractEventLoop, listener: EngineListener
    ) -> None:
        self.load: EngineLoad = core.scheduler.load()
        self._core = core
        self._loop = loop
        self._listener = listener
        self._calls: deque[Callable[[], None]] = deque()
        self._waits: list[tuple[Callable[[Scheduler], bool], Callable[[None], None]]] = []
        self._is_stopping = False
        self._next_load_at = 0.0
        # All calls that came before are made, as of `load`.
        self._called_at = time.monotonic()
        self._is_asleep = False
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(
        self,
        method: Callable[Concatenate[Scheduler, _P], _Outputs | None],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        """Calls a method of the scheduler before the next step; the listener receives the outputs.
        Any thread may call this.
        """
        self._put(lambda: self._deliver(method(self._core.scheduler, *args, **kwargs) or ()))

    def ask(
        self,
        answer: Callable[[_T], None],
        method: Callable[Concatenate[Scheduler, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> None:
        """Like `call`, but the result is passed to `answer`, on the event loop."""
        self._put(lambda: self.post(answer, method(self._core.scheduler, *args, **kwargs)))

    def ask_when(
        self, answer: Callable[[None], None], condition: Callable[[Scheduler], bool]
    ) -> None:
        """Calls `answer` on the event loop after the first step that leaves a condition true."""
        self._put(lambda: self._waits.append((condition, answer)))

    def stop(self) -> None:
        """Ends the thread after the current step. Does not wait. Idempotent."""
        self._is_stopping = True
        self._core.wake()

    def load_now(self) -> EngineLoad:
        """Returns how busy the engine is: `load`, without the prompt tokens that the step under way
        has computed by now. It may take seconds. Any thread may call this.
        """
        load = self.load
        token_s = load.prompt_token_s
        num_computed = self._core.step_watch.num_computed(token_s)
        num_queued_tokens = max(load.num_queued_tokens - num_computed, 0)
        silent_s = time.monotonic() - self._called_at  # an idle engine does not update its load
        return replace(
            load,
            num_queued_tokens=num_queued_tokens,
            queued_prompt_s=num_queued_tokens * token_s,
            load_bytes_per_s=load.load_bytes_per_s if silent_s <= MAX_SILENCE_S else 0.0,
            age_s=self._load_age_s(),
        )

    def _load_age_s(self) -> float:
        """For how long `load` has been out of date: calls of that time may be missing in it."""
        is_current = self._is_asleep and not self._calls
        return 0.0 if is_current else max(time.monotonic() - self._called_at, 0.0)

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
                self._sleep()
            self._core.finish_saves(_SAVES_S)
        except BaseException as error:
            _logger.exception("the engine loop died")
            self.post(self._listener.on_failed, error)
        finally:
            self._core.close()

    def _put(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._core.wake()

    def _sleep(self) -> None:
        self._is_asleep = self._core.is_stalled
        self._core.wait()
        self._is_asleep = False

    def _step(self) -> None:
        while self._calls:
            self._calls.popleft()()
        called_at = time.monotonic()
        self._core.run_step(self._deliver, partial(self._begin_step, called_at))
        scheduler = self._core.scheduler
        if events := scheduler.kv.events.take_events():
            self.post(self._listener.on_kv_events, events)
        for wait in [wait for wait in self._waits if wait[0](scheduler)]:
            self._waits.remove(wait)
            self.post(wait[1], None)
        if self._core.is_stalled or time.monotonic() >= self._next_load_at:
            self._update_load(called_at)

    def _begin_step(self, called_at: float, num_tokens: int) -> None:
        """Updates `load` before a step that may be long: it has requests then that came before."""
        if num_tokens * self.load.prompt_token_s >= _LOAD_INTERVAL_S:
            self._update_load(called_at)

    def _update_load(self, called_at: float) -> None:
        self.load, self._called_at = self._core.scheduler.load(), called_at
        self._next_load_at = time.monotonic() + _LOAD_INTERVAL_S

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        if outputs:
            self.post(self._listener.on_outputs, outputs)

    def post(self, handler: Callable[[Any], None], argument: object) -> None:
        """Calls a handler on the event loop. The engine's thread calls this."""
        try:
            self._loop.call_soon_threadsafe(handler, argument)
        except RuntimeError:
            # The event loop was closed first, so the listener is gone.
            self._is_stopping = True
