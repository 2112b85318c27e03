"""`baton bench split`: two tiers beside one undivided engine; prints tables, can write JSON."""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.common.model_files.demo import demo_model_path
from benchmarks.machine import describe_machine
from benchmarks.model_cost import Ceilings, ModelShape, floor_s, token_floor_s
from benchmarks.models import make_random_model, num_weights, read_config
from benchmarks.request import BenchRequest
from benchmarks.split_vs_whole import MODELS, Workload, measure_latencies

__all__ = ["add_args", "main"]

_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model", choices=MODELS, action="append", help="repeatable; all by default"
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
    machine = describe_machine(num_threads=args.num_threads)
    results = [r for model in args.model or MODELS for r in _measure_model(model, args, machine)]
    report = {"machine": machine, "results": results}
    _print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _measure_model(
    model: str, args: argparse.Namespace, machine: Mapping[str, Any]
) -> list[dict[str, object]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = demo_model_path() if model == "demo" else make_random_model(model, Path(folder))
        for prompt_tokens in args.prompt_tokens or (128, 512):
            sys.stderr.write(f"{model}, {prompt_tokens} prompt tokens ...\n")
            workload = Workload(
                model=model,
                path=path,
                prompt_tokens=prompt_tokens,
                output_tokens=args.output_tokens,
                repeats=args.repeats,
                num_threads=args.num_threads,
                kv_connector=args.kv_connector,
            )
            result = asyncio.run(measure_latencies(workload))
            results.append(result | {"floor": _floors(workload, machine)})
    return results


def _floors(workload: Workload, machine: Mapping[str, Any]) -> dict[str, float]:
    """Returns the least times that the machine allows for the two latencies."""
    dtype = MODELS[workload.model]
    shape = ModelShape.of_config(read_config(workload.path), num_weights(workload.path), dtype)
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
