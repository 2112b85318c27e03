"""`baton bench split`: two tiers beside one undivided engine; prints tables, can write JSON."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.common.model_files.named_models import demo_model_path
from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, floor_s, token_floor_s
from benchmarks.models import make_random_model, write_random_config
from benchmarks.report.output import write_results
from benchmarks.request import BenchRequest
from benchmarks.split_vs_whole import SplitWorkload, measure_latencies
from engine.config import EngineConfig

__all__ = ["add_args", "main"]

_MODELS = {"demo": "float32", "llama-100m": "bfloat16", "llama-3.1-8b": "bfloat16"}
"""The models that can be measured, and the type that each computes in."""
_BY_DEVICE = {"cpu": ("demo", "llama-100m"), "cuda": ("llama-3.1-8b",)}
"""The models that are measured by default."""
_DUMMY = ("llama-3.1-8b",)
_POOL_BYTES = 1 << 30
"""Of each worker. Workers that start at the same time on one card cannot measure what is left."""
_SPARE_TOKENS = 16
_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        choices=_MODELS,
        action="append",
        help="repeatable (default: demo and llama-100m; on a GPU llama-3.1-8b, with dummy weights)",
    )
    parser.add_argument(
        "--device",
        choices=list(_BY_DEVICE),
        default="cpu",
        help="where the workers compute, on a GPU all on one card (default: %(default)s)",
    )
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
    from benchmarks.offline.floors import read_shape

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
    print(f"\n| model | prompt | tiers | {' | '.join(_STAGES)} |")
    print(f"| --- | --- | --- |{' --- |' * len(_STAGES)}")
    for result in report["results"]:
        for tiers in ("whole", "split"):
            stages = " | ".join(f"{result[tiers][stage]:.2f}" for stage in _STAGES)
            print(f"| {result['model']} | {result['prompt_tokens']} | {tiers} | {stages} |")
