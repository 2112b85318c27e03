"""`baton bench attention-sweep`: launch parameters of paged attention, one set after the other.

Which row of a launch table is the fastest can only be measured. The report is what a new row of
`kernels/triton/launch_tables/` is made from.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch

from benchmarks.kernels.attention import attention_cases
from benchmarks.kernels.case import SIZES, Case, DecoderShape, limit_s
from benchmarks.kernels.measure import KernelOutcome, KernelSetting, measure
from benchmarks.kernels.timing import cache_bytes_of
from benchmarks.machine import describe_machine
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
from benchmarks.report import Report, Table
from kernels.triton.launch import (
    AttentionLaunch,
    LaunchTable,
    Rows,
    load_launch_table,
    replaced_launch_table,
)

__all__ = ["add_args", "main"]

_KINDS = {"decode": "decode", "uneven": "decode, uneven", "prompts": "chunk"}
"""Values of `--kind`, and the cases of `attention_cases` that they mean."""
_DECODE: Mapping[str, Sequence[int]] = {
    "block_n": (32, 64, 128),
    "num_stages": (5, 7),
    "programs_per_sm": (2, 3, 6),
    "shares_evenly": (0, 1),
}
_PROMPTS: Mapping[str, Sequence[int]] = {
    "block_n": (64, 128),
    "num_stages": (3, 4, 5),
    "num_warps": (4, 8),
}
_FEW = {"block_n": (32, 64)}
"""On a CPU, whose kernels read no launch table."""


@dataclass(frozen=True, slots=True)
class _Swept:
    """One set of parameters on one case.

    Attributes:
        launch: the parameters.
        outcome: the case's figures.
    """

    launch: AttentionLaunch
    outcome: KernelOutcome


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--model",
        choices=[name for name, (_, shape) in RANDOM_MODELS.items() if "num_experts" not in shape],
        default="llama-3.1-8b",
        help="the model whose shapes are measured (default: %(default)s)",
    )
    add_device_arg(parser, "cpu shows that it runs: its kernels read no launch table", "cuda")
    parser.add_argument(
        "--kind", choices=list(_KINDS), action="append", help="repeatable; all by default"
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures paged attention of decode steps and of prompts with every set of launch parameters
    in turn, each checked against the reference. The file of --json is written anew after each.
    Exit status 1: with all parameters of a case something failed.
    """
    check_output_args(args)
    device = torch.device(args.device)
    machine = describe_machine(args.device)
    ceilings = Ceilings.of_machine(machine)
    shape = DecoderShape.of_config(RANDOM_MODELS[args.model][1])
    setting = KernelSetting(torch.bfloat16, 1, cache_bytes_of(device), device)
    kinds = {_KINDS[kind] for kind in args.kind or _KINDS}
    swept: list[_Swept] = []
    for case in attention_cases(shape, setting.dtype, SIZES[args.device]):
        for launch, table in _candidates(case, shape, device) if case.what in kinds else ():
            with replaced_launch_table(table):
                swept.append(_Swept(launch, measure(case, setting)))
            write_so_far(args, lambda: _report(args, machine, ceilings, swept))
    write_report(_report(args, machine, ceilings, swept), args)
    measured = {_name(entry) for entry in swept if entry.outcome.kernel_s is not None}
    return int({_name(entry) for entry in swept} != measured)


def _candidates(
    case: Case, shape: DecoderShape, device: torch.device
) -> Iterator[tuple[AttentionLaunch, LaunchTable]]:
    """Yields sets of parameters, first the present one, and the launch tables that have them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    table = load_launch_table(name)
    is_decode = case.what.startswith("decode")
    size = shape.head_dim * torch.bfloat16.itemsize
    rows = table.decode_attention if is_decode else table.prefill_attention
    present = rows.for_size(size)
    yield present, table
    values = _FEW if device.type == "cpu" else _DECODE if is_decode else _PROMPTS
    for chosen in product(*values.values()):
        launch = replace(present, up_to=None, **dict(zip(values, chosen, strict=True)))
        if launch == replace(present, up_to=None):
            continue
        field = "decode_attention" if is_decode else "prefill_attention"
        changed: dict[str, Any] = {field: Rows((launch,))}
        yield launch, replace(table, **changed)


def _name(swept: _Swept) -> tuple[str, str]:
    return swept.outcome.what, swept.outcome.size


def _report(
    args: argparse.Namespace,
    machine: Mapping[str, Any],
    ceilings: Ceilings,
    swept: Sequence[_Swept],
) -> Report:
    names = dict.fromkeys(map(_name, swept))
    return report_of_run(
        args,
        f"Launch parameters of attention on shapes of {args.model}",
        [
            _table(name, [entry for entry in swept if _name(entry) == name], ceilings)
            for name in names
        ],
        machine=machine,
        swept=[
            {
                "launch": asdict(entry.launch),
                **asdict(entry.outcome),
                "limit_s": limit_s(entry.outcome.cost, ceilings),
            }
            for entry in swept
        ],
    )


def _table(name: tuple[str, str], swept: Sequence[_Swept], ceilings: Ceilings) -> Table:
    """Returns the present parameters, and the others from the fastest on."""
    present, others = swept[0], [entry for entry in swept[1:] if entry.outcome.kernel_s is not None]
    fields = [field for field in asdict(present.launch) if field != "up_to"]
    rows = [
        (
            "present" if entry is present else "",
            *(getattr(entry.launch, field) for field in fields),
            None if (taken := entry.outcome.kernel_s) is None else 1e6 * taken,
            None if taken is None else taken / limit_s(entry.outcome.cost, ceilings),
        )
        for entry in [present, *sorted(others, key=lambda entry: entry.outcome.kernel_s or 0.0)]
    ]
    failed = [entry.outcome.difference for entry in swept if entry.outcome.kernel_s is None]
    note = f"{len(failed)} failed, the first so: {failed[0]}" if failed else ""
    return Table(", ".join(name), ("", *fields, "us", "x limit"), rows, note)
