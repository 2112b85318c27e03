"""The engines that can be compared: their environments, and how their workers are started."""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.common.errors import ConfigurationError
from benchmarks.machine import holding_variables, instruction_set
from benchmarks.peers.peer_process import Launch

__all__ = ["ENGINES", "REFERENCE", "NotMeasurableError", "Setting", "launch_of"]

REFERENCE = "reference"
"""The engine of the reference tokens: transformers in float32, one request at a time."""
_HERE = Path(__file__).parent
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
"""Environment variables of Baton's environment that would affect those of peers."""
_TCMALLOC_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")


class NotMeasurableError(ConfigurationError):
    """An engine, or a library that it is measured with, is not installed, or the engine cannot be
    held to an instruction set.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all engines share.

    Attributes:
        model: checkpoint folder.
        num_threads: threads that compute.
        peers_folder: has an environment per peer.
        max_model_len: most tokens of a request.
        device: torch's name of where engines compute.
    """

    model: Path
    num_threads: int
    peers_folder: Path
    max_model_len: int
    device: str = "cpu"


def _same_model(setting: Setting) -> Path:
    return setting.model


def _no_variables(setting: Setting) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class _Engine:
    """One entry of the catalogue.

    Attributes:
        worker: its script in `workers`, without the suffix.
        home: its environment below the folder of peers; None for Baton's own.
        prepare: makes the model folder in the engine's own format, if it has one.
        variables: environment variables beyond those that all engines get.
        dtype: the type that it computes in.
        devices: where it can be measured.
        held_dtype: the type that it computes in while `holding_variables` hold it to an
            instruction set; None if they do not hold all of it.
    """

    worker: str
    home: str | None
    prepare: Callable[[Setting], Path] = _same_model
    variables: Callable[[Setting], Mapping[str, str]] = _no_variables
    dtype: str = "bfloat16"
    devices: tuple[str, ...] = ("cpu", "cuda")
    held_dtype: str | None = None


def launch_of(engine: str, setting: Setting) -> Launch:
    """Returns how to start an engine. Exports the model first if the engine has its own format.

    Raises:
        ConfigurationError: the engine is unknown, or is not measured on the device.
        NotMeasurableError: its environment, or a library, is missing, or the run is held to an
            instruction set and the engine cannot be.
    """
    entry = _entry(engine)
    if setting.device not in entry.devices:
        raise ConfigurationError(f"--engines has {engine!r}, which is not measured on a GPU")
    held = holding_variables()
    dtype = entry.held_dtype if held else entry.dtype
    if dtype is None:
        raise NotMeasurableError(f"{engine} cannot be held to {instruction_set()}")
    python = _python(engine, entry, setting)
    command = (
        *(str(python), str(_HERE / "workers" / f"{entry.worker}.py"), str(entry.prepare(setting))),
        *("--num-threads", str(setting.num_threads), "--dtype", dtype),
        *("--max-model-len", str(setting.max_model_len), "--device", setting.device),
    )
    environment = (dict(os.environ) if entry.home is None else _inherited()) | {
        "OMP_NUM_THREADS": str(setting.num_threads),
        "HF_HUB_OFFLINE": "1",
        **held,
        **entry.variables(setting),
    }
    return Launch(engine, command, environment, setting.peers_folder / "logs" / f"{engine}.log")


def _entry(engine: str) -> _Engine:
    if engine == REFERENCE:
        return _REFERENCE
    if engine not in ENGINES:
        raise ConfigurationError(f"--engines has {engine!r}; known are {', '.join(ENGINES)}")
    return ENGINES[engine]


def _python(engine: str, entry: _Engine, setting: Setting) -> Path:
    if entry.home is None:
        return Path(sys.executable)
    python = setting.peers_folder / entry.home / "bin" / "python"
    if not python.exists() and setting.device != "cpu":
        return Path(sys.executable)  # a machine with a GPU may have no other
    if not python.exists():
        raise NotMeasurableError(
            f"{engine} has no environment in {python.parents[1]}; make it with "
            f"{_HERE / 'make_env.sh'} {entry.home} {python.parents[1]}"
        )
    return python


def _vllm_variables(setting: Setting) -> dict[str, str]:
    """Returns variables for one process, a bounded KV cache, and the fastest libraries."""
    cores = sorted(os.sched_getaffinity(0))[: setting.num_threads]
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(map(str, (_tcmalloc(), *_intel_openmp(setting)))),
    }


def _tcmalloc() -> Path:
    for folder in _TCMALLOC_FOLDERS:
        for library in sorted(Path(folder).glob("libtcmalloc_minimal.so.*")):
            return library
    raise NotMeasurableError(
        "vllm is to run with tcmalloc, which is missing; apt-get install libtcmalloc-minimal4"
    )


def _intel_openmp(setting: Setting) -> Iterable[Path]:
    """Returns the path of Intel's OpenMP, which vLLM's wheel has on x86 only."""
    return (setting.peers_folder / "vllm" / "lib").glob("libiomp5.so")


def _exported_for_openvino(setting: Setting) -> Path:
    """Returns the model's folder as optimum-intel exports it, and makes it if it does not exist."""
    config = setting.model / "config.json"
    key = f"{config.resolve()} {config.stat().st_mtime_ns}"
    name = f"{setting.model.name}-openvino-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
    folder = setting.peers_folder / "models" / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            # Renamed when complete: an interrupted export leaves no partial model.
            _export_for_openvino(setting, Path(unfinished) / name).rename(folder)
    return folder


def _export_for_openvino(setting: Setting, folder: Path) -> Path:
    """Exports a model in fp16, which represents bfloat16 weights of ordinary size exactly."""
    program = setting.peers_folder / "openvino" / "bin" / "optimum-cli"
    flags = ("--task", "text-generation-with-past", "--weight-format", "fp16")
    command = (program, "export", "openvino", "--model", setting.model, *flags, folder)
    environment = _inherited() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ConfigurationError(f"cannot export {setting.model}: {done.stderr[-500:]}")
    return folder


def _inherited() -> dict[str, str]:
    """Returns the part of this process's environment that a peer's processes get."""
    return {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}


ENGINES = {
    "baton": _Engine("baton_worker", home=None, held_dtype="bfloat16"),
    "vllm": _Engine("vllm_worker", home="vllm", variables=_vllm_variables, devices=("cpu",)),
    "openvino": _Engine(
        "openvino_worker",
        home="openvino",
        prepare=_exported_for_openvino,
        devices=("cpu",),
        held_dtype="float32",  # its AVX2 kernels of attention know no other
    ),
    "transformers": _Engine("transformers_worker", home="transformers"),
    "transformers-cb": _Engine("transformers_cb_worker", home="transformers"),
}
"""The engines, by their names in `--engines`."""
_REFERENCE = _Engine(
    "transformers_worker", home="transformers", dtype="float32", held_dtype="float32"
)
