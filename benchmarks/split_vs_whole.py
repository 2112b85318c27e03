"""Prefill and decode as two tiers, measured beside one undivided engine.

Two clusters run at the same time: one with a prefill and a decode worker, one with a decode worker
that does both. A client sends requests over gRPC to one cluster, then to the other, so that a
machine whose speed changes treats both alike.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import ClusterAnswer, ServedCluster, served_cluster
from benchmarks.request import BenchRequest
from engine.config import EngineConfig

__all__ = ["SplitWorkload", "measure_latencies", "measure_rates"]

_WARM_UP_REQUESTS = 3
_PROMPT_VOCABULARY = 2000  # smaller than every model's
_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms", "decode_ms")

Clusters = Mapping[str, ServedCluster]


@dataclass(frozen=True, slots=True)
class SplitWorkload:
    """Requests of which one is in flight at a time. Figures are medians over `repeats` requests.

    Attributes:
        model: the model's name.
        engine: configures every worker.
        prompt_tokens: length of every prompt. No prompt is sent twice.
        output_tokens: tokens to generate for each.
        repeats: requests that count.
    """

    model: str
    engine: EngineConfig
    prompt_tokens: int
    output_tokens: int
    repeats: int


async def measure_latencies(workload: SplitWorkload) -> dict[str, object]:
    """Returns latencies and stages of both clusters as medians, and their ratios.

    Raises:
        BatonError: a cluster did not start, or a request failed.
    """
    async with _both_clusters(workload.engine) as clusters:
        answers = await _ask_in_turn(workload, clusters)
    return _summarize(workload, answers)


async def measure_rates(
    engine: EngineConfig,
    rounds: Sequence[Sequence[BenchRequest]],
    write_line: Callable[[str], None],
) -> dict[str, Any]:
    """Returns output tokens per second of both clusters, and their ratio, as medians over rounds.

    Args:
        engine: configures every worker.
        rounds: the requests of each round, which are sent at once. The first round warms up and
            does not count.
        write_line: called with a line about each round.

    Raises:
        BatonError: a cluster did not start, or a request failed.
    """
    async with _both_clusters(engine) as clusters:
        rates = await _take_turns(clusters, rounds, write_line)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{name: round(median, 2) for name, median in medians.items()},
        "split_to_whole": round(medians["split"] / medians["whole"], 3),
        "values": {name: [round(v, 2) for v in values] for name, values in rates.items()},
    }


@asynccontextmanager
async def _both_clusters(engine: EngineConfig) -> AsyncGenerator[Clusters, None]:
    async with (
        served_cluster(engine, num_prefill=0) as whole,
        served_cluster(engine, num_prefill=1) as split,
    ):
        yield {"whole": whole, "split": split}


async def _ask_in_turn(
    workload: SplitWorkload, clusters: Clusters
) -> dict[str, list[ClusterAnswer]]:
    draw = random.Random(0)
    answers: dict[str, list[ClusterAnswer]] = {name: [] for name in clusters}
    for _ in range(_WARM_UP_REQUESTS + workload.repeats):
        for name, cluster in clusters.items():
            prompt = [draw.randrange(_PROMPT_VOCABULARY) for _ in range(workload.prompt_tokens)]
            answers[name].append(await cluster.ask(prompt, workload.output_tokens))
    return {name: taken[_WARM_UP_REQUESTS:] for name, taken in answers.items()}


async def _take_turns(
    clusters: Clusters,
    rounds: Sequence[Sequence[BenchRequest]],
    write_line: Callable[[str], None],
) -> dict[str, list[float]]:
    """Returns the rates of the rounds that count; the cluster that goes first alternates."""
    rates: dict[str, list[float]] = {name: [] for name in clusters}
    for number, requests in enumerate(rounds):
        for name in sorted(clusters, reverse=number % 2 == 0):
            rate = await _output_rate(clusters[name], requests)
            write_line(
                f"round {number} of {len(rounds) - 1}: mixed on {name}: {rate:.1f} output tokens/s"
            )
            if number:
                rates[name].append(rate)
    return rates


async def _output_rate(cluster: ServedCluster, requests: Sequence[BenchRequest]) -> float:
    """Sends all requests at once; returns output tokens per second until the last one's end."""
    started = time.perf_counter()
    await asyncio.gather(
        *(cluster.ask(each.prompt_token_ids, each.num_output_tokens) for each in requests)
    )
    num_tokens = sum(request.num_output_tokens for request in requests)
    return num_tokens / (time.perf_counter() - started)


def _summarize(
    workload: SplitWorkload, answers: Mapping[str, list[ClusterAnswer]]
) -> dict[str, object]:
    rows = {name: _medians(taken) for name, taken in answers.items()}
    ratios = {
        figure: round(rows["split"][figure] / rows["whole"][figure], 3)
        for figure in ("first_token_ms", "token_gap_ms")
    }
    return {
        "model": workload.model,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "repeats": workload.repeats,
        "num_threads": workload.engine.num_threads,
        "dtype": workload.engine.dtype,
        "whole": rows["whole"],
        "split": rows["split"],
        "split_to_whole": ratios,
    }


def _medians(answers: Sequence[ClusterAnswer]) -> dict[str, float]:
    times_s = [answer.token_times_s for answer in answers]
    figures = {
        "first_token_ms": [1000 * times[0] for times in times_s],
        "token_gap_ms": [1000 * (times[-1] - times[0]) / (len(times) - 1) for times in times_s],
    }
    figures |= {stage: [getattr(answer.timings, stage) for answer in answers] for stage in _STAGES}
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}
