"""Runs a search on real clusters, one at a time, a new one for each candidate."""

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from baton.common.errors import BatonError
from baton.up.plan import ClusterConfig
from benchmarks.arrivals import ArrivalProcess
from benchmarks.cluster import running_cluster
from benchmarks.load import LoadLimits, run_load, warm_up, warm_up_requests
from benchmarks.metrics import ServiceLevel, compute_metrics
from benchmarks.request import Target, with_fresh_tokens
from benchmarks.targets import opened_target
from benchmarks.tune.search import Candidate, Point, Trial
from benchmarks.workloads.registry import workload_from_args
from engine.config import EngineConfig
from worker.processes.run_folder import embedded_store

__all__ = ["TuneLoad", "engine_of", "run_search"]

_NUM_WARMUPS = 4


@dataclass(frozen=True, slots=True)
class TuneLoad:
    """The load that every cluster gets.

    Attributes:
        args: parsed flags of the workload and of arrivals.
        level: the limits that a good request keeps.
        limits: the limits of a run.
    """

    args: argparse.Namespace
    level: ServiceLevel
    limits: LoadLimits

    async def measure(self, target: Target, trial: Trial, number: int) -> Point:
        """Sends the workload at the trial's rate.

        All trials have the same requests and the same pattern of arrivals. The tokens depend on
        `number`, the number of earlier trials on this cluster, so that nothing is cached.
        """
        args = self.args
        vocab_size = (await target.describe()).vocab_size
        assert vocab_size is not None  # a router always reports it
        arrivals = ArrivalProcess(
            kind=args.arrival,
            request_rate=trial.request_rate,
            burstiness=args.burstiness,
            burst_period_s=args.burst_period_s,
            seed=args.seed,
        )
        workload = arrivals.apply(workload_from_args(args, vocab_size))
        requests = with_fresh_tokens(workload.requests, number, vocab_size)
        if number == 0:
            await warm_up(target, self.limits, warm_up_requests(requests, _NUM_WARMUPS, vocab_size))
        records = await run_load(requests, target, self.limits)
        metrics = compute_metrics(records, self.level)
        return Point.of(trial.candidate, trial.request_rate, metrics)


async def run_search(
    search: Generator[Trial, float, object],
    engine: EngineConfig,
    load: TuneLoad,
    time_budget_s: float,
    write_line: Callable[[str], None],
) -> list[Point]:
    """Measures the trials of a search until it ends or the time is over.

    Args:
        search: yields trials, and receives their goodput.
        engine: configures every worker. Candidates replace some of its fields.
        load: the load.
        time_budget_s: after so many seconds no trial starts, except the first.
        write_line: called with a line about each point.

    Returns:
        All points, in the order in which they were measured.

    Raises:
        ConfigurationError: the first candidate's cluster does not start.
        BatonError: the first candidate's cluster serves no request.
    """
    started_at = time.monotonic()
    points: list[Point] = []
    trial: Trial | None = next(search)
    async with aclosing(_Cluster(engine, load)) as cluster:
        while trial is not None and (not points or time.monotonic() - started_at < time_budget_s):
            point = await cluster.measure(trial)
            points.append(point)
            write_line(f"{time.monotonic() - started_at:5.0f} s  {_line(point)}")
            trial = _next_trial(search, point.goodput)
    return points


def engine_of(engine: EngineConfig, candidate: Candidate) -> EngineConfig:
    """Returns the engine's config with the flags of a candidate."""
    return replace(
        engine,
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        long_prefill_token_threshold=candidate.long_prefill_token_threshold,
    )


class _Cluster:
    """The cluster of the present candidate."""

    def __init__(self, engine: EngineConfig, load: TuneLoad) -> None:
        self._engine, self._load = engine, load
        self._parts = AsyncExitStack()
        self._candidate: Candidate | None = None
        self._target: Target | None = None
        self._num_measured = 0
        self._has_served = False

    async def measure(self, trial: Trial) -> Point:
        """Measures a trial. A trial of another candidate starts a new cluster.

        A candidate that fails has no goodput.

        Raises:
            BatonError: the first candidate fails.
        """
        try:
            if trial.candidate != self._candidate or self._target is None:
                await self._start(trial.candidate)
            assert self._target is not None
            point = await self._load.measure(self._target, trial, self._num_measured)
        except BatonError:
            if not self._has_served:
                raise
            return Point.without_goodput(trial.candidate, trial.request_rate)
        self._num_measured += 1
        self._has_served = True
        return point

    async def aclose(self) -> None:
        """Ends the cluster."""
        self._target = None
        await self._parts.aclose()

    async def _start(self, candidate: Candidate) -> None:
        await self.aclose()
        self._candidate, self._num_measured = candidate, 0
        store = self._parts.enter_context(embedded_store())
        plan = await self._parts.enter_async_context(
            running_cluster(_cluster_config(self._engine, candidate, store))
        )
        self._target = await self._parts.enter_async_context(
            opened_target(f"grpc://{plan.router.address}", "")
        )


def _cluster_config(engine: EngineConfig, candidate: Candidate, kv_connector: str) -> ClusterConfig:
    """Returns the config that `baton serve` makes of the flags that are printed at the end."""
    return ClusterConfig.grpc_only(
        replace(engine_of(engine, candidate), kv_connector=kv_connector),
        num_prefill=candidate.num_prefill,
        num_decode=candidate.num_decode,
    )


def _next_trial(search: Generator[Trial, float, object], goodput: float) -> Trial | None:
    try:
        return search.send(goodput)
    except StopIteration:
        return None


def _line(point: Point) -> str:
    failed = f", {point.num_failed} failed" if point.num_failed else ""
    return (
        f"{point.candidate}: {point.request_rate:.2f} requests/s, "
        f"{point.goodput:.2f} good ({100 * point.share:.0f}%){failed}"
    )
