"""The lines that README and docs/performance.md owe to the files in benchmarks/results.

`python -m benchmarks.shown` prints them; a test looks for their figures and commits in the pages.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["compare_cells", "print_lines", "read_results", "split_cells"]

_RESULTS = Path(__file__).parent / "results"
_CASES = (
    ("batch-1", "ms per token"),
    ("mixed", "output tokens/s"),
    ("shared-prefix", "output tokens/s"),
)
"""Figures of `baton bench compare` that README shows."""
_NAMES = {"vllm": "vLLM", "openvino": "OpenVINO"}
_FIGURES = {"first_token_ms": "first token", "token_gap_ms": "per token"}


def read_results(part: str, folder: Path = _RESULTS) -> list[dict[str, Any]]:
    """Returns the results of a part of `baton bench record`, one per instruction set."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{part}*.json"))]


def compare_cells(results: Mapping[str, Any]) -> list[str]:
    """Returns, for each figure that README shows, Baton's cell and that of the best peer."""
    figures = {(entry["case"], entry["figure"]): entry for entry in results["figures"]}
    return [_compared(figures[case]) for case in _CASES]


def split_cells(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cells of performance.md's rows of two tiers beside one: prompt, figure, whole,
    split, ratio and floor.
    """
    for result in results["results"]:
        for name, figure in _FIGURES.items():
            whole, split, floor = (
                _rounded(result[kind][name]) for kind in ("whole", "split", "floor")
            )
            ratio = f"{result['split_to_whole'][name]:.2f}"
            yield f"{result['prompt_tokens']} | {figure} | {whole} | {split} | {ratio} | {floor}"


def print_lines(folder: Path = _RESULTS) -> None:
    """Prints the lines of each instruction set."""
    print("README.md:")
    for results in read_results("compare_llama_100m", folder):
        print(f"| {_machine(results)} | {' | '.join(compare_cells(results))} |")
    for results in read_results("split_vs_whole", folder):
        print(f"\ndocs/performance.md, {_machine(results)}:")
        for cells in split_cells(results):
            print(f"| {cells} |")


def _compared(entry: Mapping[str, Any]) -> str:
    own, best = entry["median"]["baton"], entry.get("best_peer")
    if best is None:  # no peer was installed
        return f"{_rounded(own)} | "
    return f"{_rounded(own)} | {_rounded(entry['median'][best])} ({_NAMES.get(best, best)})"


def _machine(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    known = (machine["cpu"], machine.get("instruction_set"), machine["commit"])
    forced = f"forced on {machine['forced_on']}" if "forced_on" in machine else None
    return ", ".join(text for text in (*known, forced) if text)


def _rounded(value: float) -> str:
    """Rounds to two digits below 1, and to one after the point below 100."""
    return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f}"


if __name__ == "__main__":
    print_lines()
