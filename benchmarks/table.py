"""Prints a report: each figure with its ratio and its floor."""

from typing import Any

__all__ = ["print_report"]

_STAGES = ("route_ms", "queue_ms", "prefill_ms", "transfer_ms", "load_ms")


def print_report(report: dict[str, Any]) -> None:
    """Prints the machine, then a table of latencies and one of stages."""
    machine = report["machine"]
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n| model | prompt | figure | whole | split | split / whole | floor |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for result in report["results"]:
        for figure, floor_ms in result["floor"].items():
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
