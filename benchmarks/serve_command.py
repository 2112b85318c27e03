"""`baton bench serve`: sends a workload to a running endpoint, and reports what users see."""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args
from baton.common.security.client import ClientTls
from benchmarks.arrivals import ArrivalProcess, add_arrival_args, arrivals_from_args
from benchmarks.latency_report import error_tables, latency_panels, latency_table, throughput_table
from benchmarks.load import LoadLimits, run_load, warm_up, warm_up_requests
from benchmarks.metrics import (
    ServiceLevel,
    add_goodput_arg,
    compute_metrics,
    distribution_of,
    parse_service_level,
)
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Report
from benchmarks.request import BenchRequest, EndpointDescription, MeasuredRequest
from benchmarks.targets import opened_target
from benchmarks.workloads.registry import add_workload_args, workload_from_args

__all__ = ["add_args", "main"]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--target",
        default="grpc://127.0.0.1:50051",
        metavar="URL",
        help="grpc://HOST:PORT, a Baton router, or http://HOST:PORT/v1, an OpenAI-style endpoint "
        "(default: %(default)s)",
    )
    parser.add_argument("--model", default="", help="model to ask for (default: the served one)")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="every token id is smaller (default: the model's)",
    )
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most requests in flight (default: any)"
    )
    parser.add_argument(
        "--num-warmups",
        type=int,
        default=4,
        metavar="N",
        help="requests sent before the run, which do not count (default: %(default)s)",
    )
    parser.add_argument(
        "--request-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds after which a request counts as failed (default: %(default)g)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="key of the endpoint's API")
    add_flags(parser, ClientTls, "security")
    add_goodput_arg(parser)
    add_workload_args(parser)
    add_arrival_args(parser)
    add_output_args(parser)
    parser.add_argument(
        "--save-records", action="store_true", help="write every request's times to the JSON"
    )


def main(args: argparse.Namespace) -> int:
    """Sends a workload to a running endpoint and reports time to first token, time between
    tokens, throughput and goodput. Tokens are counted by their ids; requests that fail, or
    whose streams are short, are counted as failures.
    """
    check_output_args(args)
    level = parse_service_level(args.goodput) if args.goodput else None
    run = asyncio.run(_measure(args))
    write_report(_make_report(run, level, args), args)
    return int(all(record.error is not None for record in run.records))


@dataclass(frozen=True, slots=True)
class _ServeRun:
    """The endpoint, the requests that were sent, and their records."""

    endpoint: EndpointDescription
    workload_name: str
    arrivals: ArrivalProcess
    requests: Sequence[BenchRequest]
    records: list[MeasuredRequest]


async def _measure(args: argparse.Namespace) -> _ServeRun:
    limits = LoadLimits(args.max_concurrency, args.request_timeout_s)
    tls = config_from_args(ClientTls, args)
    async with opened_target(args.target, args.model, args.api_key, tls) as target:
        endpoint = await target.describe()
        vocab_size = _vocab_size(args, endpoint)
        workload = workload_from_args(args, vocab_size)
        arrivals = arrivals_from_args(args, workload)
        requests = arrivals.apply(workload).requests
        await warm_up(target, limits, warm_up_requests(requests, args.num_warmups, vocab_size))
        with tqdm(total=len(requests), unit="request", disable=None) as bar:
            records = await run_load(requests, target, limits, _shown_on(bar))
    return _ServeRun(endpoint, workload.name, arrivals, requests, records)


def _vocab_size(args: argparse.Namespace, endpoint: EndpointDescription) -> int:
    size = args.vocab_size or endpoint.vocab_size
    if size is None:
        raise ConfigurationError(
            f"--vocab-size is missing, and {args.target} does not report the size"
        )
    return int(size)


def _shown_on(bar: "tqdm[Any]") -> Callable[[MeasuredRequest], None]:
    """Returns a callback that counts ended and failed requests on a progress bar."""
    num_failed = 0

    def show(record: MeasuredRequest) -> None:
        nonlocal num_failed
        if record.error is not None:
            num_failed += 1
            bar.set_postfix(failed=num_failed)
        bar.update()

    return show


def _make_report(run: _ServeRun, level: ServiceLevel | None, args: argparse.Namespace) -> Report:
    metrics = compute_metrics(run.records, level)
    results: dict[str, Any] = {
        "model": run.endpoint.model,
        "workload": run.workload_name,
        "arrivals": asdict(run.arrivals),
        "metrics": asdict(metrics),
    }
    if args.save_records:
        results["records"] = [asdict(record) for record in run.records]
    return report_of_run(
        args,
        f"{run.endpoint.model} at {args.target}: {run.workload_name}",
        (latency_table(metrics), throughput_table(metrics), *error_tables(metrics)),
        facts=_facts(run, args),
        panels=latency_panels(run.records, level),
        **results,
    )


def _facts(run: _ServeRun, args: argparse.Namespace) -> dict[str, str]:
    facts = {"arrivals": str(run.arrivals)}
    if args.max_concurrency is not None:
        facts["most in flight"] = str(args.max_concurrency)
    if args.goodput:
        facts["service level, ms"] = " ".join(args.goodput)
    facts["sent after their time, ms"] = _delays(run)
    return facts


def _delays(run: _ServeRun) -> str:
    """Returns how long requests waited beyond their time, for a place or the load generator."""
    delays_ms = [
        1000 * (record.sent_s - request.arrival_s)
        for request, record in zip(run.requests, run.records, strict=True)
        if request.arrival_s is not None
    ]
    delays = distribution_of(delays_ms)
    return f"p50 {delays.p50:.1f}, p99 {delays.p99:.1f}" if delays else "-"
