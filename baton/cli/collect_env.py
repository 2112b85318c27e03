"""`baton collect-env`: the facts about an installation and a machine that a bug report needs."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from baton.cli.doctor import examine, format_findings

__all__ = ["add_args", "collect", "main", "without_secrets"]

_DISTRIBUTION = "baton-llm"
_PREFIXES = (
    *("BATON_", "OPENAI_", "HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "KMP_"),
    *("MKL_", "CUDA_", "NVIDIA_", "UCX_", "GRPC_", "MALLOC_", "LD_", "PYTHON"),
)
"""Beginnings of the names of variables that may change what Baton does."""
_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)(?:(?!,[\w+]+://)\S)+(?=@)")
"""The last @ ends the user and the password, which may have any character before it."""
_SECRET_OPTIONS = re.compile(
    r"((?:key|token|secret|password|passwd|auth)=)(?:(?!,[\w+]+://)[^&\s])+", re.IGNORECASE
)
_HIDDEN = "(hidden)"
_LIMITS = {"open files": "RLIMIT_NOFILE", "locked memory": "RLIMIT_MEMLOCK", "data": "RLIMIT_AS"}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def main(args: argparse.Namespace) -> int:
    """Prints versions, limits, packages, environment variables and the findings of `baton doctor`,
    to be pasted into an issue. Values of secrets are hidden.
    """
    facts = collect()
    findings = examine()
    if args.json:
        print(json.dumps({**facts, "doctor": list(map(asdict, findings))}, indent=2))
        return 0
    for title, section in facts.items():
        print(f"{title}:")
        for name, value in section.items():
            print(f"  {name}: {value}")
    print("doctor:", *format_findings(findings), sep="\n  ")
    return 0


def collect(environment: Mapping[str, str] = os.environ) -> dict[str, dict[str, str]]:
    """Returns the facts that `baton doctor` does not find, by section and name.

    Args:
        environment: the environment variables.
    """
    return {
        "system": _system(),
        "limits": _limits(),
        "packages": _packages(),
        "environment": without_secrets(environment),
    }


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that may change what Baton does; hides secrets in their values."""
    shown = {}
    for name, value in sorted(environment.items()):
        if not name.startswith(_PREFIXES):
            continue
        without_user = _URL_USER.sub(_HIDDEN, value)
        text = _SECRET_OPTIONS.sub(rf"\1{_HIDDEN}", without_user)
        shown[name] = _HIDDEN if _SECRET_NAMES.search(name) else text
    return shown


def _system() -> dict[str, str]:
    facts = {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "platform": platform.platform(),
        "container": "yes" if _is_container() else "no sign of one",
    }
    with suppress(OSError):
        facts["distribution"] = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    return facts


def _is_container() -> bool:
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    is_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    return is_pod or any(mark.exists() for mark in marks)


def _limits() -> dict[str, str]:
    """Returns the limits of this process; those of control groups are among doctor's findings."""
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    limits = {}
    for name, constant in _LIMITS.items():
        soft, _ = resource.getrlimit(getattr(resource, constant))
        limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    return limits


def _packages() -> dict[str, str]:
    """Returns the versions of all packages that Baton's dependencies and extras name."""
    try:
        requirements = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {_DISTRIBUTION: "not installed; it runs from a folder"}
    names = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements}
    return {name: _version(name) for name in sorted({*names, _DISTRIBUTION})}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
