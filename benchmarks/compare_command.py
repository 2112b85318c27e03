"""`baton bench compare`: Baton and other engines, on the same weights and token ids, in one run."""

import argparse
import asyncio
import json
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from baton.common.machine_limits import affine_cores
from baton.common.model_files.named_models import NAMED_MODELS
from benchmarks.machine import describe_machine, name_machine, rates_of, with_median_rates
from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.models import RANDOM_MODELS
from benchmarks.output import add_device_arg, write_line
from benchmarks.peers.cases import CASE_NAMES, build_cases, requests_of_round
from benchmarks.peers.catalogue import BATON, ENGINES, SERVED_FORMS
from benchmarks.peers.comparison import compare, summarize
from benchmarks.peers.environments import Setting, add_peer_args
from benchmarks.peers.served_files import as_quantized_gguf, compared_model
from benchmarks.workloads.kind import refuse_below
from engine.config import EngineConfig

__all__ = ["add_args", "main", "print_comparison"]

_SPLIT = "split"
_MAX_MODEL_LEN = 4096


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--engines",
        default="baton,vllm,openvino,transformers",
        metavar="NAME,...",
        help=f"engines, of {', '.join(ENGINES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default="llama-120m",
        help="checkpoint folder or GGUF file, or the name of one: "
        f"{', '.join(NAMED_MODELS)}; or random weights: {', '.join(RANDOM_MODELS)} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--case",
        choices=(*CASE_NAMES, _SPLIT),
        action="append",
        help="repeatable; split: Baton's two tiers as servers (default: all)",
    )
    add_device_arg(
        parser,
        "where the engines compute; on a GPU those without an environment of their own run in "
        "Baton's",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    add_peer_args(parser)
    parser.add_argument("--json", type=Path, help="also write the results here")


def main(args: argparse.Namespace) -> None:
    """Measures Baton beside other engines, in turn, on the same weights and token ids."""
    refuse_below(1, repeats=args.repeats)
    setting = _setting(args)
    report: dict[str, Any] = {
        "machine": name_machine(),
        "model": setting.model.name,
        "num_threads": setting.num_threads,
        "repeats": args.repeats,
    }
    try:
        _measure(args, setting, report)
    finally:  # figures measured before an error are worth printing
        print_comparison(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


def _measure(args: argparse.Namespace, setting: Setting, report: dict[str, Any]) -> None:
    """Adds the parts that the flags ask for to the report."""
    from benchmarks.model_shape import describe_model  # here, as it imports torch

    described = describe_model(EngineConfig(model=str(setting.model)))
    report["num_weights"] = described.build().num_weights()
    vocab_size = described.config.vocab_size
    wanted = args.case or (*CASE_NAMES, _SPLIT)
    if cases := [name for name in CASE_NAMES if name in wanted]:
        engines = list(dict.fromkeys(args.engines.split(",")))
        # Measured for each round: on a shared host, memory bandwidth changes.
        machines: list[dict[str, object]] = []
        comparison = compare(
            engines,
            cases,
            setting,
            vocab_size,
            args.repeats,
            write_line,
            lambda: machines.append(describe_machine(setting.device, setting.num_threads)),
        )
        report["machine"] = with_median_rates(machines)
        report["rates_by_round"] = [rates_of(machine) for machine in machines]
        report["not_measured"] = comparison.missing
        report["engines"] = comparison.engines
        report["figures"] = summarize(
            comparison.runs,
            comparison.cases,
            _shapes(comparison.engines, setting),
            Ceilings.of_machine(report["machine"]),
        )
    if _SPLIT in wanted:
        report["split"] = _measure_split(setting, vocab_size, args.repeats)


def _shapes(engines: Collection[str], setting: Setting) -> dict[str, ModelShape]:
    """Returns the size of the model that each of Baton's entries served, by the entry's name."""
    from benchmarks.model_shape import read_shape

    shapes = {}
    for name, form in SERVED_FORMS.items():
        if name in engines or name == BATON:
            file = as_quantized_gguf(setting, form) if form else setting.model
            shapes[name], _ = read_shape(EngineConfig(model=str(file), dtype="bfloat16"))
    return shapes


def _measure_split(setting: Setting, vocab_size: int, repeats: int) -> dict[str, Any]:
    """Returns the rates of the mixed requests through servers: two tiers, and one worker."""
    # Here, as it imports what servers need, which a machine with a GPU may lack.
    from benchmarks.split_command import measure_rates

    case = build_cases(vocab_size)["mixed"]
    rounds = [requests_of_round(case, number, vocab_size) for number in range(1 + repeats)]
    engine = EngineConfig(
        model=str(setting.model),
        dtype="bfloat16",
        max_model_len=setting.max_model_len,
        device=setting.device,
    )
    return asyncio.run(measure_rates(engine, rounds, write_line))


def _setting(args: argparse.Namespace) -> Setting:
    peers_folder = args.peers_folder.expanduser().resolve()
    return Setting(
        model=compared_model(args.model, peers_folder / "models"),
        num_threads=args.num_threads or affine_cores(),
        peers_folder=peers_folder,
        max_model_len=_MAX_MODEL_LEN,
        device=args.device,
    )


def print_comparison(report: dict[str, Any]) -> None:
    """Prints the machine, figures with floors, the engines' start and memory, and the split."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    size = f"{report['num_weights'] / 1e6:.0f}M weights, " if "num_weights" in report else ""
    print(
        f"\n{report['model']}, {size}{report['num_threads']} threads, "
        f"medians of {report['repeats']}"
    )
    if "engines" in report:
        _print_engines(report["engines"], report["figures"])
    if "split" in report:
        _print_split(report["split"])
    for reason in report.get("not_measured", {}).values():
        print(f"\nnot measured: {reason}")


def _print_engines(engines: dict[str, Any], figures: Sequence[dict[str, Any]]) -> None:
    _print_table(
        ("case", "figure", *engines, "floor", "Baton / best peer"),
        [_figure_row(entry, list(engines)) for entry in figures],
    )
    _print_table(
        ("engine", "start to first token, s", "peak memory, MiB", "tokens as float32's"),
        [_engine_row(name, facts) for name, facts in engines.items()],
    )


def _print_split(split: dict[str, Any]) -> None:
    _print_table(
        ("mixed, through servers", "output tokens/s"),
        [
            ("undivided", f"{split['whole']:.1f}"),
            ("one prefill, one decode", f"{split['split']:.1f}"),
            ("split / undivided", f"{split['split_to_whole']:.3f}"),
        ],
    )


def _figure_row(entry: dict[str, Any], engines: Sequence[str]) -> Sequence[str]:
    parts = {"": entry, **entry["others"]}
    floors = [f"{name} {part['floor']:.1f}".strip() for name, part in parts.items()]
    ratios = [
        f"{name} {part['baton_to_best_peer']:.2f} ({part['best_peer']})".strip()
        for name, part in parts.items()
        if "best_peer" in part
    ]
    return (
        entry["case"],
        f"{entry['figure']} ({'less' if entry['is_less_better'] else 'more'} is better)",
        *(f"{entry['median'][engine]:.1f}" for engine in engines),
        "; ".join(floors),
        "; ".join(ratios),
    )


def _engine_row(name: str, facts: dict[str, Any]) -> Sequence[str]:
    agreement = facts.get("agreement", {"agreeing": (), "of": ()})
    shares = zip(agreement["agreeing"], agreement["of"], strict=True)
    return (
        f"{name} ({facts['description']})",
        f"{facts['start_to_first_token_s']:.1f}",
        f"{facts['peak_memory_mib']:.0f}",
        ", ".join(f"{agreeing} of {num}" for agreeing, num in shares),
    )


def _print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
