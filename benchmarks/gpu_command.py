"""`baton bench gpu`: the benchmarks of a GPU, within a scarce quarter of an hour."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from baton.common.errors import ConfigurationError
from benchmarks.machine import describe_gpu_machine, find_problem, results_folder, slug
from benchmarks.output import write_results
from benchmarks.planned import PartReport, PlannedPart, choose_parts, run_parts, summarize_reports

__all__ = ["FULL", "SMOKE", "add_args", "main"]

_DEADLINE_S = 270.0  # with `make test-gpu` and both starts, a quarter of an hour
_SERVER_MODULES = (
    *("cryptography", "grpc", "grpc_health", "grpc_reflection", "jinja2", "jwt"),
    *("prometheus_client", "tokenizers"),
)
_STEPS = (
    *("--load-format", "dummy", "--dtype", "bfloat16", "--device", "cuda"),
    *("--batch-size", "1", "16", "64", "256", "--input-len", "512", "8192", "--num-steps", "64"),
    *("--max-num-seqs", "256", "--max-num-batched-tokens", "8192", "--max-model-len", "8448"),
)
FULL = (
    PlannedPart(
        "kernels",
        (
            *("kernels", "--device", "cuda", "--model", "llama-3.1-8b"),
            # Those that have aims come first.
            *("--primitive", "paged_attention", "--primitive", "rotate_and_write_kv"),
            *("--primitive", "gather_blocks", "--primitive", "scatter_blocks"),
            *("--primitive", "draw_tokens", "--primitive", "rms_norm"),
            *("--primitive", "linear_gated", "--primitive", "linear"),
        ),
        120,
    ),
    PlannedPart("steps_llama_8b", ("engine-step", "--model", "llama-3.1-8b", *_STEPS), 90),
    PlannedPart("steps_qwen3_06b", ("engine-step", "--model", "qwen3-0.6b", *_STEPS), 90),
    PlannedPart(
        "split",
        (
            *("split", "--device", "cuda", "--prompt-tokens", "2048"),
            *("--output-tokens", "64", "--repeats", "5"),
        ),
        80,
        _SERVER_MODULES,
    ),
    PlannedPart(
        "compare",
        (
            *("compare", "--device", "cuda", "--engines", "baton,transformers-cb"),
            *("--model", "qwen2-0.5b", "--case", "mixed", "--repeats", "2"),
        ),
        100,
    ),
)
SMOKE = (
    PlannedPart("kernels", ("kernels", "--model", "llama-100m", "--primitive", "rms_norm"), 60),
    PlannedPart(
        "steps",
        (
            *("engine-step", "--batch-size", "1", "--input-len", "8", "--num-steps", "4"),
            *("--num-threads", "1", "--num-gpu-blocks-override", "64", "--max-model-len", "64"),
        ),
        60,
    ),
    PlannedPart(
        "split",
        (
            *("split", "--model", "demo", "--prompt-tokens", "16", "--output-tokens", "4"),
            *("--repeats", "1", "--num-threads", "1"),
        ),
        60,
        _SERVER_MODULES,
    ),
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run the same benchmarks tiny, on the CPU; their figures mean nothing",
    )
    parser.add_argument(
        "--part",
        action="append",
        metavar="NAME",
        help=f"repeatable; all by default: {', '.join(part.name for part in FULL)}",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=_DEADLINE_S,
        metavar="SECONDS",
        help="time for all parts (default: %(default).0f)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="file that lists the parts; those of their figures lie beside it "
        "(default: benchmarks/results/gpu_DEVICE.json; none with --smoke)",
    )


def main(args: argparse.Namespace) -> int:
    """Measures a GPU with random weights: kernels, each checked against the reference first; steps
    of the runner and the engine; two tiers on one card beside one worker; and the continuous
    batching of transformers. Exit status: 1 where something failed, 2 without a GPU.
    """
    parts = choose_parts(SMOKE if args.smoke else FULL, args.part)
    if not args.deadline > 0:
        raise ConfigurationError(f"--deadline is {args.deadline}; it must be > 0")
    if args.json is not None and not args.json.parent.is_dir():
        raise ConfigurationError(f"--json is {args.json}; there is no folder {args.json.parent}")
    problem = None if args.smoke else find_problem()
    if problem is not None:
        print(f"bench gpu: {problem}; nothing was measured")
        return 2
    machine = describe_gpu_machine("cpu" if args.smoke else "cuda")
    header = {
        "what": "baton bench gpu",
        "is_smoke": args.smoke,
        "machine": machine,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if args.json is None and args.smoke:
        with tempfile.TemporaryDirectory() as folder:
            return _run(parts, Path(folder, "gpu.json"), header, args.deadline)
    path = args.json or results_folder() / f"gpu_{slug(str(_name_of(machine)))}.json"
    return _run(parts, path, header, args.deadline)


def _run(
    parts: Sequence[PlannedPart], path: Path, header: dict[str, object], deadline_s: float
) -> int:
    """Runs the parts; writes the list of those that have ended after each."""
    reports: list[PartReport] = []
    for report in run_parts(parts, path.parent, f"_{path.stem}", deadline_s):
        reports.append(report)
        content = {
            "finished": len(reports) == len(parts),
            "parts": [asdict(each) for each in reports],
        }
        write_results(path, header | content)
    print(f"\n{summarize_reports(reports)}\nwritten: {path}")
    return int(any(report.problem for report in reports))


def _name_of(machine: dict[str, object]) -> object:
    device = machine["device"]
    assert isinstance(device, dict)
    return device["name"]
