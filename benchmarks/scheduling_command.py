"""`baton bench scheduling`: KV memory and the scheduler; tables, and may write JSON."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import name_machine
from benchmarks.scheduling.block_ops import measure_block_ops
from benchmarks.scheduling.kv_waste import measure_kv_waste
from benchmarks.scheduling.prefix_cost import measure_prefix_cost
from benchmarks.scheduling.sharing import measure_sharing
from benchmarks.scheduling.step_time import measure_step_time
from benchmarks.scheduling.tables import print_report

__all__ = ["add_args", "main"]

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
