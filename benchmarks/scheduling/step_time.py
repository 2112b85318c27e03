"""Time of a scheduler step, and what it grows with, against the former scheduler."""

import cProfile
import io
import pstats
import statistics
from typing import Any

from benchmarks.scheduling.former import FORMER_COMMIT, measure_former
from benchmarks.scheduling.null_runner import NullRunner, new_scheduler
from benchmarks.scheduling.step_loop import StepTimes, measure_all, start_load

__all__ = ["measure_step_time"]

_PROFILED_STEPS = 320
_PROFILED_RUNNING = 1024
_PROFILED_LINES = 16


def measure_step_time() -> dict[str, Any]:
    """Step times of this scheduler and the former one, growth, and where the time goes."""
    cases, growth = [], []
    for case, times in measure_all(new_scheduler, NullRunner().execute):
        cases.append(case)
        if case["pattern"] == "aligned":
            growth.append(_growth(case, times))
    return {
        "steps": cases,
        "growth": growth,
        "former_commit": FORMER_COMMIT,
        "former_steps": measure_former(),
        "profiles": {pattern: _profile(pattern) for pattern in ("steady", "churn")},
    }


def _growth(case: dict[str, Any], times: list[StepTimes]) -> dict[str, Any]:
    """What `schedule` takes where nothing changes, and how much more for each block that begins.

    The aligned pattern has only these two kinds of steps.
    """
    quiet = statistics.median(t.schedule for t in times if t.num_due == 0)
    busy = statistics.median(t.schedule for t in times if t.num_due > 0)
    return {
        "num_running": case["num_running"],
        "context": case["context"],
        "schedule_us_nothing_due": round(quiet / 1e3, 2),
        "schedule_us_all_due": round(busy / 1e3, 2),
        "schedule_us_per_due": round((busy - quiet) / case["num_running"] / 1e3, 2),
    }


def _profile(pattern: str) -> list[str]:
    """The functions that the most time is spent in, under cProfile's overhead."""
    load = start_load(new_scheduler, NullRunner().execute, _PROFILED_RUNNING, 256, pattern)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_PROFILED_STEPS):
        load.step()
    profile.disable()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime")
    stats.print_stats(r"^(?!step_loop|null_runner)", _PROFILED_LINES)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    first = next(index for index, line in enumerate(lines) if "ncalls" in line)
    return [line for line in lines[first:] if line]
