"""One prompt at a time through two tiers, or through an undivided engine: what a router does."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from baton.request_spec import RequestSpec
from baton.sampling_params import SamplingParams
from benchmarks.transfer.child import ChildError, start_process
from benchmarks.transfer.tier import Add, Event, Prefetch, Release, serve_tier
from engine.request import CandidateProgress, EngineRequest, FinishReason, RequestOutput

__all__ = ["Route", "Trace", "TwoTiers", "Undivided"]

_ANSWER_S = 300.0
_STOP_S = 20.0
_NUM_TOKENS = 3


@dataclass(slots=True)
class Trace:
    """What became of one prompt. Times are of `time.monotonic`.

    Attributes:
        sent_at: when it was sent to the first engine.
        tokens: that were generated.
        token_times: when each of them came.
        prefill_began_at: when its first chunk was scheduled.
        prefill_ended_at: when its first token was drawn.
        ready_at: when decode had all of it, and scheduled it.
        transfers: starts and ends of all loads and saves.
        num_found_tokens: of the prompt, that the first engine did not compute.
        num_loaded_tokens: of the prompt, that decode did not compute.
    """

    sent_at: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    prefill_began_at: float = 0.0
    prefill_ended_at: float = 0.0
    ready_at: float = 0.0
    transfers: list[tuple[float, float]] = field(default_factory=list)
    num_found_tokens: int = 0
    num_loaded_tokens: int = 0

    def take_tokens(self, output: RequestOutput) -> None:
        """Notes tokens that have come now."""
        self.tokens += output.token_ids
        self.token_times += [time.monotonic()] * len(output.token_ids)

    def seconds_to_token(self, number: int) -> float:
        """From sending the prompt to the arrival of a token, counted from 1."""
        return self.token_times[number - 1] - self.sent_at


class Route(ABC):
    """Engines in processes of their own, and the pipes to them. A prompt goes to the first.

    Args:
        settings: of each engine's `EngineConfig`.
    """

    def __init__(self, *settings: dict[str, Any]) -> None:
        started = [start_process(serve_tier, each) for each in settings]
        self._processes = [process for process, _ in started]
        self._pipes = [pipe for _, pipe in started]
        self._busy = set(self._pipes)  # until they say otherwise: they load
        self._num_added = dict.fromkeys(self._pipes, 0)
        self._num_sent = 0

    def ask(self, prompt: Sequence[int]) -> Trace:
        """Sends a prompt; returns when its last token has come and all transfers are over.

        Raises:
            ChildError: an engine failed, or takes too long.
        """
        self._num_sent += 1
        request = EngineRequest(
            spec=RequestSpec(
                request_id=f"prompt {self._num_sent}",
                prompt_token_ids=tuple(prompt),
                params=SamplingParams(temperature=0.0, seed=0, max_tokens=_NUM_TOKENS),
            )
        )
        self._handle_until_idle(request, Trace())  # loading, or what an earlier prompt left
        trace = Trace()
        self._add(self._pipes[0], request)
        self._handle_until_idle(request, trace)
        if len(trace.tokens) != _NUM_TOKENS:
            raise ChildError(f"{len(trace.tokens)} of {_NUM_TOKENS} tokens came")
        return trace

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends its engine
        for process in self._processes:
            process.join(_STOP_S)
            process.kill()
            process.join()

    @abstractmethod
    def _take(
        self, output: RequestOutput, event: Event, request: EngineRequest, trace: Trace
    ) -> None:
        """Takes in what an engine told of the request."""

    def _add(self, pipe: Connection, request: EngineRequest) -> None:
        self._busy.add(pipe)
        self._num_added[pipe] += 1
        pipe.send(Add(request))

    def _handle_until_idle(self, request: EngineRequest, trace: Trace) -> None:
        give_up_at = time.monotonic() + _ANSWER_S
        while self._busy:
            ready = wait(self._pipes, give_up_at - time.monotonic())
            if not ready:
                raise ChildError(f"an engine has not ended for {_ANSWER_S:g} s")
            for pipe in ready:
                self._handle(pipe, request, trace)

    def _handle(self, pipe: Any, request: EngineRequest, trace: Trace) -> None:
        try:
            event: Event = pipe.recv()
        except EOFError:
            raise ChildError("an engine's process has ended") from None
        trace.transfers += event.transfers
        for output in event.outputs:
            if output.error is not None:
                raise ChildError(f"an engine refused a prompt: {output.error}")
            self._take(output, event, request, trace)
        # It may have been idle before it heard of the request.
        if event.is_idle and event.num_added == self._num_added[pipe]:
            self._busy.discard(pipe)
        else:
            self._busy.add(pipe)


class Undivided(Route):
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)

    def _take(
        self, output: RequestOutput, event: Event, request: EngineRequest, trace: Trace
    ) -> None:
        trace.take_tokens(output)
        trace.num_found_tokens = max(trace.num_found_tokens, output.cached_tokens)


class TwoTiers(Route):
    """An engine of either role; decode hears of blocks while prefill still computes."""

    def __init__(self, settings: dict[str, Any], kv_connector: str) -> None:
        both = settings | {"kv_connector": kv_connector, "kv_load_failure_policy": "fail"}
        super().__init__(both | {"role": "prefill"}, both | {"role": "decode"})
        self._prefill, self._decode = self._pipes
        self._handoff_id = ""

    def _take(
        self, output: RequestOutput, event: Event, request: EngineRequest, trace: Trace
    ) -> None:
        trace.take_tokens(output)
        if output.saved is not None:
            self._decode.send(Prefetch(output.saved))
        elif output.finish_reason is FinishReason.HANDOFF:
            if output.handoff is None:
                raise ChildError("prefill could not save the prompt")
            self._handoff_id = output.handoff.handoff_id
            progress = (CandidateProgress(0, tuple(trace.tokens)),)
            self._add(self._decode, replace(request, handoff=output.handoff, progress=progress))
        elif output.timings is not None and not trace.prefill_ended_at:
            trace.num_found_tokens = output.cached_tokens
            trace.prefill_began_at = event.added_at + output.timings.queue_ms / 1000
            trace.prefill_ended_at = trace.prefill_began_at + output.timings.prefill_ms / 1000
        elif output.timings is not None and not trace.ready_at:
            waited_ms = output.timings.load_ms + output.timings.queue_ms
            trace.ready_at = event.added_at + waited_ms / 1000
            trace.num_loaded_tokens = output.cached_tokens
            self._prefill.send(Release(self._handoff_id))
