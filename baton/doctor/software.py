"""Checks of versions, torch, and the packages that Baton needs or can use."""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

import baton
from baton.common.own_packages import PACKAGES, folder_of_packages
from baton.doctor import Finding, Level

__all__ = [
    "check_extras",
    "check_names",
    "check_requirements",
    "check_torch",
    "check_versions",
    "has_torch",
]

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_DISTRIBUTION = "baton-llm"
_INSTALL_TORCH = "pip install torch"


@dataclass(frozen=True, slots=True)
class _Extra:
    """An optional package.

    Attributes:
        distribution: the package's name on PyPI.
        extra: Baton's extra that installs it.
        purpose: what Baton uses it for.
        needs_gpu: whether it is useless without a GPU.
    """

    distribution: str
    extra: str
    purpose: str
    needs_gpu: bool = False


_EXTRAS = (
    _Extra("triton", "gpu", "kernels on NVIDIA GPUs", needs_gpu=True),
    _Extra("matplotlib", "bench", "plots of `baton bench`"),
    _Extra("nixl-cu12", "nixl", "the connector nixl://"),
    _Extra("opentelemetry-sdk", "tracing", "traces"),
    _Extra("pyzmq", "zmq", "KV events for other routers"),
    _Extra("ray", "ray", "ranks and servers on a Ray cluster"),
)


def check_versions() -> Iterator[Finding]:
    """Reports the versions of Baton, Python and the system."""
    facts = {
        "baton": baton.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
    text = "baton {baton}, Python {python}, {system} {machine}".format_map(facts)
    yield Finding("versions", Level.OK, text, facts)


def has_torch() -> bool:
    """Whether torch is installed; it is not imported."""
    return util.find_spec("torch") is not None


def check_torch() -> Iterator[Finding]:
    """Reports torch's version, and whether it finds a GPU."""
    if not has_torch():
        text = f"not installed; only the router and the clients run: {_INSTALL_TORCH}"
        yield Finding("torch", Level.PROBLEM, text, {"version": None})
        return
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}
    if gpus:
        text = f"{torch.__version__}, GPUs: {', '.join(gpus)}"
    elif torch.version.cuda:
        text = f"{torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU"
    else:
        text = f"{torch.__version__}, without CUDA"
    yield Finding("torch", Level.OK, text, facts)


def check_requirements() -> Iterator[Finding]:
    """Reports packages that Baton needs and that are missing, or have another version."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        text = "not checked: first pip install packaging, which Baton needs too"
        yield Finding("requirements", Level.PROBLEM, text)
        return
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        text = "not checked: Baton runs from a folder, and is not installed"
        yield Finding("requirements", Level.NOTE, text)
        return
    needed = [each for each in map(Requirement, lines) if _is_needed(each)]
    missing = [each for each in needed if not _is_satisfied(each)]
    if not missing:
        yield Finding("requirements", Level.OK, f"all {len(needed)} packages are installed")
    for each in missing:
        version = _installed_version(each.name)
        state = "not installed" if version is None else f"{version} is installed"
        wanted = f"{each.name}{each.specifier}"
        facts = {"package": each.name, "needed": str(each.specifier), "version": version}
        text = f"{wanted} is needed, {state}: pip install '{wanted}'"
        yield Finding("requirements", Level.PROBLEM, text, facts)


def _is_needed(requirement: "Requirement") -> bool:
    """Whether a requirement is for this system, and not for an extra alone."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _is_satisfied(requirement: "Requirement") -> bool:
    version = _installed_version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def check_names() -> Iterator[Finding]:
    """Reports other packages with the names of Baton's, such as Hugging Face's `kernels`."""
    own = folder_of_packages()
    folders = {Path(entry).resolve() for entry in sys.path} - {own.resolve()}
    others = [
        str(folder / name)
        for folder in folders
        for name in PACKAGES
        if (folder / name / "__init__.py").is_file()
    ]
    if others:
        text = (
            f"{', '.join(sorted(others))}: packages with names of Baton's. Baton's processes use "
            f"their own, in {own}; a process of yours can have one of both"
        )
        yield Finding("package names", Level.NOTE, text, {"others": sorted(others)})
    else:
        yield Finding("package names", Level.OK, f"no other package has a name of those in {own}")


def check_extras() -> Iterator[Finding]:
    """Reports the optional packages that are installed or missing."""
    for extra in _EXTRAS:
        topic = f"optional {extra.distribution}"
        command = f'pip install "baton-llm[{extra.extra}]"'
        facts = {"purpose": extra.purpose, "install": command}
        version = _installed_version(extra.distribution)
        if version is not None:
            yield Finding(topic, Level.OK, version, facts | {"version": version})
        elif extra.needs_gpu and not _has_gpu():
            yield Finding(topic, Level.OK, "not installed; only needed with a GPU", facts)
        else:
            text = f"not installed; for {extra.purpose}: {command}"
            yield Finding(topic, Level.NOTE, text, facts)


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _has_gpu() -> bool:
    if not has_torch():
        return False
    import torch

    return torch.cuda.is_available()
