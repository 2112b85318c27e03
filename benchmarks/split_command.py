"""`baton bench split`: prefill and decode as two tiers, beside one undivided engine.

Two clusters run at the same time: one with a prefill and a decode worker, one with a decode worker
that does both. A client sends requests over gRPC to one cluster, then to the other, so that a
machine whose speed changes treats both alike.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.common.model_files.named_models import demo_model_path
from benchmarks.cluster import ClusterAnswer, ServedCluster, served_cluster
from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, floor_s, token_floor_s
from benchmarks.models import make_random_model, write_random_config
from benchmarks.output import add_device_arg, write_results
from benchmarks.request import BenchRequest
from engine.config import EngineConfig

__all__ = ["SplitWorkload", "add_args", "main", "measure_latencies", "measure_rates"]

_MODELS = {"demo": "float32", "llama-100m": "bfloat16", "llama-3.1-8b": "bfloat16"}
"""The models that can be measured, and the type that each computes in."""
_BY_DEVICE = {"cpu": ("demo", "llama-100m"), "cuda": ("llama-3.1-8b",)}
"""The models that are measured by default."""
_DUMMY = ("llama-3.1-8b",)
_POOL_BYTES = 1 << 30
"""Of each worker. Workers that start at the same time on one card cannot measure what is left."""
_SPARE_TOKENS = 16
_SHOWN_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms")
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


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        choices=_MODELS,
        action="append",
        help="repeatable (default: demo and llama-100m; on a GPU llama-3.1-8b, with dummy weights)",
    )
    add_device_arg(parser, "where the workers compute, on a GPU all on one card")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        action="append",
        help="length of prompts, repeatable (default: 128 and 512)",
    )
    parser.add_argument("--output-tokens", type=int, default=32, help="tokens to generate for each")
    parser.add_argument("--repeats", type=int, default=15, help="requests per figure")
    parser.add_argument("--num-threads", type=int, default=2, help="threads of each worker")
    parser.add_argument("--kv-connector", help="URL (default: a shm:// store for the run)")
    parser.add_argument("--json", type=Path, help="also write the results here")


def main(args: argparse.Namespace) -> None:
    """Measures the latency of prompts that are split over two tiers against that of one
    undivided engine, over gRPC, both asked in turn.
    """
    machine = describe_machine(args.device, args.num_threads)
    report: dict[str, Any] = {"machine": machine, "results": []}
    for model in args.model or _BY_DEVICE[args.device]:
        for result in _measure_model(model, args, machine):
            report["results"].append(result)
            if args.json:
                write_results(args.json, report)
    _print_report(report)


def _measure_model(
    model: str, args: argparse.Namespace, machine: Mapping[str, Any]
) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        path = _make_model(model, Path(folder))
        for prompt_tokens in args.prompt_tokens or (128, 512):
            sys.stderr.write(f"{model}, {prompt_tokens} prompt tokens ...\n")
            workload = SplitWorkload(
                model=model,
                engine=_engine(path, model, prompt_tokens, args),
                prompt_tokens=prompt_tokens,
                output_tokens=args.output_tokens,
                repeats=args.repeats,
            )
            result = asyncio.run(measure_latencies(workload))
            yield result | {"floor": _floors(workload, machine)}


def _make_model(model: str, folder: Path) -> Path:
    if model == "demo":
        return demo_model_path()
    return (write_random_config if model in _DUMMY else make_random_model)(model, folder)


def _engine(path: Path, model: str, prompt_tokens: int, args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=str(path),
        dtype=_MODELS[model],
        load_format="dummy" if model in _DUMMY else "auto",
        device=args.device,
        kv_connector=args.kv_connector,
        num_threads=args.num_threads,
        max_model_len=prompt_tokens + args.output_tokens + _SPARE_TOKENS,
        kv_cache_memory_bytes=_POOL_BYTES,
    )


def _floors(workload: SplitWorkload, machine: Mapping[str, Any]) -> dict[str, float]:
    """Returns the least times that the machine allows for the two latencies."""
    from benchmarks.model_shape import read_shape

    shape, dtype = read_shape(workload.engine)
    ceilings = Ceilings.of_machine(machine, dtype)
    prompt = BenchRequest(tuple(range(workload.prompt_tokens)), num_output_tokens=1)
    return {
        "first_token_ms": round(1000 * floor_s([prompt], shape, ceilings), 3),
        "token_gap_ms": round(1000 * token_floor_s(shape, ceilings), 3),
    }


def _print_report(report: dict[str, Any]) -> None:
    """Prints the machine, then a table of latencies and one of stages."""
    machine = report["machine"]
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| model | prompt | figure | whole | split | split / whole | floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for result in report["results"]:
        for figure, floor_ms in result["floor"].items():
            print(
                f"| {result['model']} | {result['prompt_tokens']} | {figure} "
                f"| {result['whole'][figure]:.2f} | {result['split'][figure]:.2f} "
                f"| {result['split_to_whole'][figure]:.2f} | {floor_ms:.2f} |"
            )
    print(f"\n| model | prompt | tiers | {' | '.join(_SHOWN_STAGES)} |")
    print(f"| --- | --- | --- |{' --- |' * len(_SHOWN_STAGES)}")
    for result in report["results"]:
        for tiers in ("whole", "split"):
            stages = " | ".join(f"{result[tiers][stage]:.2f}" for stage in _SHOWN_STAGES)
            print(f"| {result['model']} | {result['prompt_tokens']} | {tiers} | {stages} |")


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
