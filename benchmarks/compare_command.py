"""`baton bench compare`: Baton and other engines, the same weights and token ids, in one run."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from baton.errors import ConfigurationError
from baton.machine_limits import affine_cores
from benchmarks.machine import describe_machine, name_machine, rates_of, with_median_rates
from benchmarks.model_cost import Ceilings, ModelShape
from benchmarks.models import RANDOM_MODELS, cached_random_model, num_weights, read_config
from benchmarks.peers.cases import CASE_NAMES
from benchmarks.peers.catalogue import ENGINES, Setting
from benchmarks.peers.compare_table import print_comparison
from benchmarks.peers.comparison import compare
from benchmarks.peers.split import measure_split
from benchmarks.peers.summary import summarize

__all__ = ["add_args", "main"]

_SPLIT = "split"
_MAX_MODEL_LEN = 4096
_PEERS_FOLDER = Path("~/.cache/baton-peers")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--engines",
        default="baton,vllm,openvino,transformers",
        metavar="NAME,...",
        help=f"of {', '.join(ENGINES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default="llama-120m",
        help=f"checkpoint folder, or random weights: {', '.join(RANDOM_MODELS)} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--case",
        choices=(*CASE_NAMES, _SPLIT),
        action="append",
        help="repeatable; split: Baton's two tiers as servers (default: all)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--num-threads", type=int, help="of each engine (default: every core)")
    parser.add_argument(
        "--peers-folder",
        type=Path,
        default=_PEERS_FOLDER,
        help="holds the engines' environments and models (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the results here")


def main(args: argparse.Namespace) -> None:
    """Measures Baton beside other engines, in turn, on the same weights and token ids."""
    if args.repeats < 1:
        raise ConfigurationError(f"--repeats is {args.repeats}; it must be >= 1")
    setting = _setting(args)
    report: dict[str, Any] = {
        "machine": name_machine(),
        "model": setting.model.name,
        "num_weights": num_weights(setting.model),
        "num_threads": setting.num_threads,
        "repeats": args.repeats,
    }
    try:
        _measure(args, setting, report)
    finally:  # what was measured before an error has taken minutes
        print_comparison(report)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")


def _measure(args: argparse.Namespace, setting: Setting, report: dict[str, Any]) -> None:
    """Adds the parts that the flags ask for to the report."""
    wanted = args.case or (*CASE_NAMES, _SPLIT)
    if cases := [name for name in CASE_NAMES if name in wanted]:
        engines = list(dict.fromkeys(args.engines.split(",")))
        # Beside each round: what memory gives changes with the neighbours on a shared host.
        machines: list[dict[str, object]] = []
        comparison = compare(
            engines,
            cases,
            setting,
            args.repeats,
            _tell,
            lambda: machines.append(describe_machine(num_threads=setting.num_threads)),
        )
        report["machine"] = with_median_rates(machines)
        report["rates_by_round"] = [rates_of(machine) for machine in machines]
        report["engines"] = comparison.engines
        report["figures"] = summarize(
            comparison.runs,
            comparison.cases,
            ModelShape.of_config(read_config(setting.model), report["num_weights"]),
            Ceilings.of_machine(report["machine"]),
        )
    if _SPLIT in wanted:
        report["split"] = asyncio.run(measure_split(setting, args.repeats, _tell))


def _setting(args: argparse.Namespace) -> Setting:
    peers_folder = args.peers_folder.expanduser().resolve()
    return Setting(
        model=_model(args.model, peers_folder / "models"),
        num_threads=args.num_threads or affine_cores(),
        peers_folder=peers_folder,
        max_model_len=_MAX_MODEL_LEN,
    )


def _model(name: str, models: Path) -> Path:
    if name in RANDOM_MODELS:
        return cached_random_model(name, models)
    folder = Path(name).expanduser().resolve()
    if not (folder / "config.json").exists():
        raise ConfigurationError(
            f"--model is {name!r}; it must be one of {', '.join(RANDOM_MODELS)} "
            "or a checkpoint's folder"
        )
    return folder


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
