"""`AsyncEngine`: an engine in a thread of its own, behind asyncio.

Calls of the scheduler go down a queue to the thread (`engine.loop.engine_thread`), and the
outputs of each step come back in one call. Nothing here blocks the event loop. This module imports
no grpc, and torch only when it builds an engine.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from baton.common.errors import (
    AlreadyExistsError,
    InternalError,
    Reason,
    ResourceExhaustedError,
    UnavailableError,
)
from engine.config import EngineConfig
from engine.kv_cache.events import KvEvent, KvEventFeeds
from engine.loop.build import build_engine
from engine.loop.core import EngineCore
from engine.loop.engine_thread import EngineThread
from engine.loop.questions import EngineQuestions
from engine.request import EngineLoad, EngineOutput, EngineRequest, FinishReason, Role
from engine.schedule.scheduler import Scheduler
from kvstore.guard.status import BackendStatus
from kvstore.handoff import KvHandoff, connector_name

if TYPE_CHECKING:
    from baton.common.security.cluster import ClusterSecurity

__all__ = ["AsyncEngine"]

OutputHandler = Callable[[EngineOutput], None]

_CLOSE_TIMEOUT_S = 10.0
_RETRY_AFTER_S = 1.0
_WATCH_INTERVAL_S = 0.1
_MIN_WAITING_EVENTS = 1024

_logger = logging.getLogger("baton.engine")


class AsyncEngine:
    """One engine for coroutines. `AsyncEngine.start` makes it.

    Call all methods on the event loop that made it.

    Attributes:
        config: the limits.
        info: the loaded model's facts.
        form: how KV looks between tiers.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
        kv_metrics: counts of transfers.
        metrics: counts of requests and steps.
        lends_prefixes: whether `lend_prefix` can lend.
        role: which requests it takes.
        questions: what coroutines ask the scheduler; most are asked through methods here.
    """

    role: Role = Role.BOTH

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self.info = core.info
        self.namespace = core.namespace
        self.form = core.form
        self.num_blocks = core.num_blocks
        self.lends_prefixes = core.lends_prefixes
        self.kv_metrics = core.kv_metrics
        self.metrics = core.metrics
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, OutputHandler] = {}
        # Number of unacknowledged aborts by request id. Until then outputs of that id are dropped,
        # as a new request with the same id must not get the tokens of the old one.
        self._aborting: dict[str, int] = {}
        self._draining = False
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._thread = EngineThread(core, self._loop, self)
        self.questions = EngineQuestions(self._thread, self._loop)
        self._feeds = KvEventFeeds(
            # A snapshot has at most one event with one key per block and slot.
            2 * (core.num_blocks + core.scheduler.kv.pool.num_slots) + _MIN_WAITING_EVENTS,
            self._record_kv_events,
        )
        self._thread.start()
        self._is_stalled = False
        self._step_watch = self._loop.create_task(self._watch_steps())

    @classmethod
    async def start(
        cls, config: EngineConfig, security: "ClusterSecurity | None" = None
    ) -> "AsyncEngine":
        """Loads the model off the event loop and starts the step loop.

        Args:
            config: the engine's.
            security: for the connector's calls to other processes.

        Raises:
            ConfigurationError: the checkpoint, a flag or the connector is bad.
        """
        return cls(await asyncio.to_thread(build_engine, config, security))

    def check(self, request: EngineRequest) -> None:
        """Refuses a request that could never finish. Any thread may call it: a long prompt takes
        milliseconds.

        Raises:
            InvalidArgumentError: the model cannot take a token id or the length.
            FailedPreconditionError: the handoff is not for this engine.
            ResourceExhaustedError: the request needs more blocks than the pool has.
        """
        self._core.check(request)

    def submit(
        self, request: EngineRequest, on_output: OutputHandler, *, is_checked: bool = False
    ) -> None:
        """Queues a request.

        Args:
            request: the request; its id must not be live.
            on_output: called on the event loop, at most once per candidate and step. All outputs
                of one step are delivered within one loop callback. The last output has
                `is_last`; it always comes, unless `abort` is called first.
            is_checked: whether `check` has accepted the request.

        Raises:
            AlreadyExistsError: a request with this id is live.
            ResourceExhaustedError: the queue is full.
            BatonError: `check` refuses the request.
            UnavailableError: the engine drains, has stopped, or has another role.
        """
        kind = Role.PREFILL if request.hands_over else Role.DECODE
        if self._draining or self._has_stopped or kind not in self.role:
            raise UnavailableError(
                "this replica takes no new requests", reason=Reason.NO_REPLICA_READY
            )
        request_id = request.spec.request_id
        if request_id in self._handlers:
            raise AlreadyExistsError.for_request_id(request_id)
        if len(self._handlers) >= self.config.max_requests:
            raise ResourceExhaustedError(
                f"{self.config.max_requests} requests are queued here already",
                _RETRY_AFTER_S,
                reason=Reason.REPLICAS_FULL,
            )
        if not is_checked:
            self.check(request)
        self._handlers[request_id] = on_output
        self._idle.clear()
        self._thread.call(Scheduler.try_add, request)

    @property
    def request_ids(self) -> Sequence[str]:
        """Ids of the requests that have not had their last output."""
        return list(self._handlers)

    def abort(self, request_ids: Iterable[str], *, notify: bool = False) -> int:
        """Ends requests and frees what they hold. Unknown ids are fine.

        Args:
            request_ids: ids of the requests.
            notify: whether their handlers get a last output, ABORTED.

        Returns:
            How many of them were live.
        """
        live = [request_id for request_id in request_ids if request_id in self._handlers]
        if not notify:
            for request_id in live:
                del self._handlers[request_id]
                self._aborting[request_id] = self._aborting.get(request_id, 0) + 1
        if live:
            answer = self.on_outputs if notify else partial(self._take_aborted, live)
            self._thread.ask(answer, Scheduler.abort, live)
        self._note_idle()
        return len(live)

    def finish_candidate(self, request_id: str, index: int) -> None:
        """Ends one candidate and frees what it alone holds. Unknown ids and indices are fine.

        Outputs of a step in flight may still come for it. If it was the last candidate, its
        request ends, ABORTED.
        """
        if request_id in self._handlers:
            self._thread.call(Scheduler.finish_candidate, request_id, index)

    def move(self, request_id: str) -> None:
        """Ends a request that continues on another engine, at once or when its KV is saved.

        Its last output has the reason HANDOFF, and a handoff if the connector made one. Unknown
        ids are fine.
        """
        if request_id in self._handlers:
            self._thread.call(Scheduler.move, request_id)

    def prefetch(self, handoff: KvHandoff) -> None:
        """Starts to load blocks of a prompt that a prefill engine is still computing.

        They are loaded as far as there is room. Their request comes later, with a handoff of the
        same id.

        Raises:
            FailedPreconditionError: the handoff is not for this engine.
        """
        connector = connector_name(self.config.kv_connector)
        handoff.check_compatible(namespace=self.namespace, connector=connector)
        self._thread.call(Scheduler.prefetch, handoff)

    def release_handoff(self, handoff_id: str) -> None:
        """Ends a handoff's lease and deletes what was saved for it alone."""
        self._thread.call(Scheduler.release_handoff, handoff_id)

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks it held.

        Raises:
            UnavailableError: the engine has stopped.
        """
        if self._has_stopped:
            raise _stopped()
        return await self.questions.reset_prefix_cache()

    async def lend_prefix(self, keys: Sequence[bytes]) -> KvHandoff | None:
        """Lends the longest cached prefix of a prompt to another engine.

        See `EngineQuestions.lend_prefix`; `release_handoff` ends the lease. An engine that drains
        lends nothing more, as it waits for the ends of all leases.
        """
        if self._has_stopped:
            raise _stopped()
        if self._draining:
            return None
        return await self.questions.lend_prefix(keys)

    def kv_events(self) -> AsyncGenerator[Sequence[KvEvent], None]:
        """Returns a feed of the prefix cache's changes; see `KvEventFeeds.follow`."""
        return self._feeds.follow()

    def load(self) -> EngineLoad:
        """Returns how busy the engine was at a recent step."""
        load = self._thread.load_now()
        return replace(load, draining=self._draining, stalled=self._is_stalled, role=self.role)

    @property
    def kv_backends(self) -> Sequence[BackendStatus]:
        """Whether blocks can be loaded from each backend of the connector and saved to it."""
        return self._core.kv_backends

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests from now on, and waits for the others to end, and for their KV.

        KV that is being saved is waited for, and lent blocks until their leases have ended: other
        engines need them.

        Returns:
            How many requests had not ended at the timeout.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError, UnavailableError):  # it has stopped
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                if not self._has_stopped:
                    await self.questions.wait_for_saves()
        return len(self._handlers)

    async def wait_failed(self) -> BaseException:
        """Waits until the engine dies of a bug; returns the cause. The process should end then.

        Its requests have ended with `UnavailableError`, as another replica can serve them.
        """
        return await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stops the thread and closes the connector. Idempotent.

        Requests that have not ended do so with `UnavailableError`. A thread whose step hangs is
        left behind.
        """
        self._step_watch.cancel()
        await asyncio.to_thread(self._stop_thread)
        self._end_all()

    def shutdown(self) -> None:
        """Like `close`, but blocks the event loop until the current step has ended. The event
        loop may have been closed.
        """
        self._stop_thread()
        if not self._loop.is_closed():
            self._step_watch.cancel()
            self._end_all()

    def _stop_thread(self) -> None:
        self._closing = True
        self._thread.stop()
        self._thread.join(0 if self._is_stalled else _CLOSE_TIMEOUT_S)

    async def _watch_steps(self) -> None:
        """Notices steps that hang; fails the engine if one does for too long."""
        watch, timeout_s = self._core.step_watch, self.config.step_timeout_s
        while not self._has_stopped:
            before = self._loop.time()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            late_s = self._loop.time() - before - _WATCH_INTERVAL_S
            if late_s > _WATCH_INTERVAL_S:  # the step has probably been as late
                watch.excuse(late_s)
            elapsed_s, limit_s = watch.elapsed_s(), watch.limit_s()
            if elapsed_s > limit_s and not self._is_stalled:
                message = "a step has taken %.1f s; at most %.1f s were expected. It is here:\n%s"
                _logger.warning(message, elapsed_s, limit_s, self._thread.stack())
            elif self._is_stalled and elapsed_s <= limit_s:
                _logger.warning("the step has ended")
            self._is_stalled = elapsed_s > limit_s
            if elapsed_s > max(timeout_s, limit_s):
                self.on_failed(InternalError(f"a step has not ended within {timeout_s:g} s"))

    # Calls from the engine's thread (`EngineListener`).

    def on_outputs(self, outputs: Sequence[EngineOutput]) -> None:
        """Delivers outputs to their handlers."""
        for output in outputs:
            if output.request_id in self._aborting:
                if output.handoff is not None:  # made just before the abort; it has no receiver
                    self.release_handoff(output.handoff.handoff_id)
                continue
            take = self._handlers.pop if output.is_last else self._handlers.get
            handler = take(output.request_id, None)
            if handler is not None:  # None: `close` has ended the request already
                self._call(handler, output)
        self._note_idle()

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Delivers events to the followers."""
        self._feeds.deliver(events)

    def on_failed(self, cause: BaseException) -> None:
        """Ends the remaining requests, as the engine has died."""
        if not self._failed.done():
            self._failed.set_result(cause)
        self._end_all()

    # Answers from the engine's thread.

    def _take_aborted(self, request_ids: Sequence[str], outputs: Sequence[EngineOutput]) -> None:
        """Frees the ids of aborted requests for new requests, as no output of theirs follows."""
        self.on_outputs(outputs)
        for request_id in request_ids:
            left = self._aborting.pop(request_id, 1) - 1
            if left:
                self._aborting[request_id] = left

    def _record_kv_events(self, on: bool) -> None:
        if on:
            answer = self._feeds.deliver_snapshot
            self._thread.ask(answer, lambda engine: engine.kv.events.start_recording())
        else:
            self._thread.call(lambda engine: engine.kv.events.stop_recording())

    @property
    def _has_stopped(self) -> bool:
        return self._closing or self._failed.done()

    def _call(self, handler: OutputHandler, output: EngineOutput) -> None:
        """Calls a handler; its errors must not affect other requests."""
        try:
            handler(output)
        except Exception:
            _logger.exception("an output of %s was lost", output.request_id)

    def _note_idle(self) -> None:
        if not self._handlers:
            self._idle.set()

    def _end_all(self) -> None:
        """Ends all requests and resets, as the engine has stopped."""
        self._aborting.clear()
        reason, error = FinishReason.ERROR, _stopped()
        self.on_outputs(
            [
                EngineOutput(request_id=name, finish_reason=reason, is_last=True, error=error)
                for name in self._handlers
            ]
        )
        self.questions.end(error)


def _stopped() -> UnavailableError:
    return UnavailableError("the engine of this replica has stopped")
