"""`EngineQuestions`: what coroutines ask the scheduler of an engine that runs in its own thread."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from engine.groups.states import new_handoff_id
from engine.kv_cache.token_log import TokenEvent, TokenLog
from engine.loop.engine_thread import EngineThread
from engine.request import PrefixRequest
from engine.schedule.scheduler import Scheduler
from kvstore.handoff import KvHandoff

__all__ = ["EngineQuestions"]

_T = TypeVar("_T")


class EngineQuestions:
    """Questions that the engine's thread answers between steps. Event loop only.

    Args:
        thread: the engine's.
        loop: the event loop.
    """

    def __init__(self, thread: EngineThread, loop: asyncio.AbstractEventLoop) -> None:
        self._thread = thread
        self._loop = loop
        self._open: set[asyncio.Future[Any]] = set()

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks it held.

        Raises:
            UnavailableError: the engine has stopped.
        """
        return await self._answer(
            lambda answer: self._thread.ask(answer, Scheduler.reset_prefix_cache)
        )

    async def lend_prefix(self, keys: Sequence[bytes]) -> KvHandoff | None:
        """Lends the longest cached prefix of a prompt; its lease ends if this is cancelled.

        Args:
            keys: keys of the prompt's transfer blocks.

        Returns:
            The handoff; None if the cache holds no block of it, or has no room to keep them.

        Raises:
            UnavailableError: the engine has stopped.
        """
        lease_id, handoff = new_handoff_id(), None

        def ask(answer: Callable[[KvHandoff | None], None]) -> None:
            request = PrefixRequest(lease_id, keys, partial(self._thread.post, answer))
            self._thread.call(Scheduler.lend_prefix, request)

        try:
            handoff = await self._answer(ask)
            return handoff
        finally:
            if handoff is None:
                self._thread.call(Scheduler.release_handoff, lease_id)

    async def wait_for_saves(self) -> None:
        """Waits until no KV is being saved, or lent to other engines that may still read it.

        Raises:
            UnavailableError: the engine has stopped.
        """

        def ask(answer: Callable[[None], None]) -> None:
            self._thread.ask_when(answer, _has_no_saves)

        await self._answer(ask)

    def log_tokens(self) -> None:
        """Starts the log that `token_events` reads. Call it before the first request."""
        self._thread.call(_log_tokens)

    def repeat_tokens(self) -> None:
        """Makes `token_events` begin again with the whole content."""
        self._thread.call(_repeat_tokens)

    async def token_events(self) -> Sequence[TokenEvent]:
        """Waits for changes of the prefix cache, and returns all of them, with the blocks' tokens.

        At first, and when they were asked for too late, it returns the whole content. Only one
        caller may wait.

        Raises:
            UnavailableError: the engine has stopped.
        """

        def wait(answer: Callable[[None], None]) -> None:
            self._thread.ask_when(answer, lambda scheduler: _token_log(scheduler).has_events)

        def take(answer: Callable[[Sequence[TokenEvent]], None]) -> None:
            self._thread.ask(answer, lambda scheduler: _token_log(scheduler).take_events())

        await self._answer(wait)
        return await self._answer(take)

    def end(self, error: Exception) -> None:
        """Answers all open questions with an error, as the engine has stopped."""
        for future in self._open:
            if not future.done():
                future.set_exception(error)

    async def _answer(self, ask: Callable[[Callable[[_T], None]], None]) -> _T:
        future: asyncio.Future[_T] = self._loop.create_future()
        self._open.add(future)
        ask(partial(_set_result, future))
        try:
            return await future
        finally:
            self._open.discard(future)


def _has_no_saves(scheduler: Scheduler) -> bool:
    return not (scheduler.has_open_saves or scheduler.lends_blocks)


def _log_tokens(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    kv.pool.log_tokens(kv.spec.block_size)


def _repeat_tokens(scheduler: Scheduler) -> None:
    _token_log(scheduler).start_over()


def _token_log(scheduler: Scheduler) -> TokenLog:
    log = scheduler.kv.pool.token_log
    assert log is not None, "the caller has called log_tokens"
    return log


def _set_result(future: "asyncio.Future[_T]", result: _T) -> None:
    """Sets the result of a future, unless it was cancelled."""
    if not future.done():
        future.set_result(result)
