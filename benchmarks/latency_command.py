"""`baton bench latency`: prefill and time per token of batches on one engine, and their floors."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from benchmarks.models import add_offline_args, offline_config
from benchmarks.offline.cases import (
    CaseResult,
    OfflineCase,
    RunTimes,
    make_cases,
    run_times,
    summarize,
)
from benchmarks.output import (
    add_number,
    add_numbers,
    add_output_args,
    check_output_args,
    report_of_run,
    write_report,
)
from benchmarks.report import Panel, Series, Table
from benchmarks.workloads.kind import refuse_below

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    for flag, default, text in (
        ("--batch-size", [1, 4, 16], "requests that begin together"),
        ("--input-len", [128], "tokens of a prompt"),
        ("--output-len", [64], "tokens to generate"),
    ):
        add_numbers(parser, flag, default, f"{text}; every combination is measured")
    add_number(parser, "--repeats", 5, "runs per case")
    add_offline_args(parser)
    add_output_args(parser)


def main(args: argparse.Namespace) -> None:
    """Measures, on an engine in this process, how long batches of requests take to their first
    tokens and from token to token, beside what the machine's ceilings allow.
    """
    check_output_args(args)
    refuse_below(1, repeats=args.repeats)
    cases = make_cases(args.batch_size, args.input_len, args.output_len)
    config = offline_config(args)

    from benchmarks.offline.offline_engine import (
        OfflineEngine,
        cache_facts,
        measure_floors,
        peak_memory_bytes,
    )

    with OfflineEngine(config) as engine:
        runs = _run_cases(engine, cases, args.repeats)
        peak_bytes = peak_memory_bytes()
        floors = measure_floors(config)
    results = [summarize(case, runs[case], floors.shape, floors.ceilings) for case in cases]
    facts = {
        "type": floors.dtype,
        **cache_facts(engine.core.info),
        "load and warm up, s": f"{engine.start_up_s:.2f}",
        "peak memory, MiB": f"{peak_bytes / 2**20:,.0f}",
    }
    report = report_of_run(
        args,
        f"Latency of {config.model_name}",
        [_table(results)],
        machine=floors.machine,
        facts=facts,
        panels=_panels(results),
        start_up_s=engine.start_up_s,
        peak_memory_bytes=peak_bytes,
        cases=[asdict(result) for result in results],
    )
    write_report(report, args)


def _run_cases(
    engine: Any, cases: Sequence[OfflineCase], repeats: int
) -> dict[OfflineCase, list[RunTimes]]:
    """Runs all cases in turn, `repeats` times, after a round that does not count."""
    vocab_size = engine.core.info.vocab_size
    runs: dict[OfflineCase, list[RunTimes]] = {case: [] for case in cases}
    rounds = [(number, case) for number in range(1 + repeats) for case in cases]
    for number, case in tqdm(rounds, unit="run", disable=None):
        times = run_times(engine.run(case.requests(vocab_size, seed=number)))
        if number:
            runs[case].append(times)
    return runs


def _table(results: Iterable[CaseResult]) -> Table:
    columns = ("batch", "in", "out", "prefill ms", "floor", "x", "ms/token", "floor", "x")
    rows = [
        (
            str(result.case.batch_size),
            result.case.input_len,
            result.case.output_len,
            result.prefill_ms,
            result.prefill_floor_ms,
            result.prefill_ms / result.prefill_floor_ms,
            result.step_ms,
            result.step_floor_ms,
            result.step_ms / result.step_floor_ms,
            result.output_tokens_per_s,
        )
        for result in results
    ]
    return Table(
        "Medians",
        (*columns, "output tokens/s"),
        rows,
        "Floor: the model's operations over the matrix rate, or its weights' bytes over the "
        "read bandwidth, whichever takes longer.",
    )


def _panels(results: Sequence[CaseResult]) -> list[Panel]:
    """Returns plots over the batch size: a line for each length, and its floor."""
    return [
        _panel("Time per token", "ms per token", results, "step_ms", "step_floor_ms"),
        _panel("Time to all first tokens", "ms", results, "prefill_ms", "prefill_floor_ms"),
        _panel("Throughput", "output tokens/s", results, "output_tokens_per_s", None),
    ]


def _panel(
    title: str, y_label: str, results: Sequence[CaseResult], field: str, floor: str | None
) -> Panel:
    series = []
    for lengths in dict.fromkeys((r.case.input_len, r.case.output_len) for r in results):
        own = [r for r in results if (r.case.input_len, r.case.output_len) == lengths]
        sizes = [result.case.batch_size for result in own]
        label = f"{lengths[0]} in, {lengths[1]} out"
        series.append(Series(label, sizes, [getattr(r, field) for r in own], "marked"))
        if floor is not None:
            floors = [getattr(result, floor) for result in own]
            series.append(Series(f"{label}: floor", sizes, floors, "line"))
    return Panel(title, "batch size", y_label, series)
