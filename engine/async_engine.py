"""`AsyncEngine`: an engine in a thread of its own, behind asyncio.

The event loop and the engine exchange plain messages (`engine.engine_thread`):
requests and aborts go down a queue, each step's outputs come back in one call.
Handlers only await. No grpc here; torch is imported only when an engine is built.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace

from baton.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine_thread import (
    Abort,
    Add,
    EngineThread,
    FinishCandidate,
    Prefetch,
    RecordKvEvents,
    ReleaseHandoff,
    ResetPrefixCache,
)
from engine.kv_cache.events import KvEvent
from engine.kv_event_feed import KvEventFeeds
from engine.request import EngineLoad, EngineRequest, FinishReason, RequestOutput
from kvstore.handoff import KvHandoff, connector_name

__all__ = ["AsyncEngine"]

OutputHandler = Callable[[RequestOutput], None]

_CLOSE_TIMEOUT_S = 10.0
_MIN_WAITING_EVENTS = 1024

_logger = logging.getLogger("baton.engine")


class AsyncEngine:
    """One engine for coroutines to use. Make it with `AsyncEngine.start`.

    All methods are called on the event loop that made it.

    Attributes:
        config: as given.
        info: the loaded model's facts.
        form: what KV looks like between tiers.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
        kv_metrics: what transfers add up to.
    """

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self.info = core.info
        self.namespace = core.namespace
        self.form = core.form
        self.num_blocks = core.num_blocks
        self.kv_metrics = core.kv_metrics
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, OutputHandler] = {}
        # Aborted requests of which the engine may still tell, by id: a new
        # request of the same id must not be given the old one's tokens.
        self._aborting: dict[str, int] = {}
        self._resets: set[asyncio.Future[int]] = set()
        self._draining = False
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._thread = EngineThread(core, self._loop, self)
        self._feeds = KvEventFeeds(
            # A snapshot has at most one key per block.
            2 * core.num_blocks + _MIN_WAITING_EVENTS,
            lambda on: self._thread.put(RecordKvEvents(on)),
        )
        self._thread.start()

    @classmethod
    async def start(cls, config: EngineConfig) -> "AsyncEngine":
        """Loads the model off the event loop and starts the step loop.

        Raises:
            ConfigurationError: the checkpoint, a flag or the connector is bad.
        """
        return cls(await asyncio.to_thread(EngineCore.build, config))

    def submit(self, request: EngineRequest, on_output: OutputHandler) -> None:
        """Admits a request. `on_output` is called on the event loop, once per
        candidate and step that brings it something; all outputs of one step are
        delivered within one loop callback. The last call has `is_last` set, and
        always comes, unless `abort` is called first.

        Raises:
            InvalidArgumentError: a token id or length the model cannot take,
                or a request of that id is live.
            FailedPreconditionError: the handoff is not for this engine.
            ResourceExhaustedError: the queue is full, or the request is larger
                than the pool can ever hold.
            UnavailableError: the engine drains or has died.
        """
        if self._draining or self._has_stopped:
            raise UnavailableError("this replica takes no new requests")
        request_id = request.spec.request_id
        if request_id in self._handlers:
            limit = "unique among running requests"
            raise InvalidArgumentError.for_field("request_id", request_id, limit)
        limit_live = self.config.max_num_waiting + self.config.max_num_seqs
        if len(self._handlers) >= limit_live:
            raise ResourceExhaustedError(f"{limit_live} requests are queued here already")
        self._core.check(request)
        self._handlers[request_id] = on_output
        self._idle.clear()
        self._thread.put(Add(request))

    @property
    def request_ids(self) -> Sequence[str]:
        """The requests that have not had their last output."""
        return list(self._handlers)

    def abort(self, request_ids: Iterable[str], *, notify: bool = False) -> int:
        """Ends requests and frees what they hold. Unknown ids are fine.

        Args:
            request_ids: the requests.
            notify: whether their handlers get a last output, ABORTED.

        Returns:
            How many were live.
        """
        live = [request_id for request_id in request_ids if request_id in self._handlers]
        if not notify:
            for request_id in live:
                del self._handlers[request_id]
                self._aborting[request_id] = self._aborting.get(request_id, 0) + 1
        if live:
            self._thread.put(Abort(live, acknowledge=not notify))
        self._note_idle()
        return len(live)

    def finish_candidate(self, request_id: str, index: int) -> None:
        """Ends one candidate and frees what it alone holds. Unknown ones are fine.

        Outputs for it that are under way may still come, and none after them.
        With its last candidate a request ends, ABORTED.
        """
        if request_id in self._handlers:
            self._thread.put(FinishCandidate(request_id, index))

    def prefetch(self, handoff: KvHandoff) -> None:
        """Begins to load full blocks of a prompt that prefill is still computing, as far as
        there is room. The request that needs them comes later, with a handoff of this id.

        Raises:
            FailedPreconditionError: the handoff is not for this engine.
        """
        connector = connector_name(self.config.kv_connector)
        handoff.check_compatible(namespace=self.namespace, connector=connector)
        self._thread.put(Prefetch(handoff))

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what the connector kept for one handoff alone."""
        self._thread.put(ReleaseHandoff(handoff_id))

    async def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks were cached.

        Raises:
            UnavailableError: the engine has stopped.
        """
        if self._has_stopped:
            raise _stopped()
        answer: asyncio.Future[int] = self._loop.create_future()
        self._resets.add(answer)
        self._thread.put(ResetPrefixCache(answer))
        try:
            return await answer
        finally:
            self._resets.discard(answer)

    def kv_events(self) -> AsyncGenerator[Sequence[KvEvent], None]:
        """What enters and leaves the prefix cache; see `KvEventFeeds.follow`."""
        return self._feeds.follow()

    def load(self) -> EngineLoad:
        """How busy the engine is, as of a recent step."""
        return replace(self._thread.load, draining=self._draining)

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests from now on and waits for the running ones.

        Returns:
            How many were still running at the timeout.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return len(self._handlers)

    async def wait_failed(self) -> BaseException:
        """Waits until the engine dies of a bug; returns the cause. Its requests got
        `UnavailableError`, as another replica can take them; the process should end.
        """
        return await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stops the thread and closes the connector. Requests still running end
        with `UnavailableError`. Idempotent.
        """
        self._closing = True
        self._thread.stop()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        self._end_all()

    # What the engine's thread says (`EngineListener`).

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """Delivers outputs to their handlers."""
        for output in outputs:
            if output.request_id in self._aborting:
                continue
            take = self._handlers.pop if output.is_last else self._handlers.get
            handler = take(output.request_id, None)
            if handler is not None:  # None: `close` has told it its end already
                self._call(handler, output)
        self._note_idle()

    def on_aborted(self, request_ids: Sequence[str]) -> None:
        """The ids may be used again."""
        for request_id in request_ids:
            left = self._aborting.pop(request_id, 1) - 1
            if left:
                self._aborting[request_id] = left

    def on_reset(self, reset: tuple["asyncio.Future[int]", int]) -> None:
        """Answers whoever asked for it and still waits."""
        answer, num_blocks = reset
        if not answer.done():
            answer.set_result(num_blocks)

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Passes events on."""
        self._feeds.deliver(events)

    def on_failed(self, cause: BaseException) -> None:
        """Ends what is left."""
        if not self._failed.done():
            self._failed.set_result(cause)
        self._end_all()

    @property
    def _has_stopped(self) -> bool:
        return self._closing or self._failed.done()

    def _call(self, handler: OutputHandler, output: RequestOutput) -> None:
        """One handler's bug must not cost its neighbours their outputs."""
        try:
            handler(output)
        except Exception:
            _logger.exception("an output of %s was lost", output.request_id)

    def _note_idle(self) -> None:
        if not self._handlers:
            self._idle.set()

    def _end_all(self) -> None:
        """Tells everyone who waits; nothing comes from the engine any more."""
        self._aborting.clear()
        reason, error = FinishReason.ERROR, _stopped()
        self.on_outputs(
            [
                RequestOutput(request_id=name, finish_reason=reason, is_last=True, error=error)
                for name in self._handlers
            ]
        )
        for answer in self._resets:
            if not answer.done():
                answer.set_exception(error)


def _stopped() -> UnavailableError:
    return UnavailableError("the engine of this replica has stopped")
