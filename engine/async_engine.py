"""`AsyncEngine`: an engine in a thread of its own, behind asyncio.

The event loop and the engine exchange plain messages: requests and aborts go
down a queue, each step's outputs come back in one call. Handlers only await.
No grpc here; torch is imported only when an engine is built.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from baton.errors import (
    BatonError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import EngineLoad, EngineRequest, FinishReason, RequestOutput

__all__ = ["AsyncEngine"]

OutputHandler = Callable[[RequestOutput], None]

_LOAD_INTERVAL_S = 0.02
_CLOSE_TIMEOUT_S = 10.0

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class _ReleaseHandoff:
    handoff_id: str


class AsyncEngine:
    """One engine for coroutines to use. Make it with `AsyncEngine.start`.

    All methods are called on the event loop that made it.

    Attributes:
        config: as given.
        info: the loaded model's facts.
        namespace: digest that block keys are rooted in.
        num_blocks: KV blocks in the pool.
    """

    def __init__(self, core: EngineCore) -> None:
        self.config = core.config
        self.info = core.info
        self.namespace = core.namespace
        self.num_blocks = core.num_blocks
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[str, OutputHandler] = {}
        # Aborted requests whose last output is still to come, by id: a new
        # request of the same id must not be given the old one's tokens.
        self._aborting: dict[str, int] = {}
        self._commands: deque[_Add | _Abort | _ReleaseHandoff] = deque()
        self._load = core.load()
        self._draining = False
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="baton-engine", daemon=True)
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
        step that brings it something; all outputs of one step are delivered
        within one loop callback. The last call has `finish_reason` set, and
        always comes, unless `abort` is called first.

        Raises:
            InvalidArgumentError: a token id or length the model cannot take,
                or a request of that id is live.
            FailedPreconditionError: the handoff is not for this engine.
            ResourceExhaustedError: the queue is full, or the request is larger
                than the pool can ever hold.
            UnavailableError: the engine drains or has died.
        """
        if self._draining or self._closing or self._failed.done():
            raise UnavailableError("this replica takes no new requests")
        if request.request_id in self._handlers:
            limit = "unique among running requests"
            raise InvalidArgumentError.for_field("request_id", request.request_id, limit)
        limit_live = self.config.max_num_waiting + self.config.max_num_seqs
        if len(self._handlers) >= limit_live:
            raise ResourceExhaustedError(f"{limit_live} requests are queued here already")
        self._core.check(request)
        self._handlers[request.request_id] = on_output
        self._idle.clear()
        self._command(_Add(request))

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
            self._command(_Abort(live))
        if not self._handlers:
            self._idle.set()
        return len(live)

    def release_handoff(self, handoff_id: str) -> None:
        """Drops what the connector kept for one handoff alone."""
        self._command(_ReleaseHandoff(handoff_id))

    def load(self) -> EngineLoad:
        """How busy the engine is, as of a recent step."""
        return replace(self._load, draining=self._draining)

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
        self._core.wake()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        self._end_all(UnavailableError("the engine of this replica has stopped"))

    # On the event loop.

    def _command(self, command: _Add | _Abort | _ReleaseHandoff) -> None:
        self._commands.append(command)
        self._core.wake()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            is_last = output.finish_reason is not None
            if output.request_id in self._aborting:
                if is_last:
                    self._forget_aborted(output.request_id)
                continue
            take = self._handlers.pop if is_last else self._handlers.get
            handler = take(output.request_id, None)
            if handler is not None:  # None: `close` has told it its end already
                self._call(handler, output)
        if not self._handlers:
            self._idle.set()

    def _call(self, handler: OutputHandler, output: RequestOutput) -> None:
        """One handler's bug must not cost its neighbours their outputs."""
        try:
            handler(output)
        except Exception:
            _logger.exception("an output of %s was lost", output.request_id)

    def _forget_aborted(self, request_id: str) -> None:
        self._aborting[request_id] -= 1
        if self._aborting[request_id] == 0:
            del self._aborting[request_id]

    def _fail(self, cause: BaseException) -> None:
        if not self._failed.done():
            self._failed.set_result(cause)
        self._end_all(UnavailableError("the engine of this replica has stopped"))

    def _end_all(self, error: BatonError) -> None:
        """Tells every request that is left; nothing comes from the engine any more."""
        reason = FinishReason.ERROR
        lost = list(self._handlers)
        self._aborting.clear()
        self._deliver(
            [RequestOutput(request_id=i, finish_reason=reason, error=error) for i in lost]
        )

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._step_until_closed()
        except BaseException as error:
            _logger.exception("the engine loop died")
            self._post(self._fail, error)
        finally:
            self._core.close()

    def _step_until_closed(self) -> None:
        next_load_at = 0.0
        while not self._closing:
            outputs: list[RequestOutput] = []
            while self._commands:
                outputs += self._obey(self._commands.popleft())
            outputs += self._core.step()
            if outputs:
                self._post(self._deliver, outputs)
            if self._core.is_stalled or time.monotonic() >= next_load_at:
                self._load = self._core.load()
                next_load_at = time.monotonic() + _LOAD_INTERVAL_S
            self._core.wait()

    def _obey(self, command: _Add | _Abort | _ReleaseHandoff) -> list[RequestOutput]:
        match command:
            case _Add(request):
                self._core.add_request(request)
            case _Abort(request_ids):
                return self._core.abort(request_ids)
            case _ReleaseHandoff(handoff_id):
                self._core.release_handoff(handoff_id)
        return []

    def _post(self, handler: Callable[..., None], argument: object) -> None:
        try:
            self._loop.call_soon_threadsafe(handler, argument)
        except RuntimeError:
            # The event loop was closed first; nobody is left to tell.
            self._closing = True
