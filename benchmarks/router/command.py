"""`baton bench router`: what requests and streamed tokens cost a router process, part by part."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Table
from benchmarks.router.connections import connection_table, measure_connections
from benchmarks.router.decision import decision_table, measure_decisions
from benchmarks.router.idle import idle_table, measure_idle
from benchmarks.router.long_prompts import long_prompt_table, measure_long_prompts
from benchmarks.router.overload import measure_overload, overload_table
from benchmarks.router.policies import measure_policies, policy_table
from benchmarks.router.streams import measure_streams, stream_table
from benchmarks.router.workers import measure_workers, workers_table
from benchmarks.workloads.kind import refuse_below

__all__ = ["add_args", "main"]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the benchmark: how it is measured, and the table of its rows.

    Attributes:
        measure: returns the rows; its argument `is_smoke` makes everything tiny.
        table: shows them.
        is_default: whether it runs if no part is named.
    """

    measure: Callable[..., Sequence[Any]]
    table: Callable[[Any], Table]
    is_default: bool = True


_PARTS = {
    "streams": _Part(measure_streams, stream_table),
    "decision": _Part(measure_decisions, decision_table),
    "long-prompts": _Part(measure_long_prompts, long_prompt_table),
    "idle": _Part(measure_idle, idle_table),
    "overload": _Part(measure_overload, overload_table),
    # Needs 20,000 open files and two minutes.
    "connections": _Part(measure_connections, connection_table, is_default=False),
    # Takes ten minutes and some GB of memory.
    "workers": _Part(measure_workers, workers_table, is_default=False),
    # Takes 20 minutes.
    "policies": _Part(measure_policies, policy_table, is_default=False),
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    default = ", ".join(name for name, part in _PARTS.items() if part.is_default)
    parser.add_argument(
        "--part", choices=_PARTS, action="append", help=f"repeatable (default: {default})"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="trace in Mooncake's format for --part policies and workers (default: made-up "
        "conversations)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run everything once, tiny; its figures mean nothing"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of the router in the part streams (default: %(default)s)",
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures what a router process costs.

    streams: streamed tokens and small requests over gRPC and HTTP, beside a bare grpc.aio server
    and a bare uvicorn server that stream the same number of constant messages, then 400 streams at
    80% of capacity. decision: the choice of a replica. long-prompts: prompts of 100k tokens, and
    short requests beside them. idle: a router that has replicas and no requests. connections:
    10,000 streams at once, and the memory of each. The workers have no model: they send a token per
    stream and step. overload: three times as many requests as can be served, over simulated
    replicas. policies: routing policies on a trace, over simulated replicas. workers: the choice
    among up to 7,000 of them.
    """
    check_output_args(args)
    refuse_below(1, processes=args.processes)
    names = args.part or [name for name, part in _PARTS.items() if part.is_default]
    options = {
        "streams": {"num_processes": args.processes},
        "policies": {"trace": args.trace},
        "workers": {"trace": args.trace},
    }
    rows = {
        name: _PARTS[name].measure(is_smoke=args.smoke, **options.get(name, {}))
        for name in _PARTS
        if name in names
    }
    tables = [_PARTS[name].table(part_rows) for name, part_rows in rows.items()]
    title = "Router" + (", smoke test: no figures" if args.smoke else "")
    results = {name: [asdict(row) for row in part_rows] for name, part_rows in rows.items()}
    write_report(report_of_run(args, title, tables, rows=results), args)
    return 0
