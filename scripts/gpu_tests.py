"""Runs files of tests on a GPU, each in a process of its own: a part of `make gpu-first`.

    python3 -m scripts.gpu_tests tests/triton --processes 12 --json kernel_tests.json

A kernel that faults breaks the CUDA context of its own file only. The kernels' files run in
parallel, because compiling them on the CPU takes longer than running them on the GPU; the
runtime's files run alone, because they measure memory. The report is rewritten after each file.
Exit status: 0 if all tests passed, 1 if a test failed or time ran out.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from baton.common.machine_limits import usable_cores
from benchmarks.machine import describe_gpu_machine
from benchmarks.output import write_results
from benchmarks.planned import run_timed

__all__ = ["FileRun", "in_words", "main", "run_file", "run_suite", "summarize"]

ROOT = Path(__file__).resolve().parents[1]
_QUICK, _SLOW = "not slow", "slow"  # pytest's mark expressions
_MAY_BE_SLOW = re.compile(r"mark\.(slow|sampled)")
# Exit statuses of pytest; the second one means that a file could not be collected.
_FAILED, _INTERRUPTED, _NO_TESTS = 1, 2, 5
_LAST_CHARACTERS = 2000
_NUM_SLOWEST = 10


@dataclass
class FileRun:
    """The result of one test process.

    Attributes:
        file: the test file.
        marks: mark expression that selected the tests.
        seconds: duration of the process.
        tests: one entry per started test: its name, outcome, seconds and message.
        problem: why the process did not finish normally; None if it did.
    """

    file: str
    marks: str
    seconds: float = 0.0
    tests: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def main() -> int:
    """Runs the tests that the arguments name, and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="+", type=Path, help="folders or files of tests")
    parser.add_argument("--processes", type=int, default=1, help="files that run side by side")
    parser.add_argument(
        "--slow", action="store_true", help="run the tests marked slow, not the others"
    )
    parser.add_argument("--device", default="cuda", help="cpu for Triton's interpreter")
    parser.add_argument("--deadline", type=float, default=450.0, help="then files are killed")
    parser.add_argument("--json", type=Path, required=True, help="the report")
    args = parser.parse_args()
    report = run_suite(
        args.paths,
        _SLOW if args.slow else _QUICK,
        args.processes,
        args.device,
        args.deadline,
        args.json,
    )
    print(in_words(report))
    return 0 if report["all_passed"] else 1


def run_suite(
    paths: Sequence[Path],
    marks: str,
    num_processes: int,
    device: str,
    deadline_s: float,
    path: Path,
) -> dict[str, Any]:
    """Runs files of tests.

    Args:
        paths: the files, or folders of them.
        marks: expression of pytest's that selects the tests: "slow" or "not slow".
        num_processes: the most files that run side by side.
        device: "cuda", or "cpu" for Triton's interpreter.
        deadline_s: seconds after which processes that still run are killed.
        path: file for the report, rewritten after each test file and at the end.

    Returns:
        The report.
    """
    began = time.monotonic()
    header = {
        "what": f"tests of {', '.join(map(str, paths))}, {marks}",
        "machine": describe_gpu_machine(device),  # before the report changes the working tree
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    runs: list[FileRun] = []

    def write(*, is_finished: bool) -> dict[str, Any]:
        seconds = {"seconds": round(time.monotonic() - began, 1)}
        report = header | seconds | summarize(runs, is_finished=is_finished)
        write_results(path, report)
        return report

    run = partial(run_file, marks=marks, device=device, ends_at=began + deadline_s)
    with ThreadPoolExecutor(min(usable_cores(), num_processes)) as threads:
        for ended in as_completed(threads.submit(run, file) for file in _files(paths, marks)):
            runs.append(ended.result())
            print(_line(runs[-1]), flush=True)
            write(is_finished=False)
    return write(is_finished=True)


def run_file(file: Path, *, marks: str, device: str, ends_at: float) -> FileRun:
    """Runs a file's tests in their own process; kills it at the time `ends_at` (monotonic)."""
    run = FileRun(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file), marks)
    began = time.monotonic()
    if began >= ends_at:
        run.problem = "not started: no time was left"
        return run
    with tempfile.TemporaryDirectory() as folder:
        lines, output = Path(folder, "results"), Path(folder, "output")
        lines.touch()
        with output.open("wb") as stream:
            status = _run_process(file, marks, device, lines, stream, ends_at)
        run.seconds = round(time.monotonic() - began, 2)
        run.tests, unfinished = _read_lines(lines.read_text().splitlines())
        run.problem = _find_problem(status, run, output.read_text(errors="replace"))
    if unfinished is not None:
        message = f"the process ended during this test: {run.problem}"
        run.tests.append(
            {"test": unfinished, "outcome": "failed", "seconds": 0.0, "message": message}
        )
    return run


