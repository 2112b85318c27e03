"""`baton bench throughput`: a workload on an engine in this process, all requests at once."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from benchmarks.latency_report import error_tables, latency_panels, latency_table, throughput_table
from benchmarks.load import warm_up_requests
from benchmarks.metrics import LoadMetrics, compute_metrics
from benchmarks.model_cost import floor_s
from benchmarks.models import add_offline_args, offline_config
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Table
from benchmarks.request import BenchRequest, MeasuredRequest, Workload
from benchmarks.workloads.registry import add_workload_args, workload_from_args

__all__ = ["add_args", "main"]

_NUM_WARMUPS = 4


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_workload_args(parser)
    add_offline_args(parser)
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures how fast an engine in this process serves a workload. All requests arrive at the
    start, except turns of a conversation, which wait for the turn before.
    """
    check_output_args(args)
    config = offline_config(args)

    from benchmarks.offline.offline_engine import (
        OfflineEngine,
        cache_facts,
        measure_floors,
        peak_memory_bytes,
    )

    with OfflineEngine(config) as engine:
        workload = workload_from_args(args, engine.core.info.vocab_size)
        records = _run(engine, workload)
        peak_bytes = peak_memory_bytes()
        floors = measure_floors(config)
    metrics = compute_metrics(records, None)
    floor = floor_s(workload.requests, floors.shape, floors.ceilings)
    cost = {
        "floor_s": floor,
        "share_of_floor": floor / metrics.duration_s,
        "start_up_s": engine.start_up_s,
        "peak_memory_bytes": peak_bytes,
    }
    report = report_of_run(
        args,
        f"Throughput of {config.model_name}: {workload.name}",
        (
            *(throughput_table(metrics), _cost_table(metrics, cost), latency_table(metrics)),
            *error_tables(metrics),
        ),
        machine=floors.machine,
        facts={"type": floors.dtype, **cache_facts(engine.core.info)},
        panels=latency_panels(records, None),
        workload=workload.name,
        metrics=asdict(metrics),
        **cost,
    )
    write_report(report, args)
    return int(metrics.num_failed == metrics.num_requests)


def _run(engine: Any, workload: Workload) -> Sequence[MeasuredRequest]:
    """Warms up, then runs the workload."""
    requests: Sequence[BenchRequest] = workload.requests
    engine.run(warm_up_requests(requests, _NUM_WARMUPS, engine.core.info.vocab_size))
    with tqdm(total=len(requests), unit="request", disable=None) as bar:
        records: Sequence[MeasuredRequest] = engine.run(requests, lambda record: bar.update())
    return records


def _cost_table(metrics: LoadMetrics, cost: dict[str, float]) -> Table:
    rows = [
        ("floor, s", cost["floor_s"]),
        ("duration / floor", metrics.duration_s / cost["floor_s"]),
        ("floor, output tokens/s", metrics.num_output_tokens / cost["floor_s"]),
        ("load and warm up, s", cost["start_up_s"]),
        ("peak memory, MiB", cost["peak_memory_bytes"] / 2**20),
    ]
    return Table(
        "Cost",
        ("", "value"),
        rows,
        "Floor: operations over the matrix rate, or the weights' bytes per step over the read "
        "bandwidth; each distinct prefix is computed once.",
    )
