"""Checks of versions, torch and the optional packages."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util

import baton
from baton.doctor import Finding, Level

__all__ = ["check_extras", "check_torch", "check_versions", "has_torch"]

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
