"""`baton bench scheduling`: KV memory and the scheduler; prints tables, can write JSON."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import name_machine
from benchmarks.scheduling.block_ops import measure_block_ops
from benchmarks.scheduling.kv_waste import measure_kv_waste
from benchmarks.scheduling.prefix_cost import measure_prefix_cost
from benchmarks.scheduling.sharing import PAPER, measure_sharing
from benchmarks.scheduling.step_time import measure_step_time

__all__ = ["add_args", "main", "print_report"]

_PARTS: dict[str, Callable[[], Any]] = {
    "kv_waste": measure_kv_waste,
    "sharing": measure_sharing,
    "step_time": measure_step_time,
    "block_ops": measure_block_ops,
    "prefix_cost": measure_prefix_cost,
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--part", choices=_PARTS, action="append", help="repeatable; default: all")
    parser.add_argument("--json", type=Path, help="also write the results here")


def main(args: argparse.Namespace) -> None:
    """Measures KV memory and the scheduler: waste, sharing, step times, block operations,
    and what prefix caching costs.
    """
    report: dict[str, Any] = {"machine": name_machine()}
    for part in args.part or _PARTS:
        sys.stderr.write(f"{part} ...\n")
        report[part] = _PARTS[part]()
    print_report(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


Rows = Iterable[Sequence[object]]


def print_report(report: dict[str, Any]) -> None:
    """Prints the machine, and a table for each part that was measured."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    for part, print_part in _PRINTERS.items():
        if part in report:
            print_part(report[part])


def _print_table(title: str, head: Sequence[str], rows: Rows) -> None:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def _print_kv_waste(results: list[dict[str, Any]]) -> None:
    _print_table(
        "KV waste, ShareGPT-like lengths (the paper: under 4 %)",
        ("block size", "slots without a known token", "slots without a computed token"),
        (
            (r["block_size"], _percent(r["waste_of_known"]), _percent(r["waste_of_computed"]))
            for r in results
        ),
    )


def _print_sharing(results: list[dict[str, Any]]) -> None:
    cases: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in results:
        case = (r["method"], r["lengths"], r["mean_top_probability"])
        cases.setdefault(case, {})[r["width"]] = r["saved"]
    _print_table(
        "Memory saved by sharing, with 2, 4 and 6 sequences per request",
        ("method", "lengths", "top token's mean probability", "2", "4", "6", "paper, 2 to 6"),
        (
            (
                *(method, lengths, peak or ""),
                *(_percent(saved) for saved in widths.values()),
                " to ".join(map(_percent, PAPER[method, lengths])),
            )
            for (method, lengths, peak), widths in cases.items()
        ),
    )


def _print_step_time(result: dict[str, Any]) -> None:
    _print_table(
        "Microseconds of a scheduler step, median (99th percentile)",
        ("running", "context", "pattern", "schedule", "commit", "step"),
        (_step_row(r) for r in result["steps"] if r["pattern"] != "aligned"),
    )
    _print_table(
        "Microseconds of schedule(), by the number of blocks that begin",
        ("running", "context", "none", "one per sequence", "for each block"),
        (
            (
                *(r["num_running"], r["context"], r["schedule_us_nothing_due"]),
                *(r["schedule_us_all_due"], r["schedule_us_per_due"]),
            )
            for r in result["growth"]
        ),
    )


def _step_row(result: dict[str, Any]) -> Sequence[object]:
    times = (
        f"{result[f'{name}_us']:.0f} ({result[f'{name}_p99_us']:.0f})"
        for name in ("schedule", "commit", "step")
    )
    return (result["num_running"], result["context"], result["pattern"], *times)


def _print_block_ops(results: list[dict[str, Any]]) -> None:
    _print_table(
        "Block operations",
        ("operation", "ns", "per second"),
        ((r["operation"], f"{r['ns']:.0f}", f"{r['per_s']:,}") for r in results),
    )


def _print_prefix_cost(result: dict[str, Any]) -> None:
    ratios = result["engine_with_to_without"]
    _print_table(
        f"Prefix caching at a 0 % hit rate; {result['model']}",
        ("figure", "with", "without", "cost"),
        (
            (
                "scheduler alone, ns per token",
                result["scheduler_with_ns_per_token"],
                result["scheduler_without_ns_per_token"],
                f"{result['cost_ns_per_token']} ns, {result['share_of_engine']:.5%} of the engine",
            ),
            (
                "engine, us per token",
                f"{result['engine_with_us_per_token']:.1f}",
                f"{result['engine_without_us_per_token']:.1f}",
                f"{statistics.median(ratios) - 1:+.2%} ({min(ratios) - 1:+.1%} to "
                f"{max(ratios) - 1:+.1%} in {len(ratios)} rounds)",
            ),
        ),
    )
    print(
        f"\nThe cost is 1 % of an engine that does {result['tokens_per_s_at_1_percent']:,} tokens/s"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


_PRINTERS: dict[str, Callable[[Any], None]] = {
    "kv_waste": _print_kv_waste,
    "sharing": _print_sharing,
    "step_time": _print_step_time,
    "block_ops": _print_block_ops,
    "prefix_cost": _print_prefix_cost,
}
