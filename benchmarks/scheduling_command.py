"""`baton bench scheduling`: the time of the scheduler's steps, without a model."""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.offline.scheduler_steps import measure_step_time
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Table

__all__ = ["add_args", "main", "make_tables"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_output_args(parser)


def main(args: argparse.Namespace) -> None:
    """Measures the steps of the scheduler with a runner that computes nothing: their times by
    running sequences and contexts, and what they grow with.
    """
    check_output_args(args)
    result = measure_step_time()
    write_report(report_of_run(args, "Scheduler", make_tables(result), step_time=result), args)


def make_tables(result: dict[str, Any]) -> list[Table]:
    """Returns the tables of `measure_step_time`'s result."""
    return [
        Table(
            "Steps, us",
            ("running", "context", "pattern", "schedule", "commit", "step"),
            [_step_row(case) for case in result["steps"] if case["pattern"] != "aligned"],
            "Medians (99th percentiles). Churn: one sequence in a hundred ends in each step, and "
            "as many start.",
        ),
        Table(
            "schedule(), us, by the number of blocks that begin",
            ("running", "context", "none", "one per sequence", "for each block"),
            [
                (
                    *(str(case["num_running"]), case["context"], case["schedule_us_nothing_due"]),
                    *(case["schedule_us_all_due"], case["schedule_us_per_due"]),
                )
                for case in result["growth"]
            ],
        ),
    ]


def _step_row(case: dict[str, Any]) -> Sequence[str | int]:
    times = (
        f"{case[f'{name}_us']:.0f} ({case[f'{name}_p99_us']:.0f})"
        for name in ("schedule", "commit", "step")
    )
    return (str(case["num_running"]), case["context"], case["pattern"], *times)
