"""`baton bench gpu`: a GPU's ceilings, then Baton's kernels, steps and tiers beside them."""

import argparse
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from benchmarks.gpu.hardware import describe_gpu_machine, find_problem, results_folder, slug
from benchmarks.gpu.plan import FULL, SMOKE, Part, parts_of
from benchmarks.report.output import write_results

__all__ = ["add_args", "main"]

_DEADLINE_S = 270.0  # with `make test-gpu` and both starts, a quarter of an hour


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run everything once, tiny, on the CPU; its figures mean nothing",
    )
    parser.add_argument(
        "--part",
        action="append",
        metavar="NAME",
        help=f"repeatable; all by default: {', '.join(part.name for part in parts_of(FULL))}",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=_DEADLINE_S,
        metavar="SECONDS",
        help="time for all parts (default: %(default).0f)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="file for the figures (default: benchmarks/results/gpu_DEVICE.json; "
        "none with --smoke)",
    )


def main(args: argparse.Namespace) -> int:
    """Measures copy bandwidth and matrix rate; kernels, each checked against the reference first;
    decode steps, prompts, two tiers on one card; and the continuous batching of transformers on
    the same requests. Random weights. Exit status: 1 where something failed, 2 without a GPU.
    """
    parts = _chosen(args)
    problem = None if args.smoke else find_problem()
    if problem is not None:
        print(f"bench gpu: {problem}; nothing was measured")
        return 2

    from benchmarks.gpu.run import run_parts
    from benchmarks.gpu.tables import failures_of, make_tables, skipped_of, with_ratios
    from benchmarks.report.report import format_table

    plan = SMOKE if args.smoke else FULL
    run = _describe_run(plan.device, is_smoke=args.smoke)
    path = args.json or (None if args.smoke else _default_path(run["machine"]))
    reports: list[dict[str, Any]] = []
    for report in run_parts(parts, is_smoke=args.smoke, deadline_s=args.deadline):
        reports.append(report)
        results = with_ratios([result for report in reports for result in report["results"]])
        if path is not None:
            is_finished = len(reports) == len(parts)
            write_results(path, run | _content(reports, results, is_finished=is_finished))
    for table in make_tables(results):
        print(f"\n{format_table(table)}")
    failures = failures_of(reports)
    print("\n" + "\n".join([*skipped_of(reports), *(failures or ["nothing failed"])]))
    if path is not None:
        print(f"written: {path}")
    return int(bool(failures))


def _chosen(args: argparse.Namespace) -> list[Part]:
    """Returns the parts that the flags choose, in the order of a run.

    Raises:
        ConfigurationError: a flag's value is bad; names it.
    """
    known = parts_of(SMOKE if args.smoke else FULL)
    for name in args.part or ():
        if name not in [part.name for part in known]:
            names = ", ".join(part.name for part in known)
            raise ConfigurationError(f"--part is {name!r}; it must be one of {names}")
    if not args.deadline > 0:
        raise ConfigurationError(f"--deadline is {args.deadline}; it must be > 0")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigurationError(f"--json is {args.json}; there is no folder {args.json.parent}")
    return [part for part in known if not args.part or part.name in args.part]


def _default_path(machine: Mapping[str, Any]) -> Path:
    return results_folder() / f"gpu_{slug(machine['device']['name'])}.json"


def _describe_run(device: str, *, is_smoke: bool) -> dict[str, Any]:
    return {
        "what": "baton bench gpu",
        "is_smoke": is_smoke,
        "machine": describe_gpu_machine(device),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _content(
    reports: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    *,
    is_finished: bool,
) -> dict[str, Any]:
    """Returns what the file says: the parts without their results, then all results in one list."""
    return {
        "finished": is_finished,
        "parts": [
            {name: value for name, value in report.items() if name != "results"}
            for report in reports
        ],
        "results": results,
    }