def summarize(runs: Iterable[FileRun], *, is_finished: bool) -> dict[str, Any]:
    """Builds the report: counts, failures and skipped tests by name, and durations."""
    runs = [run for run in runs if run.tests or run.problem]
    tests = [test for run in runs for test in run.tests]
    counts = Counter(test["outcome"] for test in tests)
    problems = {f"{run.file} ({run.marks})": run.problem for run in runs if run.problem}
    slowest = sorted(tests, key=lambda test: -test["seconds"])[:_NUM_SLOWEST]
    is_clean = bool(counts["passed"]) and not counts["failed"] and not problems
    return {
        "finished": is_finished,
        "all_passed": is_finished and is_clean,
        "counts": {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": _messages(tests, "failed"),
        "problems": problems,
        "skipped": _messages(tests, "skipped"),
        "files": [
            {"file": run.file, "marks": run.marks, "tests": len(run.tests), "seconds": run.seconds}
            for run in runs
        ],
        "slowest": {test["test"]: round(test["seconds"], 2) for test in slowest},
    }


def in_words(report: dict[str, Any]) -> str:
    """Formats a report's closing lines."""
    failures = [f"FAILED {name}\n    {text}" for name, text in report["failures"].items()]
    problems = [f"PROBLEM {name}\n    {text}" for name, text in report["problems"].items()]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["counts"].items())
    device = report["machine"]["device"]["name"]
    return "\n".join([*failures, *problems, f"{counts} in {report['seconds']} s on {device}"])


def _files(paths: Iterable[Path], marks: str) -> list[Path]:
    """Returns the test files; for slow tests, only the files that may have some."""
    folders = [path.resolve() for path in paths]
    files = [
        file
        for folder in folders
        for file in ([folder] if folder.is_file() else sorted(folder.glob("test_*.py")))
    ]
    return [file for file in files if marks != _SLOW or _MAY_BE_SLOW.search(file.read_text())]


def _run_process(
    file: Path, marks: str, device: str, lines: Path, output: Any, ends_at: float
) -> int | None:
    """Runs pytest on a file; returns the exit status, or None if time ran out."""
    from tests.support.result_lines import RESULTS_VARIABLE

    settings = ["-c", "tests/gpu.ini", "--rootdir", ".", "-p", "tests.support.result_lines"]
    command = [sys.executable, "-m", "pytest", *settings, "-m", marks, str(file)]
    variables = {"BATON_TEST_DEVICE": device, RESULTS_VARIABLE: str(lines)}
    seconds = max(0.0, ends_at - time.monotonic())
    return run_timed(command, output, seconds, folder=ROOT, variables=variables)


def _read_lines(lines: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    """Returns the tests that ended, and the name of a test that started but did not end."""
    entries = [json.loads(line) for line in lines]
    ended = [entry for entry in entries if "test" in entry]
    last = entries[-1] if entries else {}
    return ended, last.get("begins")


def _find_problem(status: int | None, run: FileRun, output: str) -> str | None:
    if status is None:
        return "ended: time ran out"
    has_failed = any(test["outcome"] == "failed" for test in run.tests)
    if status in (0, _NO_TESTS) or (status in (_FAILED, _INTERRUPTED) and has_failed):
        return None
    return f"pytest ended with status {status}: {output[-_LAST_CHARACTERS:].strip()}"


def _messages(tests: Iterable[dict[str, Any]], outcome: str) -> dict[str, str]:
    return {
        test["test"]: test.get("message", "")[:_LAST_CHARACTERS]
        for test in tests
        if test["outcome"] == outcome
    }


def _line(run: FileRun) -> str:
    counts = Counter(test["outcome"] for test in run.tests)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    end = f"; {run.problem.splitlines()[0]}" if run.problem else ""
    return f"{run.file} ({run.marks}): {outcomes or 'no tests'}, {run.seconds} s{end}"


if __name__ == "__main__":
    sys.exit(main())
