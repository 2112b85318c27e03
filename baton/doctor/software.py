"""Versions, torch, and the optional packages."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import baton
from baton.doctor.finding import Finding, Level

__all__ = ["check_extras", "check_torch", "check_versions"]


@dataclass(frozen=True, slots=True)
class _Extra:
    """An optional package.

    Attributes:
        distribution: its name on PyPI.
        extra: of Baton's own, that brings it.
        purpose: what it is for.
        needs_gpu: whether it is of no use without one.
    """

    distribution: str
    extra: str
    purpose: str
    needs_gpu: bool = False


_EXTRAS = (
    _Extra("triton", "gpu", "kernels on NVIDIA GPUs", needs_gpu=True),
    _Extra("matplotlib", "bench", "plots of `baton bench`"),
    _Extra("httpx", "bench", "`baton bench` of HTTP endpoints"),
)


def check_versions() -> Iterator[Finding]:
    """Baton, Python, and what they run on."""
    facts = {
        "baton": baton.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
    text = "baton {baton}, Python {python}, {system} {machine}".format_map(facts)
    yield Finding("versions", Level.OK, text, facts)


def check_torch() -> Iterator[Finding]:
    """torch, and whether it sees a GPU."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}
    if gpus:
        text = f"{torch.__version__}, GPUs: {', '.join(gpus)}"
    elif torch.version.cuda:
        text = f"{torch.__version__}, built for CUDA {torch.version.cuda}, sees no GPU"
    else:
        text = f"{torch.__version__}, without CUDA"
    yield Finding("torch", Level.OK, text, facts)


def check_extras() -> Iterator[Finding]:
    """Packages that Baton uses where they are installed."""
    for extra in _EXTRAS:
        topic = f"optional {extra.distribution}"
        command = f'pip install "baton-llm[{extra.extra}]"'
        facts = {"purpose": extra.purpose, "install": command}
        version = _installed_version(extra.distribution)
        if version is not None:
            yield Finding(topic, Level.OK, version, facts | {"version": version})
        elif extra.needs_gpu and not _has_gpu():
            yield Finding(topic, Level.OK, "not installed, nor needed without a GPU", facts)
        else:
            text = f"not installed; for {extra.purpose}: {command}"
            yield Finding(topic, Level.NOTE, text, facts)


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
