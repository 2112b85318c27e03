"""`AsyncLLM`: the engine in this process for coroutines, with results as they come.

prompt -> SpecMaker -> AsyncEngine -> Completion per request -> results
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

from baton.common.errors import BatonError, FailedPreconditionError, InternalError, UnavailableError
from baton.common.request.prompts import ParsedPrompt, Prompt, parse_prompt, refuse_lora
from baton.common.request.results import RequestOutput
from baton.common.request.sampling_params import RequestOutputKind, SamplingParams
from baton.common.request.wire import Params
from baton.offline.engine_args import EngineArgs
from baton.offline.model import OfflineModel
from baton.offline.request import OfflineRequest
from baton.offline.tokenizer import OfflineTokenizer
from engine.loop.async_engine import AsyncEngine
from engine.request import EngineOutput, EngineRequest
from router.requests.input_threads import MAX_INLINE_LENGTH

__all__ = ["AsyncLLM"]


class AsyncLLM:
    """A model in this process, for coroutines. It loads the model when it is made, and belongs to
    the event loop in which `generate` is called first.

    Args:
        model: folder, GGUF file, `demo`, `smollm2`, `gemma3-270m`, or Hugging Face Hub name.
        arguments: as in `LLM`.

    Raises:
        ConfigurationError: the checkpoint or an argument's value is bad.
        TypeError: an argument that does not exist.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        self._load(EngineArgs(model, **arguments))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Loads the model.

        Raises:
            ConfigurationError: the checkpoint is bad.
        """
        made = cls.__new__(cls)
        made._load(engine_args)
        return made

    def _load(self, args: EngineArgs) -> None:
        self._model = OfflineModel(args)
        self._core = self._model.core
        self._engine: AsyncEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._numbers = count()
        self._unsent: set[_Unsent] = set()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt and yields results as they come, the last one with `finished`.

        `SamplingParams.output_kind` says whether a result has everything so far, which is the
        default, or only what is new. Steps that end while the caller is busy come in one result.
        Leaving the loop aborts the request when the generator is closed
        (`contextlib.aclosing`), as does cancelling the task that reads it.

        Args:
            prompt: a text, a list of token ids, or a dictionary as `baton.prompts.TextPrompt` or
                `baton.prompts.TokensPrompt`.
            sampling_params: as in `LLM.generate`.
            request_id: names the request for `abort`; None: it gets a name.
            lora_request: must be None.
            priority: orders waiting requests.
            timeout_s: the longest time that the request may take; None: any.

        Raises:
            InvalidArgumentError: the model cannot take the prompt or a parameter, or a request
                of this id is running.
            FailedPreconditionError: another event loop uses this object, or the request limits
                the reasoning part, whose tags are not set.
            ResourceExhaustedError: the queue is full, or the request needs more KV blocks than
                the pool has.
            DeadlineExceededError: `timeout_s` passed.
            UnavailableError: `shutdown` was called, or the engine has failed.
        """
        refuse_lora(lora_request)
        engine = self._running_engine()
        params = self._model.complete(sampling_params)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        name = f"async-{next(self._numbers)}" if request_id is None else request_id
        with self._abortable(name) as unsent:
            request = await self._make(
                name, parse_prompt(prompt), params, priority=priority, deadline=deadline
            )
        if unsent.is_aborted:
            request.abort()
            yield request.result()
            return
        stream = _Stream(engine, request, params.output_kind)
        try:
            stream.start()
            while not stream.has_ended:
                result = await stream.next_result()
                if result is not None:
                    yield result
        finally:
            stream.abort()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several: their last results have the finish reason "abort". Unknown
        ids are fine.
        """
        request_ids = {request_id} if isinstance(request_id, str) else set(request_id)
        for unsent in self._unsent:
            unsent.is_aborted = unsent.is_aborted or unsent.request_id in request_ids
        if self._engine is not None:
            self._engine.abort(request_ids, notify=True)

    async def get_tokenizer(self) -> OfflineTokenizer:
        """Returns the tokenizer that turns prompts into tokens."""
        return self._model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that hold if none are given."""
        return self._model.default_params()

    async def reset_prefix_cache(self) -> int:
        """Empties the prefix cache; returns how many KV blocks were cached.

        Raises:
            UnavailableError: `shutdown` was called, or the engine has failed.
        """
        return await self._running_engine().reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends running requests with `UnavailableError`, and frees the engine. Idempotent."""
        self._is_closed = True
        if self._engine is None:
            self._core.close()
        else:
            self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _running_engine(self) -> AsyncEngine:
        """Returns the engine; starts it with the first request."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise UnavailableError("this AsyncLLM was shut down")
        if self._engine is None:
            self._engine, self._loop = AsyncEngine(self._core), loop
        if self._loop is not loop:
            raise FailedPreconditionError("another event loop uses this AsyncLLM; make a new one")
        return self._engine

    @contextmanager
    def _abortable(self, request_id: str) -> Iterator["_Unsent"]:
        """Lets `abort` find a request while it is made, before the engine has it."""
        unsent = _Unsent(request_id)
        self._unsent.add(unsent)
        try:
            yield unsent
        finally:
            self._unsent.remove(unsent)

    async def _make(
        self, name: str, prompt: ParsedPrompt, params: SamplingParams, **fields: Any
    ) -> OfflineRequest:
        """Makes the request; a thread tokenizes a long text."""
        if len(prompt.text or "") <= MAX_INLINE_LENGTH:
            return self._model.make_request(name, prompt, params, **fields)
        return await asyncio.to_thread(self._model.make_request, name, prompt, params, **fields)


@dataclass(slots=True, eq=False)
class _Unsent:
    """A request that is being made, and whether `abort` has named it."""

    request_id: str
    is_aborted: bool = False


class _Stream:
    """One request between the engine, which adds outputs, and the generator that yields results.

    Attributes:
        has_ended: whether the last result was returned.
    """

    def __init__(
        self, engine: AsyncEngine, request: OfflineRequest, kind: RequestOutputKind
    ) -> None:
        self.has_ended = False
        self._engine = engine
        self._request = request
        self._kind = kind
        self._has_news = asyncio.Event()
        self._error: BatonError | None = None
        self._is_live = False  # in the engine

    def start(self) -> None:
        """Sends the request to the engine."""
        self._request.start()
        self._engine.submit(EngineRequest(spec=self._request.spec), self._on_output)
        self._is_live = True

    async def next_result(self) -> RequestOutput | None:
        """Waits for outputs; returns their result, or None if they have nothing to show.

        Raises:
            BatonError: the request failed.
        """
        await self._has_news.wait()
        self._has_news.clear()
        if self._error is not None:
            raise self._error
        self.has_ended = self._request.is_finished
        if self._kind is RequestOutputKind.DELTA:
            return self._request.new_result()
        if self._kind is RequestOutputKind.FINAL_ONLY and not self.has_ended:
            return None
        return self._request.result()

    def abort(self) -> None:
        """Ends the request in the engine, if it has not ended."""
        if self._is_live:
            self._is_live = False
            self._engine.abort([self._request.spec.request_id])

    def _on_output(self, output: EngineOutput) -> None:
        self._is_live = self._is_live and not output.is_last
        try:
            if self._request.add(output):
                self._engine.finish_candidate(output.request_id, output.index)
        except BatonError as error:
            self._error = error
        except Exception:
            self._error = InternalError("an output of the request could not be read")
            raise  # to the log
        finally:
            self._after_output()

    def _after_output(self) -> None:
        if self._request.is_finished:
            self.abort()  # a stop text, which the engine does not check, ended it
        self._has_news.set()
