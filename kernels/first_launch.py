"""Checks that a device can run kernels, with the first and smallest of all launches.

Triton compiles kernels when they are first launched, and for each a launcher in C: without a C
compiler, or Python's headers, no kernel runs on a GPU.
"""

import os
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

from baton.common.errors import ConfigurationError
from kernels import reference
from kernels.dispatch import KERNELS

__all__ = ["check_launch", "find_c_compiler", "missing_for_launchers"]

_COMPILER_NAMES = ("gcc", "clang")
_SHAPE = (3, 64)
_EPS = 1e-6
_MAX_DIFFERENCE = 1e-4
_MAX_CAUSE = 1000
"""Characters of an error that are shown: those of a compiler can be pages."""


def check_launch(device: torch.device) -> None:
    """Launches one kernel, and compares what it computes with the reference on the CPU.

    Args:
        device: a GPU, the current one of this thread; on a CPU the selected kernels run.

    Raises:
        ConfigurationError: the kernel cannot be compiled or launched, or its result is wrong; says
            what to install if something is missing.
    """
    hidden = torch.arange(1.0, 1 + _SHAPE[0] * _SHAPE[1]).reshape(_SHAPE).cos()
    weight = torch.linspace(0.5, 2.0, _SHAPE[1])
    norm = KERNELS["rms_norm"].call
    try:
        normed = norm(hidden.to(device), weight.to(device), _EPS).cpu()
    except Exception as error:
        raise ConfigurationError(_explain(device, error)) from error
    difference = float((normed - reference.rms_norm(hidden, weight, _EPS)).abs().max())
    if not difference <= _MAX_DIFFERENCE:  # NaN is a difference too
        raise ConfigurationError(
            f"a kernel on {_name(device)} computes wrong numbers, off by up to {difference:.3g}: "
            "a newer driver or another version of Triton may help"
        )


def missing_for_launchers(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns what Triton lacks to compile launchers, with the command that installs it; None if
    nothing is missing.
    """
    if find_c_compiler(environment) is None:
        named = environment.get("CC")
        found = f"CC is {named!r}, which is no program" if named else "there is no C compiler"
        return f"{found}: apt-get install gcc libc6-dev"
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        return f"there is no Python.h in {headers}: apt-get install python3-dev"
    return None


def find_c_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of the C compiler that Triton uses: the one CC names, else gcc or clang."""
    named = shlex.split(environment.get("CC", ""))
    names = named[:1] or _COMPILER_NAMES
    found = (shutil.which(name, path=environment.get("PATH")) for name in names)
    return next((path for path in found if path is not None), None)


def _explain(device: torch.device, error: Exception) -> str:
    cause = f"{type(error).__name__}: {error}"[:_MAX_CAUSE]
    missing = missing_for_launchers() if device.type == "cuda" else None
    if missing is None:
        return f"no kernel can be launched on {_name(device)}: {cause}"
    return f"no kernel can be compiled for {_name(device)}: {missing} ({cause})"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
