"""Checks of the CPU, the cores, the memory, tasks and open files that this process may use."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from baton.common import machine_limits
from baton.common.container_limits import WORKER_NEEDS, LimitsShare, mebibytes, plan_threads
from baton.common.errors import ConfigurationError
from baton.doctor import Finding, Level
from kernels.library.cpu import cpu_features, cpu_model
from rpc.process_limits import MAX_CONNECTIONS, connection_budget

__all__ = [
    "check_cores",
    "check_cpu",
    "check_files",
    "check_memory",
    "check_shared_memory",
    "check_tasks",
    "check_threads",
]

_GIB = 1 << 30
_LOW_MEMORY_BYTES = 2 * _GIB
_LOW_SHARED_MEMORY_BYTES = _GIB
_FEW_CONNECTIONS = 512
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only its size is read
_REPORTED_FEATURES = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "bf16", "i8mm", "sve"),
)
"""The instruction sets that affect the speed of inference."""


def check_cpu() -> Iterator[Finding]:
    """Reports the CPU's name and its instruction sets."""
    features = cpu_features()
    reported = [name for name in _REPORTED_FEATURES if name in features]
    text = f"{cpu_model() or 'unknown'}: {' '.join(reported) or 'no known instruction sets'}"
    yield Finding("cpu", Level.OK, text, {"model": cpu_model(), "features": reported})


def check_cores() -> Iterator[Finding]:
    """Reports how many cores this process may use."""
    affine, quota = machine_limits.affine_cores(), machine_limits.cpu_quota()
    text = f"{affine} of {os.cpu_count()} by affinity, " + (
        "no quota" if quota is None else f"a quota of {quota:g} by control group"
    )
    facts = {"cores": os.cpu_count(), "affine": affine, "quota": quota}
    yield Finding("cores", Level.OK, text, facts)


def check_threads() -> Iterator[Finding]:
    """Reports how many threads compute by default."""
    num_threads = machine_limits.usable_cores()
    text = f"each worker computes on {num_threads}, all cores it may use"
    yield Finding("threads", Level.OK, text, {"per_worker": num_threads})


def check_memory() -> Iterator[Finding]:
    """Reports the memory for weights and KV cache on the CPU."""
    memory = machine_limits.read_memory()
    parts = [f"{_gib(memory.available)} available of {_gib(memory.total)}"]
    if memory.limit is not None:
        parts.append(f"limited to {_gib(memory.limit)} by control group")
        parts.append(_memory_of_worker(memory.limit))
    facts = {"available": memory.available, "total": memory.total, "limit": memory.limit}
    level = Level.OK
    if memory.available is not None and memory.available < _LOW_MEMORY_BYTES:
        level = Level.NOTE
        parts.append("larger models will not fit")
    if memory.limit is not None and memory.limit < WORKER_NEEDS.num_bytes:
        level = Level.PROBLEM
    yield Finding("memory", level, ", ".join(parts), facts)


def _memory_of_worker(limit: int) -> str:
    needed = WORKER_NEEDS.num_bytes
    if limit < needed:
        return f"and a worker needs at least {mebibytes(needed)} besides its model: not enough"
    left = mebibytes(limit - needed)
    return f"which leaves {left} for a worker's model, its largest step and its KV cache"


def check_tasks() -> Iterator[Finding]:
    """Reports the limit of tasks, which are threads and processes."""
    tasks, needed = machine_limits.read_tasks(), WORKER_NEEDS.all_tasks
    facts = {"limit": tasks.limit, "used": tasks.used, "per_worker": needed}
    if tasks.limit is None:
        yield Finding("tasks", Level.OK, "no limit by control group", facts)
        return
    text = (
        f"limited to {tasks.limit} by control group (pids); a worker needs {needed}, and two more "
    )
    text += "for each thread that computes"
    try:
        num_threads = plan_threads(None, machine_limits.usable_cores(), LimitsShare())
    except ConfigurationError:
        yield Finding("tasks", Level.PROBLEM, f"{text}: not enough for one", facts)
        return
    yield Finding("tasks", Level.OK, f"{text}: {num_threads} of these", facts)


def check_files() -> Iterator[Finding]:
    """Reports how many connections a router may have, which the limit of open files bounds."""
    budget = connection_budget()
    text = f"up to {min(budget, MAX_CONNECTIONS)} connections of a server"
    level = Level.OK
    if budget < _FEW_CONNECTIONS:
        text += "; raise the limit of open files (ulimit -n, ulimits.nofile of compose)"
        level = Level.NOTE
    yield Finding("open files", level, text, {"connections": budget})


def check_shared_memory() -> Iterator[Finding]:
    """Reports the free space for `shm://`, the default connector of `baton serve`."""
    if not os.access(_SHARED_MEMORY, os.W_OK):
        text = f"{_SHARED_MEMORY} is not writable: `baton serve` keeps KV in a temporary folder"
        yield Finding("shared memory", Level.NOTE, text)
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    text, level = f"{_gib(free)} free in {_SHARED_MEMORY}", Level.OK
    if free < _LOW_SHARED_MEMORY_BYTES:
        text += "; shm:// may run out of space (in Docker: --shm-size)"
        level = Level.NOTE
    yield Finding("shared memory", level, text, {"free": free})


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / _GIB:.1f} GiB"
