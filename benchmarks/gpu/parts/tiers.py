"""Prefill and decode as two engines on one card, beside one undivided engine."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.gpu.models import engine_config, write_config
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Record
from benchmarks.model_cost import Ceilings
from benchmarks.offline.cases import Case
from engine.batch import DrawParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.request import CandidateProgress, EngineRequest, RequestOutput
from kvstore.handoff import KvHandoff

__all__ = ["measure"]

_GREEDY = DrawParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_CONNECTOR = "memory://bench-gpu?max_bytes={}"
_STORE_BYTES = 16 * 2**30
_SHARE_OF_EACH = 0.27  # of the card's memory: three engines, and room for what they leave over
_TIMEOUT_S = 60.0

Take = Callable[[Sequence[RequestOutput]], None]


@dataclass
class _Times:
    """When a request's tokens came, in seconds from when all were sent."""

    tokens_s: list[float] = field(default_factory=list)


def measure(plan: Plan, ceilings: Ceilings | None, record: Record, model: str) -> None:
    """The same requests to both; `ceilings` play no part."""
    with tempfile.TemporaryDirectory() as parent:
        folder = write_config(model, plan.dtype, Path(parent))
        for name, runs in (("undivided", _Undivided), ("two tiers", _TwoTiers)):
            engines = runs(plan, folder)
            try:
                for index, shape in enumerate(plan.tier_requests):
                    size = "{} x {} + {}".format(*shape)
                    seeds = 2 * index + 1, 2 * index + 2  # of prompts that nobody has cached
                    measure_them = partial(_measure, engines, Case(*shape), seeds)
                    record.attempt("tiers", f"{model}, {name}, {size}", measure_them)
            finally:
                engines.close()


def _measure(engines: "_Undivided | _TwoTiers", case: Case, seeds: Sequence[int]) -> dict[str, Any]:
    for seed in seeds:  # all but the last warm up
        prompts = case.requests(engines.vocab_size, seed)
        requests = [
            EngineRequest(
                request_id=f"{seed}-{index}",
                prompt_token_ids=tuple(request.prompt_token_ids),
                draw=_GREEDY,
                max_tokens=request.num_output_tokens,
            )
            for index, request in enumerate(prompts)
        ]
        times = engines.run(requests)
    return _figures(list(times.values()), case.output_len)


def _figures(times: Sequence[_Times], num_tokens: int) -> dict[str, Any]:
    for own in times:
        if len(own.tokens_s) != num_tokens:
            raise RuntimeError(f"{len(own.tokens_s)} of {num_tokens} tokens came")
    last_s = max(own.tokens_s[-1] for own in times)
    gaps_s = [late - early for own in times for early, late in pairwise(own.tokens_s[1:])]
    return {
        "first_token_ms": 1e3 * statistics.median(own.tokens_s[0] for own in times),
        "second_token_ms": 1e3 * statistics.median(own.tokens_s[1] for own in times),
        "step_ms": 1e3 * statistics.median(gaps_s),
        "output_tokens_per_s": len(times) * num_tokens / last_s,
    }


class _Undivided:
    """One engine for both halves."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._core = EngineCore.build(_config(plan, folder, role="both"))
        self.vocab_size = self._core.info.vocab_size

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, _Times]:
        """When the requests' tokens came."""
        clock = _Clock(requests)
        for request in requests:
            clock.take(self._core.add_request(request))
        while self._core.has_unfinished:
            self._core.run_step(clock.take)
            self._core.wait()
        return clock.times

    def close(self) -> None:
        """Ends the engine."""
        self._core.close()


class _TwoTiers:
    """An engine per tier, each in a thread of its own; KV goes through memory of the process."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        connector = _CONNECTOR.format(_STORE_BYTES)
        self._prefill, self._decode = (
            EngineCore.build(_config(plan, folder, role=role, kv_connector=connector))
            for role in ("prefill", "decode")
        )
        self.vocab_size = self._prefill.info.vocab_size

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, _Times]:
        """When the requests' tokens came, from either tier."""
        clock = _Clock(requests)
        by_id = {request.request_id: request for request in requests}
        first_tokens: dict[str, tuple[int, ...]] = {}
        handed_over: SimpleQueue[EngineRequest] = SimpleQueue()

        def hand_over(outputs: Sequence[RequestOutput]) -> None:
            clock.take(outputs)
            for output in outputs:
                name = output.request_id
                if output.token_ids:
                    first_tokens[name] = output.token_ids
                if output.handoff is not None:
                    handed_over.put(_resumed(by_id[name], first_tokens[name], output.handoff))
                    self._decode.wake()

        sent: SimpleQueue[EngineRequest] = SimpleQueue()
        for request in requests:
            sent.put(request)
        tiers = (
            threading.Thread(target=_serve, args=(self._prefill, sent, len(requests), hand_over)),
            threading.Thread(
                target=_serve, args=(self._decode, handed_over, len(requests), clock.take)
            ),
        )
        for thread in tiers:
            thread.start()
        for thread in tiers:
            thread.join()
        return clock.times

    def close(self) -> None:
        """Ends both engines."""
        self._prefill.close()
        self._decode.close()


class _Clock:
    """Notes when tokens come."""

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.times = {request.request_id: _Times() for request in requests}
        self._started_at = time.perf_counter()

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """What a step brought."""
        now_s = time.perf_counter() - self._started_at
        for output in outputs:
            self.times[output.request_id].tokens_s += [now_s] * len(output.token_ids)


def _serve(
    core: EngineCore, requests: "SimpleQueue[EngineRequest]", num_requests: int, take: Take
) -> None:
    """Steps a tier's engine until it has ended so many requests."""
    num_ended, gives_up_at = 0, time.monotonic() + _TIMEOUT_S

    def take_counted(outputs: Sequence[RequestOutput]) -> None:
        nonlocal num_ended
        num_ended += sum(output.is_last for output in outputs)
        take(outputs)

    while num_ended < num_requests and time.monotonic() < gives_up_at:
        while not requests.empty():
            take_counted(core.add_request(replace(requests.get(), deadline=gives_up_at)))
        core.run_step(take_counted)
        if num_ended < num_requests and requests.empty():
            core.wait()


def _resumed(
    request: EngineRequest, first_tokens: tuple[int, ...], handoff: KvHandoff
) -> EngineRequest:
    """What the router makes of what a prefill tier tells."""
    progress = CandidateProgress(0, first_tokens, 0.0)
    return replace(request, handoff=handoff, progress=(progress,))


def _config(plan: Plan, folder: Path, **flags: Any) -> EngineConfig:
    return engine_config(
        plan,
        folder,
        async_scheduling=True,
        gpu_memory_utilization=_SHARE_OF_EACH,
        max_num_seqs=max(num_requests for num_requests, _, _ in plan.tier_requests),
        **flags,
    )
