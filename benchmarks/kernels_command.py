"""`baton bench kernels`: each primitive beside the reference and what the machine allows."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baton.common.errors import ConfigurationError
from benchmarks.machine import describe_machine, in_words, with_best_ceilings
from benchmarks.model_cost import Ceilings
from benchmarks.report.output import (
    add_output_args,
    check_output_args,
    flags_of,
    write_report,
    write_results,
)
from benchmarks.report.report import Report

if TYPE_CHECKING:
    from benchmarks.kernels.measure import KernelOutcome

__all__ = ["add_args", "main"]

_DTYPES = ("bfloat16", "float32")
_DEFAULT_MODEL = "llama-100m"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    from benchmarks.kernels.measure import PRIMITIVES
    from benchmarks.models import RANDOM_MODELS

    parser.add_argument(
        "--model",
        choices=list(RANDOM_MODELS),
        default=_DEFAULT_MODEL,
        help="the model whose shapes are measured (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default=_DTYPES[0],
        help="type of weights and KV (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the kernels compute (default: %(default)s)",
    )
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
    if args.num_threads is not None and args.num_threads < 1:
        raise ConfigurationError(f"--num-threads is {args.num_threads}; it must be >= 1")
    import kernels

    num_threads = args.num_threads or kernels.default_num_threads()
    before = describe_machine(args.device, num_threads)
    outcomes: list[KernelOutcome] = []
    for outcome in _measure(args, num_threads):
        outcomes.append(outcome)
        if args.json:
            write_results(args.json, _report(args, before, num_threads, outcomes).content)
    # Measured twice: a disturbance at the start would make the limits too low.
    machine = with_best_ceilings(before, describe_machine(args.device, num_threads))
    write_report(_report(args, machine, num_threads, outcomes), args)
    return int(any(outcome.difference is not None for outcome in outcomes))


def _measure(args: argparse.Namespace, num_threads: int) -> Iterator["KernelOutcome"]:
    import torch
    from tqdm import tqdm

    from benchmarks.kernels.case import DecoderShape
    from benchmarks.kernels.measure import PRIMITIVES, KernelSetting, make_cases, measure
    from benchmarks.kernels.timing import cache_bytes_of
    from benchmarks.models import RANDOM_MODELS

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
    outcomes: Sequence["KernelOutcome"],
) -> Report:
    from benchmarks.kernels.table import make_tables, to_plain
    from kernels.library.library import select

    ceilings, selection = Ceilings.of_machine(machine, args.dtype), select()
    kernels = "Triton" if args.device == "cuda" else f"{selection.variant}: {selection.reason}"
    return Report(
        title=f"Kernels on shapes of {args.model}, {args.dtype}",
        facts={
            "machine": in_words(machine),
            "kernels": kernels,
            "threads": str(num_threads),
        },
        tables=make_tables(outcomes, ceilings),
        panels=[],
        results={
            "machine": machine,
            "kernels": "Triton" if args.device == "cuda" else selection.variant,
            "num_threads": num_threads,
            "flags": flags_of(args),
            "outcomes": [to_plain(outcome, ceilings) for outcome in outcomes],
        },
    )
