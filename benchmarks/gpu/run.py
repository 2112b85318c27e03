"""Runs the parts, each in a process of its own: what one spoils, or leaves behind, is its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts.rates import ceilings_of
from benchmarks.gpu.plan import Part, time_for
from benchmarks.gpu.record import TimeLeft, read_record
from benchmarks.model_cost import Ceilings

__all__ = ["run_parts"]

_ROOT = Path(__file__).resolve().parents[2]
_END_S = 5.0
"""How long before it is ended a part begins nothing more."""
_LAST_CHARACTERS = 2000


def run_parts(
    parts: Sequence[Part], *, is_smoke: bool, deadline_s: float
) -> Iterator[dict[str, Any]]:
    """Runs all parts, one after the other, within the deadline.

    Args:
        parts: in this order.
        is_smoke: whether to run all of it tiny, on the CPU.
        deadline_s: seconds for all of them.

    Yields:
        Per part, when it has ended, its name, seconds, results, and problem if it did not come
        to its end.
    """
    left = TimeLeft.of(deadline_s)
    ceilings: Ceilings | None = None
    for index, part in enumerate(parts):
        seconds = time_for(parts, index, left.seconds)
        report = _run_part(part, seconds, ceilings, is_smoke=is_smoke)
        ceilings = ceilings or ceilings_of(report["results"])
        end = f"; {report['problem'].splitlines()[-1]}" if report["problem"] else ""
        print(f"{part.name}: {len(report['results'])} results, {report['seconds']} s{end}")
        sys.stdout.flush()
        yield report


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
    """Its exit status; None if it had to be ended."""
    command = [sys.executable, "-m", "benchmarks.gpu.parts"]
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
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
            process.wait()
            return None
