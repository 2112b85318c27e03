"""`baton tune`: finds the flags of `baton serve` that serve the most requests within limits."""

import argparse
import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from tqdm import tqdm

from baton.common.flags.config_flags import flags_of_config
from benchmarks.arrivals import add_rated_arrival_args
from benchmarks.load import LoadLimits
from benchmarks.metrics import ServiceLevel, add_goodput_arg, parse_service_level
from benchmarks.models import add_model_arg, resolve_model
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Panel, Report, Series, Table
from benchmarks.tune.driver import TuneLoad, engine_of, run_search
from benchmarks.tune.search import (
    AXES,
    Candidate,
    Point,
    SearchSettings,
    best_points,
    coordinate_search,
    curve_of,
)
from benchmarks.workloads.kind import refuse_below
from benchmarks.workloads.registry import add_workload_args
from engine.cli_args import add_engine_args, engine_config_from_args
from engine.config import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineConfig,
)

__all__ = ["add_args", "main", "serve_command"]

_MAX_CURVES = 6
_REQUEST_TIMEOUT_S = 600.0


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_goodput_arg(parser, is_required=True)
    add_model_arg(parser)
    parser.add_argument(
        "--num-workers",
        type=int,
        default=2,
        metavar="N",
        help="prefill and decode workers together (default: %(default)s)",
    )
    parser.add_argument(
        "--start-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="the first request rate, per second (default: %(default)g)",
    )
    parser.add_argument(
        "--time-budget-s",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds after which no measurement starts (default: %(default)g)",
    )
    add_workload_args(parser)
    add_rated_arrival_args(parser)
    add_engine_args(parser, omit=("model", "kv_connector", "turns_folder", "weights_folder"))
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Searches --max-num-seqs, --max-num-batched-tokens, --long-prefill-token-threshold and the
    ratio of prefill to decode workers for the highest goodput: requests per second within the
    limits of --goodput. Starts from the flags given, on clusters of this machine, raises the
    rate until goodput falls, and prints the flags to use.
    """
    check_output_args(args)
    level = parse_service_level(args.goodput)
    refuse_below(1, num_workers=args.num_workers)
    refuse_below(1e-3, start_rate=args.start_rate, time_budget_s=args.time_budget_s)
    engine = engine_config_from_args(args, model=resolve_model(args.model))
    load = TuneLoad(args, level, LoadLimits(None, _REQUEST_TIMEOUT_S))
    search = coordinate_search(_start(args), AXES, SearchSettings(start_rate=args.start_rate))
    points = asyncio.run(run_search(search, engine, load, args.time_budget_s, tqdm.write))
    write_report(_make_report(points, engine, level, args), args)
    return int(best_points(points)[0].goodput == 0)


def serve_command(engine: EngineConfig, candidate: Candidate) -> str:
    """Returns the command line that runs a candidate."""
    flags = flags_of_config(engine_of(engine, candidate), omit=("kv_connector"))
    prefill = ("--prefill-workers", str(candidate.num_prefill))
    decode = ("--decode-workers", str(candidate.num_decode))
    return shlex.join(["baton", "serve", *prefill, *decode, *flags])


def _start(args: argparse.Namespace) -> Candidate:
    num_prefill = args.num_workers // 2
    return Candidate(
        max_num_seqs=args.max_num_seqs or DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens=args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        num_prefill=num_prefill,
        num_decode=args.num_workers - num_prefill,
    )


def _make_report(
    points: Sequence[Point], engine: EngineConfig, level: ServiceLevel, args: argparse.Namespace
) -> Report:
    ranked = best_points(points)
    command = serve_command(engine, ranked[0].candidate)
    return report_of_run(
        args,
        f"Goodput of {engine.model_name} under {level} ms",
        (_candidates_table(ranked), _curve_table(curve_of(points, ranked[0].candidate))),
        facts={"workload": f"{args.workload}, arrivals {args.arrival}", "use": command},
        panels=_panels(points, ranked, level),
        command=command,
        points=[asdict(point) for point in points],
    )


def _candidates_table(ranked: Sequence[Point]) -> Table:
    rows = [
        (
            f"#{rank}",
            f"{point.candidate.num_prefill}:{point.candidate.num_decode}",
            point.candidate.max_num_seqs,
            point.candidate.max_num_batched_tokens,
            point.candidate.long_prefill_token_threshold,
            point.request_rate,
            point.goodput,
            f"{100 * point.share:.0f}%",
        )
        for rank, point in enumerate(ranked, 1)
    ]
    columns = ("", "prefill:decode", "seqs", "tokens", "chunk", "requests/s", "good/s", "good")
    return Table("Candidates at their best rate, the best first", columns, rows)


def _curve_table(curve: Sequence[Point]) -> Table:
    rows = [
        (
            f"{point.request_rate:.2f}",
            point.goodput,
            f"{100 * point.share:.0f}%",
            point.ttft_p90_ms,
            point.tpot_p90_ms,
            point.num_failed,
        )
        for point in curve
    ]
    columns = ("requests/s", "good/s", "good", "TTFT p90, ms", "TPOT p90, ms", "failed")
    return Table(f"The best: {curve[0].candidate}", columns, rows)


def _panels(
    points: Sequence[Point], ranked: Sequence[Point], level: ServiceLevel
) -> tuple[Panel, ...]:
    """Returns the curves of the best candidates and of the first one."""
    curves = {
        f"#{rank}": curve_of(points, best.candidate)
        for rank, best in enumerate(ranked, 1)
        if rank <= _MAX_CURVES or best.candidate == points[0].candidate
    }
    return (
        _panel("Goodput", "good requests/s", curves, "goodput", None),
        _panel("Time to first token, p90", "milliseconds", curves, "ttft_p90_ms", level.ttft_ms),
        _panel("Time per token, p90", "milliseconds", curves, "tpot_p90_ms", level.tpot_ms),
    )


def _panel(
    title: str,
    y_label: str,
    curves: dict[str, list[Point]],
    field: str,
    limit: float | None,
) -> Panel:
    series = []
    for label, curve in curves.items():
        known = [point for point in curve if getattr(point, field) is not None]
        rates = [point.request_rate for point in known]
        series.append(Series(label, rates, [getattr(p, field) for p in known], "marked"))
    limits = {} if limit is None else {f"limit {limit:g}": limit}
    return Panel(title, "requests/s sent", y_label, series, y_limits=limits)
