"""`run_load`: sends requests at their times, and records when their tokens arrive."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass

from baton.common.errors import ConfigurationError, UnavailableError
from benchmarks.request import BenchRequest, LostRequestError, MeasuredRequest, Target
from benchmarks.workloads.kind import draw_tokens

__all__ = ["LoadLimits", "run_load", "warm_up", "warm_up_requests"]

_WARM_UP_SEED = "warm-up"


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits of a run.

    Attributes:
        max_concurrency: the most requests in flight; None for any number.
        request_timeout_s: seconds after which a request counts as lost.

    Raises:
        ConfigurationError: a limit is out of range.
    """

    max_concurrency: int | None
    request_timeout_s: float

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigurationError(
                f"--max-concurrency is {self.max_concurrency}; it must be >= 1"
            )
        if not self.request_timeout_s > 0:
            raise ConfigurationError(
                f"--request-timeout-s is {self.request_timeout_s}; it must be > 0"
            )


def _ignore(record: MeasuredRequest) -> None:
    """The default of `on_end`."""


async def run_load(
    requests: Sequence[BenchRequest],
    target: Target,
    limits: LoadLimits,
    on_end: Callable[[MeasuredRequest], None] = _ignore,
) -> list[MeasuredRequest]:
    """Sends the requests; returns their records in the same order.

    A request becomes ready at its time of arrival, or when the request that it waits for has
    ended. Ready requests queue for a place under the limit of concurrency.

    Args:
        requests: what to send.
        target: the endpoint.
        limits: limits of the run.
        on_end: called with each request's record when it ends.
    """
    run = _LoadRun(requests, target, limits, on_end)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run.send(index)) for index in range(len(requests))]
    return [task.result() for task in running]


class _LoadRun:
    """One run. Its clock starts at 0 when it is constructed."""

    def __init__(
        self,
        requests: Sequence[BenchRequest],
        target: Target,
        limits: LoadLimits,
        on_end: Callable[[MeasuredRequest], None],
    ) -> None:
        self._requests = requests
        self._target = target
        self._timeout_s = limits.request_timeout_s
        self._on_end = on_end
        self._ended = [asyncio.Event() for _ in requests]
        self._place: AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else nullcontext()
        )
        self._started_at = time.perf_counter()

    async def send(self, index: int) -> MeasuredRequest:
        """Waits until the request may be sent, sends it, and returns its record at its end."""
        request = self._requests[index]
        if request.after is not None:
            await self._ended[request.after].wait()
        if request.arrival_s is not None:
            await asyncio.sleep(request.arrival_s - self._now())
        async with self._place:
            record = MeasuredRequest(len(request.prompt_token_ids), sent_s=self._now())
            record.error = await self._follow(request, record)
            record.ended_s = self._now()
        self._ended[index].set()
        self._on_end(record)
        return record

    async def _follow(self, request: BenchRequest, record: MeasuredRequest) -> str | None:
        """Records the tokens' times; returns why the request failed, None if it succeeded."""
        times_s = record.token_times_s
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                aclosing(self._target.stream(request)) as counts,
            ):
                async for num_tokens in counts:
                    times_s += [self._now()] * num_tokens
        except LostRequestError as error:
            return str(error)
        except TimeoutError:
            return f"no end within {self._timeout_s:g} s"
        if len(times_s) != request.num_output_tokens:
            return f"{len(times_s)} tokens came, {request.num_output_tokens} were asked for"
        return None

    def _now(self) -> float:
        return time.perf_counter() - self._started_at


def warm_up_requests(
    requests: Sequence[BenchRequest], num_warmups: int, vocab_size: int
) -> list[BenchRequest]:
    """Returns requests as long as the first `num_warmups`, of tokens that no cache will find."""
    source = random.Random(_WARM_UP_SEED)
    return [
        BenchRequest(
            draw_tokens(source, len(request.prompt_token_ids), vocab_size),
            request.num_output_tokens,
        )
        for request in requests[:num_warmups]
    ]


async def warm_up(
    target: Target,
    limits: LoadLimits,
    requests: Sequence[BenchRequest],
) -> None:
    """Sends the requests at once, without figures.

    Raises:
        UnavailableError: none of them succeeded; says why the first one failed.
    """
    records = await run_load(requests, target, limits)
    if records and all(record.error is not None for record in records):
        raise UnavailableError(f"no warm-up request succeeded: {records[0].error}")
