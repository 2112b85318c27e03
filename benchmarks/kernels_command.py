"""`baton bench kernels`: each primitive beside the reference and what the machine allows."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.kernels.case import DecoderShape, limit_s
from benchmarks.kernels.measure import (
    PRIMITIVES,
    KernelOutcome,
    KernelSetting,
    make_cases,
    measure,
)
from benchmarks.kernels.timing import cache_bytes_of
from benchmarks.machine import describe_machine, with_best_ceilings
from benchmarks.model_cost import Ceilings
from benchmarks.models import RANDOM_MODELS
from benchmarks.output import (
    add_device_arg,
    add_output_args,
    check_output_args,
    report_of_run,
    write_report,
    write_so_far,
)
from benchmarks.report import Cell, Report, Table
from benchmarks.workloads.kind import refuse_below

__all__ = ["add_args", "main", "make_tables", "to_plain"]

_DTYPES = ("bfloat16", "float32")
_DEFAULT_MODEL = "llama-100m"
_COLUMNS = (
    *("what", "size", "ours us", "GB/s", "GFLOP/s", "limit us", "ours / limit"),
    *("torch us", "torch / ours"),
)
_MIN_CREDIBLE_RATIO = 0.9
"""Least credible ratio of a median to its limit: ceilings vary by some percent."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        choices=[
            name for name, (_, shape) in RANDOM_MODELS.items() if "intermediate_size" in shape
        ],
        default=_DEFAULT_MODEL,
        help="the model whose shapes are measured (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default=_DTYPES[0],
        help="type of weights and KV (default: %(default)s)",
    )
    add_device_arg(parser, "where the kernels compute")
    parser.add_argument(
        "--num-threads",
        type=int,
        metavar="N",
        help="threads of the CPU (default: all usable cores)",
    )
    parser.add_argument(
        "--primitive", choices=list(PRIMITIVES), action="append", help="repeatable; all by default"
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Times each primitive of a model's shapes: the selected kernels, on a CPU the reference in
    torch, and the limit that memory and arithmetic set. Results are checked first; a figure of
    kernels that compute something else is not shown, and the exit status is 1. The file of --json
    is written anew after each figure.
    """
    check_output_args(args)
    refuse_below(1, num_threads=1 if args.num_threads is None else args.num_threads)
    import kernels

    num_threads = args.num_threads or kernels.default_num_threads()
    before = describe_machine(args.device, num_threads)
    outcomes: list[KernelOutcome] = []
    for outcome in _measure(args, num_threads):
        outcomes.append(outcome)
        write_so_far(args, lambda: _report(args, before, num_threads, outcomes))
    # Measured twice: a disturbance at the start would make the limits too low.
    machine = with_best_ceilings(before, describe_machine(args.device, num_threads))
    write_report(_report(args, machine, num_threads, outcomes), args)
    return int(any(outcome.difference is not None for outcome in outcomes))


def _measure(args: argparse.Namespace, num_threads: int) -> Iterator[KernelOutcome]:
    device = torch.device(args.device)
    setting = KernelSetting(getattr(torch, args.dtype), num_threads, cache_bytes_of(device), device)
    _, config = RANDOM_MODELS[args.model]
    primitives = list(dict.fromkeys(args.primitive or PRIMITIVES))
    cases = make_cases(primitives, DecoderShape.of_config(config), setting.dtype, device)
    for case in tqdm(cases, unit="case", disable=None):
        yield measure(case, setting)


def _report(
    args: argparse.Namespace,
    machine: Mapping[str, Any],
    num_threads: int,
    outcomes: Sequence[KernelOutcome],
) -> Report:
    from kernels.library.library import select

    ceilings, selection = Ceilings.of_machine(machine, args.dtype), select()
    kernels = "Triton" if args.device == "cuda" else f"{selection.variant}: {selection.reason}"
    return report_of_run(
        args,
        f"Kernels on shapes of {args.model}, {args.dtype}",
        make_tables(outcomes, ceilings),
        machine=machine,
        facts={"kernels": kernels, "threads": str(num_threads)},
        kernels="Triton" if args.device == "cuda" else selection.variant,
        num_threads=num_threads,
        outcomes=[to_plain(outcome, ceilings) for outcome in outcomes],
    )


def make_tables(outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> list[Table]:
    """Returns one table per primitive, in the order of the outcomes."""
    return [
        _table(name, [outcome for outcome in outcomes if outcome.primitive == name], ceilings)
        for name in dict.fromkeys(outcome.primitive for outcome in outcomes)
    ]


def to_plain(outcome: KernelOutcome, ceilings: Ceilings) -> dict[str, Any]:
    """Returns an outcome as plain data for JSON."""
    return asdict(outcome) | {"limit_s": limit_s(outcome.cost, ceilings)}


def _table(primitive: str, outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> Table:
    rows = [_row(outcome, ceilings) for outcome in outcomes]
    return Table(primitive, _COLUMNS, rows, " ".join(_notes(outcomes, ceilings)))


def _notes(outcomes: Sequence[KernelOutcome], ceilings: Ceilings) -> Iterator[str]:
    wrong = [
        f"{outcome.what}, {outcome.size}: {outcome.difference}"
        for outcome in outcomes
        if outcome.difference is not None
    ]
    if wrong:
        yield f"Wrong results, not measured: {'; '.join(wrong)}."
    if any(
        outcome.kernel_s is not None
        and outcome.kernel_s < _MIN_CREDIBLE_RATIO * limit_s(outcome.cost, ceilings)
        for outcome in outcomes
    ):
        yield (
            "Faster than the limit: the machine was disturbed while its ceilings were measured. "
            "Measure again."
        )


def _row(outcome: KernelOutcome, ceilings: Ceilings) -> list[Cell]:
    limit, cost = limit_s(outcome.cost, ceilings), outcome.cost
    if outcome.kernel_s is None:
        return [outcome.what, outcome.size, None, None, None, 1e6 * limit, None, None, None]
    return [
        outcome.what,
        outcome.size,
        1e6 * outcome.kernel_s,
        cost.num_bytes / outcome.kernel_s / 1e9,
        cost.num_operations / outcome.kernel_s / 1e9 if cost.num_operations else None,
        1e6 * limit,
        outcome.kernel_s / limit,
        *_compared(outcome.kernel_s, outcome.reference_s),
    ]


def _compared(kernel_s: float, reference_s: float | None) -> list[Cell]:
    return [None, None] if reference_s is None else [1e6 * reference_s, reference_s / kernel_s]
