"""Prints a report: each figure with its ratio and its floor."""

from typing import Any

__all__ = ["print_report"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms")


def print_report(report: dict[str, Any]) -> None:
    """Prints the machine, then a table of latencies and one of stages."""
    machine = report["machine"]
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| model | prompt | figure | whole | split | split / whole | floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for result in report["results"]:
        for figure, floor_ms in _floors(result, machine).items():
            print(
                f"| {result['model']} | {result['prompt_tokens']} | {figure} "
                f"| {result['whole'][figure]:.2f} | {result['split'][figure]:.2f} "
                f"| {result['split_to_whole'][figure]:.2f} | {floor_ms:.2f} |"
            )
    print(f"\n| model | prompt | tiers | {' | '.join(_STAGES)} |")
    print(f"| --- | --- | --- |{' --- |' * len(_STAGES)}")
    for result in report["results"]:
        for tiers in ("whole", "split"):
            stages = " | ".join(f"{result[tiers][stage]:.2f}" for stage in _STAGES)
            print(f"| {result['model']} | {result['prompt_tokens']} | {tiers} | {stages} |")


def _floors(result: dict[str, Any], machine: dict[str, Any]) -> dict[str, float]:
    """What the machine's ceilings allow: a token reads every weight once; a prompt
    takes two operations per weight and token. The embedding table counts in full.
    """
    weight_bytes = result["num_weights"] * _DTYPE_BYTES[result["dtype"]]
    operations = 2 * result["num_weights"] * result["prompt_tokens"]
    return {
        "first_token_ms": operations / machine[f"{result['dtype']}_gflop_per_s"] / 1e6,
        "token_gap_ms": weight_bytes / machine["read_gb_per_s"] / 1e6,
    }
