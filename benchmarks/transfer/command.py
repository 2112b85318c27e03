"""`baton bench transfer`: KV connectors beside memcpy, and transfers during prefill."""

import argparse
import asyncio
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from baton.common.errors import ConfigurationError
from baton.common.machine_limits import usable_cores
from benchmarks.machine import name_machine
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Report
from benchmarks.workloads.kind import refuse_below

if TYPE_CHECKING:
    from benchmarks.transfer.plan import Plan, TransferBackend

__all__ = ["add_args", "main"]

_PARTS = ("moves", "hidden", "ttft")
_PACKAGES = ("torch", "redis", "hiredis", "grpcio", "nixl", "xxhash")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--connector",
        nargs="+",
        metavar="URL",
        help="connectors (default: all that this machine can run, with a Redis server of its own)",
    )
    parser.add_argument(
        "--part", choices=_PARTS, action="append", help="repeatable; all by default"
    )
    parser.add_argument(
        "--num-threads",
        type=int,
        metavar="N",
        help="threads that each worker computes on (default: all cores but one, at least one)",
    )
    parser.add_argument(
        "--layer-slices",
        type=int,
        nargs="+",
        metavar="N",
        default=[1],
        help="--kv-transfer-layer-slices of the two tiers; each value is measured (default: 1)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="run everything once, tiny; its figures mean nothing"
    )
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Measures KV transfers: blocks from one process to another by each connector, beside memcpy
    and the library alone; how much of a prompt's transfer prefill hides; and the first tokens of
    two tiers beside those of one engine. What arrives is compared with what was sent. Wrong bytes
    or tokens get no figure, and the exit status is 1.
    """
    check_output_args(args)
    refuse_below(1, num_threads=1 if args.num_threads is None else args.num_threads)
    from benchmarks.transfer.plan import FULL, SMOKE

    num_layers = FULL.model["num_hidden_layers"]
    if bad := [slices for slices in args.layer_slices if slices < 1 or num_layers % slices]:
        raise ConfigurationError(
            f"--layer-slices is {bad[0]}; it must be a divisor of the model's {num_layers} layers"
        )
    plan, parts = SMOKE if args.smoke else FULL, args.part or list(_PARTS)
    num_threads = args.num_threads or max(1, usable_cores() - 1)
    with _backends(plan, args.connector) as (backends, missing):
        moves = _measure_moves(plan, backends) if "moves" in parts else []
        prompts = _measure_prompts(plan, backends, num_threads, parts, args.layer_slices)
    report = _report(args, {"moves": moves, "prompts": prompts}, missing, num_threads)
    write_report(report, args)
    return int(any("refused" in row for row in (*moves, *prompts)))


@contextmanager
def _backends(
    plan: "Plan", urls: Sequence[str] | None
) -> Iterator[tuple[list["TransferBackend"], list[str]]]:
    from benchmarks.transfer.plan import machine_backends, named_backend

    if urls:
        yield [named_backend(url) for url in urls], []
        return
    block_bytes = max(layout.block_bytes for layout in plan.shapes.values())
    with machine_backends(max(plan.rounds) * block_bytes) as found:
        yield found


def _measure_moves(plan: "Plan", backends: Sequence["TransferBackend"]) -> list[dict[str, Any]]:
    from benchmarks.transfer.moves import measure_moves

    return [_announce(row, "shape", "num_blocks") for row in measure_moves(plan, backends)]


def _measure_prompts(
    plan: "Plan",
    backends: Sequence["TransferBackend"],
    num_threads: int,
    parts: Sequence[str],
    layer_slices: Sequence[int],
) -> list[dict[str, Any]]:
    from benchmarks.transfer.prompts import measure_prompts

    async def measure() -> list[dict[str, Any]]:
        rows = measure_prompts(
            plan, backends, num_threads, layer_slices, with_whole="ttft" in parts
        )
        return [_announce(row, "prompt_tokens") async for row in rows]

    return asyncio.run(measure()) if {"hidden", "ttft"} & set(parts) else []


def _announce(row: dict[str, Any], *names: str) -> dict[str, Any]:
    """Writes a line to stderr when a row has been measured."""
    what = ", ".join(f"{name} {row[name]}" for name in names)
    sys.stderr.write(f"{row['backend']}: {what}\n")
    return row


def _report(
    args: argparse.Namespace,
    rows: Mapping[str, list[dict[str, Any]]],
    missing: Sequence[str],
    num_threads: int,
) -> Report:
    from benchmarks.transfer import tables

    machine = name_machine() | {"kernel": platform.release()} | _versions()
    moves, prompts = rows["moves"], rows["prompts"]
    judged = [*tables.judge_moves(moves), *tables.judge_prompts(prompts)]
    shown = [*tables.move_tables(moves), tables.baseline_table(moves)] if moves else []
    if prompts:
        shown.append(tables.hidden_table(prompts))
    if any("tokens" in row for row in prompts):
        shown.append(tables.token_table(prompts))
    facts = {"threads of each worker": str(num_threads)}
    if missing:
        facts["not measured"] = "; ".join(missing)
    return report_of_run(
        args,
        "KV transfers" + (", smoke test: no figures" if args.smoke else ""),
        [*shown, tables.aim_table(judged)],
        machine=machine,
        facts=facts,
        num_threads=num_threads,
        not_measured=list(missing),
        aims=judged,
        moves=moves,
        prompts=prompts,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
