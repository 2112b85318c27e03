"""What a run was measured on: hardware, versions, commit, and the machine's ceilings."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "in_words", "name_machine"]

_READ_BYTES = 1 << 29
_MATRIX_SIZE = 1024
_REPEATS = 9


def name_machine() -> dict[str, object]:
    """Names the machine, to be written beside every figure."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def in_words(machine: Mapping[str, object]) -> str:
    """A machine in a line, for readers."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())


def describe_machine() -> dict[str, object]:
    """Names the machine and measures its ceilings."""
    import torch

    return name_machine() | {
        "torch": torch.__version__,
        "read_gb_per_s": round(_read_bandwidth() / 1e9, 1),
        "float32_gflop_per_s": round(_matrix_rate(torch.float32) / 1e9),
        "bfloat16_gflop_per_s": round(_matrix_rate(torch.bfloat16) / 1e9),
    }


def _read_bandwidth() -> float:
    """Bytes per second of reading memory that no cache holds, all cores."""
    import torch

    data = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _best_seconds(lambda: data.sum())


def _matrix_rate(dtype: Any) -> float:
    """Operations per second of a square matrix product, all cores."""
    import torch

    left, right = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE).to(dtype) for _ in range(2))
    return 2 * _MATRIX_SIZE**3 / _best_seconds(lambda: left @ right)


def _best_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
