"""Latency of a prompt split over two tiers, against one undivided engine.

Both clusters run beside each other and answer in turn, one request at a time,
so that a machine whose speed drifts treats them alike. Every prompt is new:
no prefix is cached. Clients are outside, over gRPC, as users are.
"""

import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from baton import AsyncClient, SamplingParams
from baton.results import Timings
from baton.up.cluster import ClusterConfig
from baton.up.run_folder import embedded_store
from benchmarks.models import num_weights
from benchmarks.running_cluster import running_cluster
from engine.config import EngineConfig
from rpc.server_config import ServerConfig

__all__ = ["MODELS", "Workload", "measure"]

MODELS = {"demo": "float32", "llama-100m": "bfloat16"}
"""What is measured, and the type that it computes in."""
_WARM_UP_REQUESTS = 3
_PROMPT_VOCABULARY = 2000  # below every model's


@dataclass(frozen=True, slots=True)
class Workload:
    """What to measure; every figure is a median over `repeats` requests."""

    model: str
    path: Path
    prompt_tokens: int
    output_tokens: int
    repeats: int
    num_threads: int
    kv_connector: str | None


@dataclass(frozen=True, slots=True)
class _Sample:
    """One request: seconds to its first token and between its tokens, and its stages."""

    first_token_s: float
    token_gap_s: float
    timings: Timings


async def measure(workload: Workload) -> dict[str, object]:
    """Runs both clusters, asks them in turn, and returns medians, ratios and floors."""
    with embedded_store() as store:
        connector = workload.kv_connector or store
        async with (
            _running(workload, connector, num_prefill=0) as whole,
            _running(workload, connector, num_prefill=1) as split,
        ):
            samples = await _ask_in_turn(workload, {"whole": whole, "split": split})
    return _summarize(workload, samples)


@asynccontextmanager
async def _running(
    workload: Workload, kv_connector: str, num_prefill: int
) -> AsyncIterator[AsyncClient]:
    """A cluster of real processes, and a client of its router."""
    engine = EngineConfig(
        model=str(workload.path),
        dtype=MODELS[workload.model],
        kv_connector=kv_connector,
        num_threads=workload.num_threads,
        kv_cache_memory=1 << 28,
    )
    config = ClusterConfig(
        engine=engine,
        num_prefill=num_prefill,
        num_decode=1,
        router=ServerConfig(),
        log_level="warning",
    )
    async with running_cluster(config) as plan, AsyncClient(plan.router.address) as client:
        yield client


async def _ask_in_turn(
    workload: Workload, clients: dict[str, AsyncClient]
) -> dict[str, list[_Sample]]:
    draw = random.Random(0)
    samples: dict[str, list[_Sample]] = {name: [] for name in clients}
    for _ in range(_WARM_UP_REQUESTS + workload.repeats):
        for name, client in clients.items():
            prompt = [draw.randrange(_PROMPT_VOCABULARY) for _ in range(workload.prompt_tokens)]
            samples[name].append(await _ask(client, prompt, workload.output_tokens))
    return {name: taken[_WARM_UP_REQUESTS:] for name, taken in samples.items()}


async def _ask(client: AsyncClient, prompt: list[int], num_tokens: int) -> _Sample:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    arrivals, count, timings = [], 0, None
    async for chunk in client.stream(prompt, params):
        count += len(chunk.token_ids)
        arrivals.append(time.perf_counter() - started)
        timings = chunk.timings
    if count != num_tokens or timings is None:
        raise RuntimeError(f"{count} tokens came, {num_tokens} were asked for")
    gap_s = (arrivals[-1] - arrivals[0]) / (num_tokens - 1)
    return _Sample(arrivals[0], gap_s, timings)


def _summarize(workload: Workload, samples: dict[str, list[_Sample]]) -> dict[str, object]:
    rows = {name: _medians(taken) for name, taken in samples.items()}
    ratios = {
        figure: round(rows["split"][figure] / rows["whole"][figure], 3)
        for figure in ("first_token_ms", "token_gap_ms")
    }
    return {
        "model": workload.model,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "repeats": workload.repeats,
        "num_threads": workload.num_threads,
        "dtype": MODELS[workload.model],
        "num_weights": num_weights(workload.path),
        "whole": rows["whole"],
        "split": rows["split"],
        "split_to_whole": ratios,
    }


def _medians(samples: list[_Sample]) -> dict[str, float]:
    stages = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms", "decode_ms")
    figures = {
        "first_token_ms": [1000 * sample.first_token_s for sample in samples],
        "token_gap_ms": [1000 * sample.token_gap_s for sample in samples],
    }
    figures |= {stage: [getattr(s.timings, stage) for s in samples] for stage in stages}
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}
