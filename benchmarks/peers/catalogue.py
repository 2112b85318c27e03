"""The engines that can be compared, and how their workers are started."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.common.errors import ConfigurationError
from benchmarks.machine import holding_variables, instruction_set
from benchmarks.peers.environments import (
    NotMeasurableError,
    Setting,
    inherited_variables,
    peer_python,
)
from benchmarks.peers.peer_process import Launch
from benchmarks.peers.served_files import as_checkpoint, as_gguf, as_openvino, as_quantized_gguf
from engine.config import QUANTIZED_COMPUTE

__all__ = [
    "BATON",
    "ENGINES",
    "GGUF_FORMS",
    "REFERENCE",
    "SERVED_FORMS",
    "forms_of",
    "launch_of",
]

BATON = "baton"
REFERENCE = "reference"
"""The engine of the reference tokens: transformers in float32, one request at a time."""
GGUF_FORMS = ("q8_0", "q4_k_m", "q4_0")
"""Quantized forms of the compared model that Baton and llama.cpp serve from one file."""
_WORKERS = Path(__file__).parent / "workers"
_TCMALLOC_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
_OWN_CHOICE = "auto"


def _no_variables(setting: Setting) -> dict[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class _Engine:
    """One entry of the catalogue.

    Attributes:
        worker: its script in `workers`, without the suffix.
        home: its environment below the folder of peers; None for Baton's own.
        prepare: makes the model in the form that the engine serves.
        variables: environment variables beyond those that all engines get.
        dtype: the type that it computes in; "auto" for its own choice.
        devices: where it can be measured.
        held_dtype: the type that it computes in while `holding_variables` hold it to an
            instruction set; None if they do not hold all of it.
        held_home: its environment for runs that are held to AVX2, if it needs another.
        reads_gguf: whether the compared model may be a GGUF file.
        forms: the forms of weights in which Baton is compared with it; empty for those that the
            compared model has.
        flags: more flags of its worker.
    """

    worker: str
    home: str | None
    prepare: Callable[[Setting], Path] = as_checkpoint
    variables: Callable[[Setting], Mapping[str, str]] = _no_variables
    dtype: str = "bfloat16"
    devices: tuple[str, ...] = ("cpu", "cuda")
    held_dtype: str | None = None
    held_home: str | None = None
    reads_gguf: bool = False
    forms: tuple[str, ...] = ("",)
    flags: tuple[str, ...] = ()


def forms_of(engine: str) -> tuple[str, ...]:
    """Returns the forms of weights in which Baton is compared with an engine, or is that engine."""
    return ENGINES[engine].forms


def launch_of(engine: str, setting: Setting) -> Launch:
    """Returns how to start an engine. Makes the model first if the engine has its own format.

    Raises:
        ConfigurationError: the engine is unknown, or is not measured on the device.
        NotMeasurableError: its environment, or a library, is missing, it does not read the model's
            files and they cannot be exported, or the run is held to an instruction set and the
            engine cannot be.
    """
    entry = _entry(engine)
    if setting.device not in entry.devices:
        raise ConfigurationError(f"--engines has {engine!r}, which is not measured on a GPU")
    if setting.is_gguf and not entry.reads_gguf:
        raise NotMeasurableError(f"{engine} is not measured on GGUF files")
    held = holding_variables()
    dtype = entry.held_dtype if held else entry.dtype
    if dtype is None:
        raise NotMeasurableError(f"{engine} cannot be held to {instruction_set()}")
    home = (entry.held_home or entry.home) if held else entry.home
    try:
        python = Path(sys.executable) if home is None else peer_python(home, setting)
        model = entry.prepare(setting)
    except NotMeasurableError as error:
        raise NotMeasurableError(f"{engine}: {error.message}") from None
    command = (
        *(str(python), str(_WORKERS / f"{entry.worker}.py"), str(model)),
        *("--num-threads", str(setting.num_threads), "--dtype", dtype),
        *("--max-model-len", str(setting.max_model_len), "--device", setting.device),
        *entry.flags,
    )
    environment = (dict(os.environ) if entry.home is None else inherited_variables()) | {
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


def _openvino(weights: str, *forms: str, dtype: str, held_dtype: str) -> _Engine:
    return _Engine(
        "openvino_worker",
        home="openvino",
        prepare=partial(as_openvino, weights=weights),
        dtype=dtype,
        devices=("cpu",),
        held_dtype=held_dtype,
        forms=forms,
    )


def _baton_name(form: str, compute: str) -> str:
    """Returns an entry's name, such as "baton-q8_0-fast"; exact computation has no suffix."""
    suffix = "" if compute == "exact" else f"-{compute}"
    return f"{BATON}-{form}{suffix}" if form else f"{BATON}{suffix}"


def _baton(form: str, compute: str) -> _Engine:
    return _Engine(
        "baton_worker",
        home=None,
        prepare=partial(as_quantized_gguf, form=form) if form else as_checkpoint,
        devices=("cpu",) if form else ("cpu", "cuda"),
        held_dtype="bfloat16",
        reads_gguf=True,
        forms=(form,),
        flags=("--quantized-compute", compute),
    )


def _llamacpp(form: str) -> _Engine:
    return _Engine(
        "llamacpp_worker",
        home="llamacpp",
        prepare=partial(as_quantized_gguf, form=form) if form else as_gguf,
        dtype=_OWN_CHOICE,
        devices=("cpu",),
        held_dtype=_OWN_CHOICE,
        held_home="llamacpp-avx2",
        reads_gguf=True,
        forms=(form,),
    )


_BATONS = {
    _baton_name(form, compute): _baton(form, compute)
    for form in ("", *GGUF_FORMS)
    for compute in QUANTIZED_COMPUTE
}
SERVED_FORMS = {name: entry.forms[0] for name, entry in _BATONS.items()}
"""By the names of Baton's entries, the form of the weights that it serves."""
ENGINES = {
    BATON: _BATONS[BATON],
    "vllm": _Engine("vllm_worker", home="vllm", variables=_vllm_variables, devices=("cpu",)),
    # Its AVX2 kernels of attention know float32 alone.
    "openvino": _openvino("fp16", "", dtype="bfloat16", held_dtype="float32"),
    "openvino-own": _openvino("fp16", "", dtype=_OWN_CHOICE, held_dtype=_OWN_CHOICE),
    "openvino-int8": _openvino("int8", "q8_0", dtype=_OWN_CHOICE, held_dtype=_OWN_CHOICE),
    "openvino-int4": _openvino("int4", "q4_k_m", "q4_0", dtype=_OWN_CHOICE, held_dtype=_OWN_CHOICE),
    "transformers": _Engine("transformers_worker", home="transformers"),
    "transformers-cb": _Engine("transformers_cb_worker", home="transformers"),
    "llamacpp": _llamacpp(""),
    **{f"llamacpp-{form}": _llamacpp(form) for form in GGUF_FORMS},
    **_BATONS,
}
"""The engines, by their names in `--engines`."""
_REFERENCE = _Engine(
    "transformers_worker", home="transformers", dtype="float32", held_dtype="float32"
)
