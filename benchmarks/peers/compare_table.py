"""Prints a comparison as tables."""

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["print_comparison"]


def print_comparison(report: dict[str, Any]) -> None:
    """Prints the machine, the figures beside their floors, what each engine took, and the split."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print(
        f"\n{report['model']}, {report['num_weights'] / 1e6:.0f}M weights, bfloat16, "
        f"{report['num_threads']} threads, medians of {report['repeats']}"
    )
    if "engines" in report:
        _print_engines(report["engines"], report["figures"])
    if "split" in report:
        _print_split(report["split"])


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
    ratio = entry.get("baton_to_best_peer")
    return (
        entry["case"],
        f"{entry['figure']} ({'less' if entry['is_less_better'] else 'more'} is better)",
        *(f"{entry['median'][engine]:.1f}" for engine in engines),
        f"{entry['floor']:.1f}",
        f"{ratio:.2f} ({entry['best_peer']})" if ratio else "",
    )


def _engine_row(name: str, facts: dict[str, Any]) -> Sequence[str]:
    agreement = facts["agreement"]
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
