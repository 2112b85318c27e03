"""`baton bench record`: measures again what README and the top of docs/performance.md show."""

import argparse
import os

from baton.common.errors import ConfigurationError
from benchmarks.machine import (
    COMMIT_VARIABLE,
    holding_variables,
    in_words,
    name_machine,
    results_folder,
)
from benchmarks.planned import PlannedPart, choose_parts, run_parts, summarize_reports

__all__ = ["PARTS", "add_args", "main"]

_DEADLINE_S = 2700.0
_BUSY_LOAD = 0.5
PARTS = (
    PlannedPart("split_vs_whole", ("split",), 110),
    PlannedPart("router", ("router", "--part", "streams"), 210),
    PlannedPart("scheduling", ("scheduling",), 60),
    PlannedPart(
        "speculation", ("speculation", "--batch-size", "1", "8", "--max-tokens", "64"), 150
    ),
    PlannedPart("transfer", ("transfer",), 270),
    PlannedPart(
        "compare_qwen2_05b",
        (
            *("compare", "--model", "qwen2-0.5b", "--engines", "baton,openvino"),
            *("--case", "batch-1", "--case", "mixed", "--repeats", "3"),
        ),
        290,
    ),
    PlannedPart("quality_smollm2", ("quality", "--model", "smollm2"), 240),
    PlannedPart(
        "compare_quantized_llama_100m",
        (
            *("compare", "--model", "llama-100m", "--repeats", "3", "--engines"),
            "baton,baton-q4_k_m,baton-q4_k_m-fast,baton-q8_0-fast,llamacpp-q4_k_m,llamacpp-q8_0",
            *("--case", "batch-1", "--case", "mixed"),
        ),
        300,
    ),
    PlannedPart("compare_llama_100m", ("compare", "--model", "llama-100m", "--repeats", "3"), 670),
)
"""Each with the seconds that it takes. The longest comes last: it gets what the others leave."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--part",
        action="append",
        metavar="NAME",
        help=f"repeatable; all by default: {', '.join(part.name for part in PARTS)}",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=_DEADLINE_S,
        metavar="SECONDS",
        help="time for all parts (default: %(default).0f)",
    )


def main(args: argparse.Namespace) -> int:
    """Measures on this machine, which should be idle, what README and the top of
    docs/performance.md show: Baton beside the other engines that are installed, two tiers beside
    one, transfers, the router, the scheduler, speculation. Writes PART_INSTRUCTION-SET.json files
    with processor, commit and date to benchmarks/results. Exit status 1: a part failed; the others
    were measured.
    """
    parts = choose_parts(PARTS, args.part)
    if not args.deadline > 0:
        raise ConfigurationError(f"--deadline is {args.deadline}; it must be > 0")
    machine = name_machine()
    print(f"{in_words(machine)}\nall parts together: at most {args.deadline / 60:.0f} min")
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        print(f"other programs are running (load average {load:.1f}); figures will suffer")
    # The files that are written change the working tree, which must not change the commit's name.
    os.environ |= {COMMIT_VARIABLE: str(machine["commit"]), **holding_variables()}
    folder = results_folder().resolve()
    reports = list(run_parts(parts, folder, f"_{machine['instruction_set']}", args.deadline))
    print(f"\n{summarize_reports(reports)}")
    for report in reports:
        if report.file is not None:
            print(f"written in {report.seconds:.0f} s: {folder / report.file}")
    return int(any(report.problem for report in reports))
