"""Describes the machine of a run: hardware, versions, commit and ceilings; what a GPU run lacks."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.machine_limits import affine_cores, usable_cores
from kernels.library.cpu import cpu_features, cpu_model
from kernels.library.library import WISH_VARIABLE
from kernels.library.variants import variants_for

__all__ = [
    "COMMIT_VARIABLE",
    "RESULTS_VARIABLE",
    "describe_commit",
    "describe_gpu_machine",
    "describe_machine",
    "find_problem",
    "holding_variables",
    "in_words",
    "instruction_set",
    "missing_of",
    "name_machine",
    "rates_of",
    "results_folder",
    "with_best_ceilings",
    "with_median_rates",
]

COMMIT_VARIABLE = "BATON_COMMIT"
_UNKNOWN_COMMIT = "unknown"
_AVX2_VARIABLES = {
    "OV_CPU_MAX_ISA": "AVX2",  # OpenVINO's own kernels, and with the next one its oneDNN's
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
_HOLDING_VARIABLES = {
    "avx2": _AVX2_VARIABLES,
    "avx2_vnni": _AVX2_VARIABLES
    | {"OV_CPU_MAX_ISA": "AVX2_VNNI", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
}
"""By instruction set. All are read once, when their library is loaded."""
RESULTS_VARIABLE = "BATON_RESULTS_FOLDER"
_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors")
# What engine, kernels and kvstore import on a GPU. Without triton, torch's kernels would run.
_MODULES = ("torch", "triton", "numpy", "safetensors", "tqdm", "transformers", "xxhash")
_CAPACITY_UNIT = 2**20
_QUERY_TIMEOUT_S = 20


def name_machine() -> dict[str, object]:
    """Returns the machine's hardware, versions, commit, and the date."""
    used, best = instruction_set(), _best_instruction_set()
    return {
        "cpu": cpu_model() or platform.processor(),
        "instruction_set": used,
        **({} if used == best else {"forced_on": best}),
        "cores": affine_cores(),
        "python": platform.python_version(),
        "commit": describe_commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def instruction_set() -> str:
    """Returns the instruction set that BATON_CPU_KERNELS names, or else the best one of the CPU
    that the kernels are compiled for.
    """
    wish = os.environ.get(WISH_VARIABLE)
    return next((v.name for v in variants_for() if v.name == wish), _best_instruction_set())


def holding_variables() -> dict[str, str]:
    """Returns the environment variables that hold OpenVINO, oneDNN and torch to the instruction set
    that BATON_CPU_KERNELS names; none where it names none, or the CPU's best.

    Raises:
        ConfigurationError: the libraries cannot be held to that one.
    """
    used = instruction_set()
    if used == _best_instruction_set():
        return {}
    if used not in _HOLDING_VARIABLES:
        raise ConfigurationError(
            f"{WISH_VARIABLE} is {used!r}; other engines can be held to "
            f"{', '.join(_HOLDING_VARIABLES)} only"
        )
    return _HOLDING_VARIABLES[used]


def _best_instruction_set() -> str:
    features = cpu_features()
    return next(v.name for v in variants_for() if v.cpu_features <= features)


def in_words(machine: Mapping[str, object]) -> str:
    """Returns a machine's names in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items())


def describe_machine(device: str = "cpu", num_threads: int | None = None) -> dict[str, object]:
    """Returns the machine's names and its ceilings, which it measures.

    Args:
        device: the torch device to measure: "cpu" or "cuda".
        num_threads: threads of the CPU; None for the cores that this process may use.
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
    """Returns a machine that was measured twice, with the better value of each rate."""
    return dict(before) | {name: max(before[name], after[name]) for name in rates_of(before)}


def rates_of(machine: Mapping[str, Any]) -> dict[str, float]:
    """Returns a machine's rates."""
    return {name: value for name, value in machine.items() if name.endswith("_per_s")}


def with_median_rates(machines: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Returns a machine that was measured several times, with the median of each rate."""
    rates = [rates_of(machine) for machine in machines]
    return dict(machines[0]) | {
        name: statistics.median(own[name] for own in rates) for name in rates[0]
    }


def describe_commit() -> str:
    """Returns the commit that git reports, or BATON_COMMIT for sources without a repository."""
    copied = os.environ.get(COMMIT_VARIABLE)
    if copied:
        return copied
    here = str(Path(__file__).parent)
    # Git refuses a repository of another user unless it is named as safe.
    git = ["git", "-C", here, "-c", "safe.directory=*", "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return _UNKNOWN_COMMIT
    return result.stdout.strip() or _UNKNOWN_COMMIT


def find_problem(extra: str = "gpu", more_modules: Sequence[str] = ()) -> str | None:
    """Returns in one line why this machine cannot run on a GPU; None if it can.

    Args:
        extra: extras of the package with which pip installs all modules.
        more_modules: modules needed in addition to those of the engine and the KV store.
    """
    hint = f"on a GPU machine: pip install 'baton-llm[{extra}]'"
    missing = missing_of((*_MODULES, *more_modules))
    if missing:
        return f"not installed: {', '.join(missing)}; {hint}"
    try:
        import torch
        import triton  # noqa: F401 - it may be installed and fail to load
    except ImportError as error:
        return f"{error}; {hint}"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} sees none"
    return None


def missing_of(modules: Sequence[str]) -> list[str]:
    """Returns those of the modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


def results_folder() -> Path:
    """Returns the folder for results, which it makes: BATON_RESULTS_FOLDER, or this package's."""
    named = os.environ.get(RESULTS_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parent / "results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def describe_gpu_machine(device: str = "cuda") -> dict[str, object]:
    """Returns the machine's names and versions, with the GPU's if `device` is one."""
    return name_machine() | {
        "device": _gpu() if device.startswith("cuda") else {"name": "cpu"},
        "os": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _gpu() -> dict[str, object]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_mib": properties.total_memory // _CAPACITY_UNIT,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    """Returns the driver's version, from nvidia-smi or from the kernel module."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT_S
        )
        return result.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        kernel_module = Path("/proc/driver/nvidia/version")
        return kernel_module.read_text().split("\n")[0] if kernel_module.exists() else "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
