"""Describes the machine of a GPU run, and what it lacks for one."""

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from benchmarks.machine import name_machine

__all__ = [
    "RESULTS_VARIABLE",
    "describe_gpu_machine",
    "find_problem",
    "missing_of",
    "results_folder",
    "slug",
]

RESULTS_VARIABLE = "BATON_RESULTS_FOLDER"

_PACKAGES = ("torch", "triton", "transformers", "numpy", "grpcio", "protobuf", "safetensors")
# What engine, kernels and kvstore import on a GPU. Without triton, torch's kernels would run.
_MODULES = ("torch", "triton", "numpy", "safetensors", "tqdm", "transformers", "xxhash")
_CAPACITY_UNIT = 2**20
_QUERY_TIMEOUT_S = 20


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


def slug(name: str) -> str:
    """Returns a device's name as part of a file name: "NVIDIA H200" becomes "nvidia_h200"."""
    words = "".join(letter if letter.isalnum() else " " for letter in name.lower()).split()
    return "_".join(words)


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
