"""A plan of several benchmarks: each runs in a process of its own, within a share of the time.

A part that crashes, hangs or leaves memory behind does not affect the others, and the file of its
figures keeps those that it had written.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from baton.common.errors import ConfigurationError
from benchmarks.machine import missing_of

__all__ = [
    "PartReport",
    "PlannedPart",
    "choose_parts",
    "run_parts",
    "run_timed",
    "summarize_reports",
    "time_for",
]
_ROOT = Path(__file__).resolve().parents[1]
_LAST_CHARACTERS = 2000
_REPORT_S = 3.0
"""Left to a part that knows its time, for its report."""


def run_timed(
    command: Sequence[str],
    output: IO[bytes],
    seconds: float,
    *,
    folder: Path,
    variables: Mapping[str, str],
) -> int | None:
    """Runs a command; returns its exit status, or None if it was killed as its time was over.

    Args:
        command: the program and its arguments.
        output: gets what it prints.
        seconds: how long it may run.
        folder: it runs there.
        variables: of its environment, beside those of this process.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            # With the compilers and servers that it started, also after an interruption.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """A benchmark of a plan.

    Attributes:
        name: the name by which `--part` chooses it; its figures go to a file of this name.
        arguments: of the module; of `baton bench` by default.
        weight: its share of the time, relative to the other parts.
        needs: modules without which it is skipped.
        module: that runs, with `--json FILE` behind the arguments.
        is_timed: whether it also gets `--deadline SECONDS`, the time that it has.
        is_essential: whether the parts behind it do not run if it fails.
    """

    name: str
    arguments: tuple[str, ...]
    weight: float
    needs: tuple[str, ...] = ()
    module: str = "benchmarks"
    is_timed: bool = False
    is_essential: bool = False

    def command(self, path: Path, seconds: float) -> list[str]:
        """Returns the command that runs the part.

        Args:
            path: gets its figures.
            seconds: after which it is killed.
        """
        limit = ["--deadline", f"{max(0.0, seconds - _REPORT_S):.0f}"] if self.is_timed else []
        return [sys.executable, "-m", self.module, *self.arguments, *limit, "--json", str(path)]


@dataclass(frozen=True, slots=True)
class PartReport:
    """The end of a part.

    Attributes:
        part: its name.
        seconds: how long it ran.
        problem: why it failed; None if it did not.
        skipped: why it did not run; None if it did.
        file: name of the file of its figures; None if there is none.
    """

    part: str
    seconds: float
    problem: str | None = None
    skipped: str | None = None
    file: str | None = None


def choose_parts(parts: Sequence[PlannedPart], names: Sequence[str] | None) -> list[PlannedPart]:
    """Returns the named parts in the order of the plan; all without names.

    Raises:
        ConfigurationError: a name is unknown.
    """
    known = ", ".join(part.name for part in parts)
    for name in names or ():
        if name not in [part.name for part in parts]:
            raise ConfigurationError(f"--part is {name!r}; it must be one of {known}")
    return [part for part in parts if not names or part.name in names]


def time_for(parts: Sequence[PlannedPart], index: int, seconds_left: float) -> float:
    """Returns the seconds for a part. Time that earlier parts left is shared by all later ones."""
    return seconds_left * parts[index].weight / sum(part.weight for part in parts[index:])


def run_parts(
    parts: Sequence[PlannedPart], folder: Path, suffix: str, deadline_s: float
) -> Iterator[PartReport]:
    """Runs all parts, one after the other, within the deadline, and prints their output.

    Args:
        parts: the parts, in the order to run them.
        folder: gets the file of each part's figures.
        suffix: of the files' names, before ".json".
        deadline_s: seconds for all parts together.

    Yields:
        The report of each part when it has ended.
    """
    ends_at = time.monotonic() + deadline_s
    failed: str | None = None
    for index, part in enumerate(parts):
        seconds = time_for(parts, index, max(0.0, ends_at - time.monotonic()))
        if failed is not None:
            report = PartReport(part.name, 0.0, skipped=f"{failed} failed")
        elif missing := missing_of(part.needs):
            report = PartReport(part.name, 0.0, skipped=f"not installed: {', '.join(missing)}")
        else:
            # Absolute, as the part runs in another folder.
            path = folder.resolve() / f"{part.name}{suffix}.json"
            report = _run_part(part, path, seconds)
            if report.problem and part.is_essential:
                failed = part.name
        yield report


def summarize_reports(reports: Sequence[PartReport]) -> str:
    """Returns a line for each part that failed or was skipped."""
    lines = [f"{report.part}: {report.skipped}" for report in reports if report.skipped]
    lines += [
        f"{report.part}: {report.problem.splitlines()[-1]}" for report in reports if report.problem
    ]
    return "\n".join(lines or ["nothing failed"])


def _run_part(part: PlannedPart, path: Path, seconds: float) -> PartReport:
    print(f"\n{part.name}, at most {seconds:.0f} s: {part.module} {' '.join(part.arguments)}")
    sys.stdout.flush()
    began, wrote_before = time.monotonic(), _changed_at(path)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        with output.open("wb") as stream:
            status = run_timed(
                part.command(path, seconds),
                stream,
                seconds,
                folder=_ROOT,
                variables={"HF_HUB_OFFLINE": "1"},
            )
        text = output.read_text(errors="replace").strip()
    print(text)
    problem = None
    if status is None:
        problem = f"ended: its {seconds:.0f} s were over"
    elif status != 0:
        problem = f"ended with status {status}: {text[-_LAST_CHARACTERS:]}"
    file = path.name if _changed_at(path) != wrote_before else None
    return PartReport(part.name, round(time.monotonic() - began, 1), problem, file=file)


def _changed_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
