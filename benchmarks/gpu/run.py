"""Runs the parts of a GPU run, each in a process of its own.

A part that crashes or leaves memory behind does not affect the others. `python -m
benchmarks.gpu.run` runs one part, which a JSON line on stdin describes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.hardware import missing_of
from benchmarks.gpu.parts.rates import ceilings_of
from benchmarks.gpu.plan import FULL, SMOKE, Part, time_for
from benchmarks.gpu.record import Record, TimeLeft, read_record
from benchmarks.model_cost import Ceilings

__all__ = ["run_parts"]

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 5.0
"""A part starts no measurement in its last seconds."""
_LAST_CHARACTERS = 2000


def run_parts(
    parts: Sequence[Part], *, is_smoke: bool, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """Runs all parts, one after the other, within the deadline.

    Args:
        parts: the parts, in the order to run them.
        is_smoke: whether to run a tiny version on the CPU.
        deadline_s: seconds for all parts together.

    Yields:
        The report of each part when it has ended: its name, seconds and results, and the problem
        if it failed.
    """
    left = TimeLeft.of(deadline_s)
    ceilings: Ceilings | None = None
    for index, part in enumerate(parts):
        seconds = time_for(parts, index, left.seconds)
        missing = missing_of(part.needs)
        if missing:
            report = _skipped_part(part, f"not installed: {', '.join(missing)}")
        else:
            report = _run_part(part, seconds, ceilings, is_smoke=is_smoke)
        ceilings = ceilings or ceilings_of(report["results"])
        end = f"; {report['problem'].splitlines()[-1]}" if report["problem"] else ""
        print(f"{part.name}: {len(report['results'])} results, {report['seconds']} s{end}")
        sys.stdout.flush()
        yield report


def _skipped_part(part: Part, reason: str) -> dict[str, Any]:
    result = {"kind": "part", "name": part.name, "skipped": reason}
    return {"part": part.name, "seconds": 0.0, "problem": None, "results": [result]}


def _run_part(
    part: Part, seconds: float, ceilings: Ceilings | None, *, is_smoke: bool
) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        record, output = Path(folder, "record"), Path(folder, "output")
        record.touch()
        task = {
            "module": part.module,
            "model": part.model,
            "smoke": is_smoke,
            "ceilings": astuple(ceilings) if ceilings else None,
            "record": str(record),
            "seconds": max(0.0, seconds - _END_S),
        }
        status = _run_process(task, output, seconds)
        problem = None
        if status is None:
            problem = f"ended: its {seconds:.0f} s were over"
        elif status != 0:
            text = output.read_text(errors="replace")[-_LAST_CHARACTERS:].strip()
            problem = f"ended with status {status}: {text}"
        return {
            "part": part.name,
            "seconds": round(time.monotonic() - began, 1),
            "problem": problem,
            "results": read_record(record),
        }


def _run_process(task: dict[str, Any], output: Path, seconds: float) -> int | None:
    """Returns the exit status; None if the process was killed because its time was over."""
    command = [sys.executable, "-m", "benchmarks.gpu.run"]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers and servers that it started
            process.wait()
            return None


def _run_task(task: Mapping[str, Any]) -> None:
    """Measures one part, in the process that `_run_process` started."""
    record = Record(Path(task["record"]), TimeLeft.of(task["seconds"]))
    models = (task["model"],) if task["model"] else ()
    ceilings = Ceilings(*task["ceilings"]) if task["ceilings"] else None
    plan = SMOKE if task["smoke"] else FULL
    import_module(task["module"]).measure(plan, ceilings, record, *models)


if __name__ == "__main__":
    _run_task(json.loads(sys.stdin.readline()))
