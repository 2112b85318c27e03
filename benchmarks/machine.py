"""What a run was measured on: hardware, versions, commit, and the machine's ceilings."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.machine_limits import affine_cores, usable_cores

__all__ = [
    "describe_machine",
    "in_words",
    "name_machine",
    "rates_of",
    "with_best_ceilings",
    "with_median_rates",
]

_COMMIT_VARIABLE = "BATON_COMMIT"


def name_machine() -> dict[str, object]:
    """Names the machine, to be written beside every figure."""
    return {
        "cpu": _cpu_name(),
        "cores": affine_cores(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def in_words(machine: Mapping[str, object]) -> str:
    """A machine in a line, for readers."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())


def describe_machine(device: str = "cpu", num_threads: int | None = None) -> dict[str, object]:
    """Names the machine and measures its ceilings.

    Args:
        device: the torch device whose ceilings they are: "cpu" or "cuda".
        num_threads: of the CPU; None: the cores this process may use.
    """
    import torch

    from benchmarks.ceilings import measure_ceilings

    rates = measure_ceilings(device, num_threads or usable_cores())
    gpu = {"gpu": torch.cuda.get_device_name()} if device.startswith("cuda") else {}
    return (
        name_machine()
        | gpu
        | {
            "torch": torch.__version__,
            "read_gb_per_s": round(rates.read_bytes / 1e9, 1),
            "float32_gflop_per_s": round(rates.float32_operations / 1e9),
            "bfloat16_gflop_per_s": round(rates.bfloat16_operations / 1e9),
        }
    )


def with_best_ceilings(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, object]:
    """A machine described twice: each of its rates as the better measurement has it."""
    return dict(before) | {name: max(before[name], after[name]) for name in rates_of(before)}


def rates_of(machine: Mapping[str, Any]) -> dict[str, float]:
    """What a machine does per second."""
    return {name: value for name, value in machine.items() if name.endswith("_per_s")}


def with_median_rates(machines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """A machine described several times: each of its rates as the median has it."""
    rates = [rates_of(machine) for machine in machines]
    return dict(machines[0]) | {
        name: statistics.median(own[name] for own in rates) for name in rates[0]
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """As git tells it, or for sources that were copied without it, as the one who copied them."""
    told = os.environ.get(_COMMIT_VARIABLE)
    if told:
        return told
    here = str(Path(__file__).parent)
    # A copy may belong to another user, which git would refuse.
    git = ["git", "-C", here, "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
