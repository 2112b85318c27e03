"""The first quarter of an hour on a GPU: tests, tokens and figures, in the order of their worth.

    python3 -m scripts.gpu_first --out FOLDER                 # eight minutes
    python3 -m scripts.gpu_first --out FOLDER --call second   # five minutes
    python3 -m scripts.gpu_first --out FOLDER --smoke         # tiny, on the CPU

Each part is a process with a limit of its own, and writes its file in the folder while it runs: a
part that hangs or crashes loses neither its earlier figures nor the parts behind it. CALL.json
lists the parts. It runs with the packages of a bare image with torch: docs/gpu.md names them.
Exit status: 0 if nothing failed, 1 if a part did, 2 without a CUDA device or a required module.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from baton.common.errors import ConfigurationError
from benchmarks.machine import COMMIT_VARIABLE, describe_gpu_machine, find_problem
from benchmarks.output import write_results
from benchmarks.planned import PartReport, PlannedPart, choose_parts, run_parts, summarize_reports

__all__ = ["CALLS", "MODULES", "SECONDS", "main", "run_call"]

MODULES = ("grpc", "prometheus_client", "pytest", "pytest_timeout", "hypothesis")
"""Needed beside those of the engine and the KV store."""
_FACTS, _TESTS = "scripts.gpu_facts", "scripts.gpu_tests"
_STEPS_8B = (
    *("engine-step", "--model", "llama-3.1-8b", "--load-format", "dummy", "--dtype", "bfloat16"),
    *("--device", "cuda", "--batch-size", "1", "32", "256", "--input-len", "512", "4096"),
    *("--num-steps", "48", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"),
    *("--max-model-len", "4352"),
)
CALLS: Mapping[str, Sequence[PlannedPart]] = {
    "first": (
        PlannedPart("machine", ("machine",), 25, module=_FACTS, is_essential=True),
        PlannedPart("collect", ("collect",), 25, module=_FACTS),
        PlannedPart(
            "kernel_tests",
            ("tests/triton", "--processes", "12"),
            110,
            module=_TESTS,
            is_timed=True,
        ),
        PlannedPart("runner_tests", ("tests/gpu",), 60, module=_TESTS, is_timed=True),
        PlannedPart("agreement", ("agreement", "--model", "llama-3.2-1b", "--device", "cuda"), 110),
        PlannedPart("steps", _STEPS_8B, 150),
    ),
    "second": (
        PlannedPart("attention_sweep", ("attention-sweep",), 110),
        PlannedPart("kernels", ("kernels", "--device", "cuda", "--model", "llama-3.1-8b"), 110),
        PlannedPart(
            "slow_kernel_tests",
            ("tests/triton", "--slow", "--processes", "12"),
            80,
            module=_TESTS,
            is_timed=True,
        ),
    ),
    "smoke": (
        PlannedPart(
            "machine", ("machine", "--device", "cpu"), 60, module=_FACTS, is_essential=True
        ),
        PlannedPart("collect", ("collect", "--device", "cpu"), 60, module=_FACTS),
        PlannedPart(
            "kernel_tests",
            ("tests/triton/test_row_state.py", "--device", "cpu", "--processes", "2"),
            60,
            module=_TESTS,
            is_timed=True,
        ),
        PlannedPart(
            "runner_tests",
            ("tests/gpu/test_loading.py", "--device", "cpu"),
            60,
            module=_TESTS,
            is_timed=True,
        ),
        PlannedPart("agreement", ("agreement", "--input-len", "5", "40", "--output-len", "4"), 60),
        PlannedPart(
            "steps",
            (
                *("engine-step", "--async-scheduling", "--batch-size", "1", "3"),
                *("--num-steps", "4", "--input-len", "16", "--num-threads", "1"),
                *("--num-gpu-blocks-override", "64", "--max-model-len", "64"),
            ),
            60,
        ),
        PlannedPart(
            "attention_sweep",
            ("attention-sweep", "--device", "cpu", "--model", "llama-100m", "--kind", "uneven"),
            60,
        ),
        PlannedPart("kernels", ("kernels", "--model", "llama-100m", "--primitive", "rms_norm"), 60),
    ),
}
"""The parts of each command, with their shares of its time."""
SECONDS: Mapping[str, float] = {"first": 480.0, "second": 300.0, "smoke": 600.0}
"""The time of each: with two starts of a machine, the first two take a quarter of an hour."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts of one command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--call", choices=("first", "second"), default="first")
    parser.add_argument("--smoke", action="store_true", help="run every part tiny, on the CPU")
    parser.add_argument(
        "--part", action="append", metavar="NAME", help="repeatable; all by default"
    )
    parser.add_argument("--deadline", type=float, help="for all parts (default: 480, then 300)")
    args = parser.parse_args(arguments)
    call = "smoke" if args.smoke else args.call
    try:
        parts = choose_parts(CALLS[call], args.part)
    except ConfigurationError as error:
        parser.error(error.message)
    if args.deadline is not None and not args.deadline > 0:
        parser.error(f"--deadline is {args.deadline}; it must be > 0")
    problem = None if args.smoke else find_problem("gpu,test", MODULES)
    if problem is not None:
        print(f"gpu-first: {problem}; nothing was run")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    return run_call(call, parts, args.out, args.deadline or SECONDS[call])


def run_call(call: str, parts: Sequence[PlannedPart], folder: Path, seconds: float) -> int:
    """Runs parts, and writes the list of those that have ended after each.

    Args:
        call: its name in `CALLS`, and that of the list.
        parts: the parts of it that run.
        folder: gets the list and the parts' files.
        seconds: for all parts together.

    Returns:
        The exit status.
    """
    machine = describe_gpu_machine("cpu" if call == "smoke" else "cuda")
    # The files that are written may change the working tree, which must not change the commit.
    os.environ[COMMIT_VARIABLE] = str(machine["commit"])
    header = {
        "what": f"make gpu-first, {call}",
        "machine": machine,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    reports: list[PartReport] = []
    path = folder / f"{call}.json"
    for report in run_parts(parts, folder, "", seconds):
        reports.append(report)
        content = {
            "finished": len(reports) == len(parts),
            "parts": [asdict(part) for part in reports],
        }
        write_results(path, header | content)
    print(f"\n{summarize_reports(reports)}\nwritten: {path}")
    return int(any(report.problem for report in reports))


if __name__ == "__main__":
    sys.exit(main())
