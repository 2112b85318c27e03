"""A Python environment with the packages of a bare GPU image alone, and without git."""

import importlib.metadata
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = (
    # What such an image has of all that Baton imports: PyTorch, Triton, transformers, gRPC, pytest.
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "huggingface-hub"),
    *("grpcio", "protobuf", "prometheus-client", "psutil", "pyyaml", "jinja2", "tqdm", "xxhash"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
)
ABSENT = (
    *("cryptography", "pyjwt", "grpcio-health-checking", "grpcio-reflection"),
    *("fastapi", "pydantic", "pydantic-core", "uvicorn", "httptools"),
)
"""Packages that servers need, and that such an image lacks."""
_EXTRA = "extra =="


def make_gpu_image(folder: Path) -> Path:
    """Makes a virtual environment with links to the installed packages.

    Returns:
        Its interpreter.
    """
    command = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = folder / "lib" / version / "site-packages"
    installed = Path(sysconfig.get_paths()["purelib"])
    for name in sorted(_with_needs(PACKAGES)):
        for top in _top_level_names(name):
            link = target / top
            if (installed / top).exists() and not link.exists():
                link.symlink_to(installed / top)
    return folder / "bin" / "python"


def environment_without_git(folder: Path, **variables: str) -> dict[str, str]:
    """Returns variables for a process that finds no program but the interpreter's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return {**kept, "PATH": str(folder / "bin"), **variables}


def _with_needs(names: tuple[str, ...]) -> set[str]:
    """Returns the packages and those that they need, as far as they are installed."""
    known, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop().lower()
        if name in known or name in ABSENT:
            continue
        try:
            needs = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # a need of other systems or Pythons
        known.add(name)
        waiting += [_name_of(need) for need in needs if _EXTRA not in need]
    return known


def _name_of(requirement: str) -> str:
    letters = (index for index, letter in enumerate(requirement) if letter in " <>=!~;[(")
    return requirement[: next(letters, None)]


def _top_level_names(package: str) -> set[str]:
    files = importlib.metadata.files(package) or ()
    return {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
