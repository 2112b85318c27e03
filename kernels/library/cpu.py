"""The CPU's instruction sets, by their names in Linux' /proc/cpuinfo.

Linux lists only what the kernel lets programs use, so an instruction set found there does not
fault. On macOS the names come from `sysctl`; on other systems nothing is known.
"""

import subprocess
import sys
from pathlib import Path

__all__ = ["cpu_features", "cpu_model", "features_of_cpuinfo", "features_of_sysctl"]

_CPUINFO = Path("/proc/cpuinfo")
_FEATURE_KEYS = ("flags", "Features")
_MODEL_KEYS = ("model name", "Model", "cpu model")
_SYSCTL_FEATURES = (
    "machdep.cpu.features",
    "machdep.cpu.extfeatures",
    "machdep.cpu.leaf7_features",
)
_SYSCTL_SPELLINGS = {"lzcnt": "abm"}
_SYSCTL_TIMEOUT_S = 10


def cpu_features() -> frozenset[str]:
    """Returns the instruction sets and other features this process may use; empty if unknown."""
    if sys.platform == "darwin":
        return features_of_sysctl(" ".join(map(_sysctl, _SYSCTL_FEATURES)))
    return features_of_cpuinfo(_read_cpuinfo())


def cpu_model() -> str:
    """Returns the CPU's name; empty if unknown."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    return _values(_read_cpuinfo(), _MODEL_KEYS)


def features_of_cpuinfo(text: str) -> frozenset[str]:
    """Returns the features of the first core in the text of /proc/cpuinfo."""
    return frozenset(_values(text, _FEATURE_KEYS).split())


def features_of_sysctl(text: str) -> frozenset[str]:
    """Returns the features in the output of macOS' `sysctl`, by their names in Linux."""
    names = text.lower().split()
    return frozenset(_SYSCTL_SPELLINGS.get(name, name) for name in names)


def _values(cpuinfo: str, keys: tuple[str, ...]) -> str:
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _read_cpuinfo() -> str:
    try:
        return _CPUINFO.read_text(errors="replace")
    except OSError:
        return ""


def _sysctl(name: str) -> str:
    """Returns the value of a kernel variable; empty if this architecture does not have it."""
    try:
        result = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name],
            capture_output=True,
            text=True,
            timeout=_SYSCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip()
