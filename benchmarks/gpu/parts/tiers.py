"""Prefill and decode as two workers on one card, beside one undivided worker.

Both run as clusters of real processes, one cluster after the other.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from baton.common.errors import BatonError
from benchmarks.cluster import Answer, ServedCluster, served_cluster
from benchmarks.gpu.models import engine_config, write_config
from benchmarks.gpu.plan import MODELS, Plan
from benchmarks.gpu.record import Record
from benchmarks.model_cost import Ceilings
from benchmarks.offline.cases import Case
from engine.config import EngineConfig

__all__ = ["measure"]

_BLOCK_SIZE = 16
_SHARE_OF_EACH = 0.4  # of the card's memory: at most two workers run at a time
_CLUSTERS = {"undivided": 0, "two tiers": 1}
"""By name: how many prefill workers the cluster has."""


def measure(plan: Plan, ceilings: Ceilings | None, record: Record, model: str) -> None:
    """Sends the same requests to both clusters; `ceilings` are not used."""
    with tempfile.TemporaryDirectory() as parent, asyncio.Runner() as runner:
        engine = _engine(plan, write_config(model, plan.dtype, Path(parent)))
        for name, num_prefill in _CLUSTERS.items():
            opened = AsyncExitStack()
            start = opened.enter_async_context(served_cluster(engine, num_prefill=num_prefill))
            try:
                cluster = runner.run(start)
                for index, shape in enumerate(plan.tier_requests):
                    # No prompt is sent twice, so none is found in a cache.
                    seeds = 2 * index + 1, 2 * index + 2
                    size = "{} x {} + {}".format(*shape)
                    serve = partial(_measure, cluster, Case(*shape), MODELS[model], seeds)
                    record.attempt(
                        "tiers", f"{model}, {name}, {size}", partial(_run, runner, serve)
                    )
            except BatonError as error:
                record.add("tiers", f"{model}, {name}", failed=error.message)
            finally:
                runner.run(opened.aclose())


def _run(
    runner: asyncio.Runner, make: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    return runner.run(make())


def _engine(plan: Plan, folder: Path) -> EngineConfig:
    """Configures every worker. Pools have a fixed size: workers that start at the same time on one
    card cannot measure what memory is left.
    """
    num_blocks = max(
        num_requests * -(-(num_prompt + num_output) // _BLOCK_SIZE)
        for num_requests, num_prompt, num_output in plan.tier_requests
    )
    return engine_config(
        plan,
        folder,
        async_scheduling=True,
        gpu_memory_utilization=_SHARE_OF_EACH,
        max_num_seqs=max(num_requests for num_requests, _, _ in plan.tier_requests),
        block_size=_BLOCK_SIZE,
        # Room for the warm-up's prompts too: they stay cached during the measured ones.
        num_gpu_blocks_override=plan.num_gpu_blocks or 2 * num_blocks,
    )


async def _measure(
    cluster: ServedCluster, case: Case, config: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """Serves the case once per seed; returns the figures of the last run."""
    answers: list[Answer] = []
    for seed in seeds:
        requests = case.requests(config["vocab_size"], seed)
        answers = await asyncio.gather(
            *(cluster.ask(each.prompt_token_ids, each.num_output_tokens) for each in requests)
        )
    metrics = await cluster.read_metrics()
    failures = [metrics[f"baton_kv_failures_total {way}"] for way in ("save", "load")]
    if any(failures):
        raise RuntimeError("{:g} saves and {:g} loads of KV failed".format(*failures))
    return _figures(answers, case.output_len)


def _figures(answers: Sequence[Answer], num_tokens: int) -> dict[str, Any]:
    times_s = [answer.token_times_s for answer in answers]
    last_s = max(own[-1] for own in times_s)
    # Tokens of one message share a time, so only means of gaps say how long a step takes.
    gaps_s = [(own[-1] - own[1]) / (num_tokens - 2) for own in times_s]
    return {
        "first_token_ms": 1e3 * statistics.median(own[0] for own in times_s),
        "second_token_ms": 1e3 * statistics.median(own[1] for own in times_s),
        "step_ms": 1e3 * statistics.median(gaps_s),
        "output_tokens_per_s": len(times_s) * num_tokens / last_s,
    }
