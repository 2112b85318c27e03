"""What a run was measured on: hardware, versions, commit, and the machine's ceilings."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["describe_machine", "in_words", "name_machine"]

_LEAST_REPEATS = 9
_LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of what ceilings are measured with: larger than any cache, enough work for all cores."""

    read_bytes: int
    matrix_size: int


_SIZES = {"cpu": _Sizes(1 << 29, 1024), "cuda": _Sizes(1 << 32, 8192)}


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


def describe_machine(device: str = "cpu") -> dict[str, object]:
    """Names the machine and measures its ceilings.

    Args:
        device: the torch device whose ceilings they are: "cpu", as many threads as torch
            is set to, or "cuda".
    """
    import torch

    cpu_or_gpu = {"gpu": torch.cuda.get_device_name()} if device.startswith("cuda") else {}
    return (
        name_machine()
        | cpu_or_gpu
        | {
            "torch": torch.__version__,
            "read_gb_per_s": round(_read_bandwidth(device) / 1e9, 1),
            "float32_gflop_per_s": round(_matrix_rate(torch.float32, device) / 1e9),
            "bfloat16_gflop_per_s": round(_matrix_rate(torch.bfloat16, device) / 1e9),
        }
    )


def _read_bandwidth(device: str) -> float:
    """Bytes per second of reading memory that no cache holds."""
    import torch

    data = torch.ones(_SIZES[_kind(device)].read_bytes // 4, device=device)
    return data.nbytes / _best_seconds(lambda: data.sum(), device)


def _matrix_rate(dtype: Any, device: str) -> float:
    """Operations per second of a square matrix product."""
    import torch

    size = _SIZES[_kind(device)].matrix_size
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def _best_seconds(call: Callable[[], object], device: str) -> float:
    """Of calls over a second or more, so that a neighbour's burst does not count; each is
    waited for.
    """
    import torch

    times: list[float] = []
    while len(times) < _LEAST_REPEATS or sum(times) < _LEAST_SECONDS:
        started = time.perf_counter()
        call()
        if _kind(device) == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    result = subprocess.run(git, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"
