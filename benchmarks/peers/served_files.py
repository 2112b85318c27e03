"""Models in the engines' own formats: made from the compared model when needed, and kept."""

import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import NAMED_MODELS
from benchmarks.models import RANDOM_MODELS, cached_random_model
from benchmarks.peers.environments import (
    NotMeasurableError,
    Setting,
    inherited_variables,
    peer_python,
)

__all__ = ["as_checkpoint", "as_gguf", "as_openvino", "as_quantized_gguf", "compared_model"]

_WORKERS = Path(__file__).parent / "workers"


def compared_model(name: str, models: Path) -> Path:
    """Returns the checkpoint folder or GGUF file that `--model` means.

    Args:
        name: a path, or a name of a model.
        models: folder for models of random weights, which are made when needed.

    Raises:
        ConfigurationError: there is no such model.
    """
    if name in RANDOM_MODELS:
        return cached_random_model(name, models)
    path = NAMED_MODELS[name]() if name in NAMED_MODELS else Path(name).expanduser().resolve()
    if path.suffix != ".gguf" and not (path / "config.json").exists():
        raise ConfigurationError(
            f"--model is {name!r}; it must be one of "
            f"{', '.join([*RANDOM_MODELS, *NAMED_MODELS])}, a checkpoint's folder, or a GGUF file"
        )
    return path


def as_checkpoint(setting: Setting) -> Path:
    """Returns the compared model itself."""
    return setting.model


def as_gguf(setting: Setting) -> Path:
    """Returns the compared model as a GGUF file, with the weights in the types that they have."""
    if setting.is_gguf:
        return setting.model
    from benchmarks.gguf_export import export_gguf  # here, as it imports torch

    return _kept(setting, "", ".gguf", lambda file: export_gguf(setting.model, file))


def as_quantized_gguf(setting: Setting, form: str) -> Path:
    """Returns the compared model as a GGUF file that llama.cpp has quantized.

    Args:
        setting: has the model.
        form: llama.cpp's name of a mixture of formats, in lower case.
    """
    python, source = peer_python("llamacpp", setting), as_gguf(setting)

    def quantize(file: Path) -> None:
        script = _WORKERS / "llamacpp_quantize.py"
        _run((python, script, source, file, form), f"quantize {source.name} to {form}")

    return _kept(setting, f"-{form}", ".gguf", quantize)


def as_openvino(setting: Setting, weights: str) -> Path:
    """Returns the model's folder as optimum-intel exports it.

    Args:
        setting: has the model.
        weights: optimum-intel's name of the weights' format. "fp16" represents bfloat16 weights of
            ordinary size exactly.
    """
    model, program = setting.model, setting.peers_folder / "openvino/bin/optimum-cli"

    def export(folder: Path) -> None:
        flags = ("--task", "text-generation-with-past", "--weight-format", weights)
        command = (program, "export", "openvino", "--model", model, *flags, folder)
        _run(command, f"export {model}")

    form = "" if weights == "fp16" else f"-{weights}"
    return _kept(setting, f"-openvino{form}", "", export)


def _kept(setting: Setting, form: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Returns the file or folder of a form of the model, and makes it if it does not exist."""
    model = setting.model
    stated = model / "config.json" if model.is_dir() else model
    key = f"{stated.resolve()} {stated.stat().st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    name = f"{model.name.removesuffix('.gguf')}{form}-{digest}{suffix}"
    path = setting.peers_folder / "models" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as unfinished:
            # Renamed when complete: an interrupted run leaves no partial model.
            make(Path(unfinished) / name)
            (Path(unfinished) / name).rename(path)
    return path


def _run(command: tuple[object, ...], what: str) -> None:
    environment = inherited_variables() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise NotMeasurableError(f"cannot {what}: {done.stderr[-500:]}")
