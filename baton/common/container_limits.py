"""The needs of a server process within the limits of its container, and its share of them.

A container limits memory and tasks (a process is one task for each of its threads). A process above
the first limit is killed, and beyond the second one it gets no threads, in the middle of its
work. So a server is refused at its start if its container cannot hold it, and plans the rest:
workers their threads here, and their memory in `engine.runtime.forward.memory_plan`.
"""

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.machine_limits import (
    affine_cores,
    count_memory_kills,
    read_memory,
    read_tasks,
    usable_cores,
)

__all__ = [
    "MEMORY_REMEDY",
    "ROUTER_NEEDS",
    "SHARE_VARIABLE",
    "SUPERVISOR_NEEDS",
    "WORKER_NEEDS",
    "EndWatch",
    "LimitsShare",
    "Needs",
    "check_command",
    "check_needs",
    "describe_limits",
    "mebibytes",
    "plan_threads",
]

SHARE_VARIABLE = "_BATON_LIMITS_SHARE"
MEMORY_REMEDY = (
    "raise the limit (mem_limit of compose, --memory of docker run, resources.limits.memory of "
    "Kubernetes)"
)
_TASKS_REMEDY = "raise the limit (pids_limit of compose, --pids-limit of docker run)"
_MEBIBYTE = 1 << 20
_TASKS_PER_THREAD = 2
"""Each thread that computes has one in the pool of the native kernels, and one in that of torch."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""How a process ends that is killed: as its parent sees it, and as a shell reports it."""
_GRPC_THREADS = range(4, 17)
"""gRPC keeps a thread for each core of the machine, within these bounds."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a process apart from its model, its KV cache and the threads that compute.

    Attributes:
        num_bytes: memory.
        num_tasks: its threads apart from those of gRPC, and its helper processes.
        num_grpc: how many processes with threads of gRPC this counts.
    """

    num_bytes: int
    num_tasks: int
    num_grpc: int = 1

    @property
    def all_tasks(self) -> int:
        """All tasks on a machine with as many cores as this one."""
        per_process = min(max(affine_cores(), _GRPC_THREADS.start), _GRPC_THREADS.stop - 1)
        return self.num_tasks + self.num_grpc * per_process

    def __rmul__(self, count: int) -> "Needs":
        return Needs(count * self.num_bytes, count * self.num_tasks, count * self.num_grpc)

    def __add__(self, other: "Needs") -> "Needs":
        return Needs(
            self.num_bytes + other.num_bytes,
            self.num_tasks + other.num_tasks,
            self.num_grpc + other.num_grpc,
        )


# Measured in containers of the image, with the health check, on a machine with two cores.
WORKER_NEEDS = Needs(224 * _MEBIBYTE, 28, num_grpc=2)
ROUTER_NEEDS = Needs(96 * _MEBIBYTE, 14, num_grpc=2)
SUPERVISOR_NEEDS = Needs(48 * _MEBIBYTE, 6)
_NEEDS_OF_COMMANDS = {
    "prefill": WORKER_NEEDS,
    "decode": WORKER_NEEDS,
    "router": ROUTER_NEEDS,
    "serve": SUPERVISOR_NEEDS + ROUTER_NEEDS + WORKER_NEEDS,
}


@dataclass(frozen=True, slots=True)
class LimitsShare:
    """A worker's share of its container's limits.

    Attributes:
        num_workers: number of workers that share what the others leave, this one included.
        other_bytes: memory of the container's other processes.
        other_tasks: tasks of these.
    """

    num_workers: int = 1
    other_bytes: int = 0
    other_tasks: int = 0

    @classmethod
    def beside(cls, others: Needs, num_workers: int) -> "LimitsShare":
        """Returns the share of each of so many workers beside other processes."""
        return cls(num_workers, others.num_bytes, others.all_tasks)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "LimitsShare":
        """Returns the share that the process has got from the one that started it; by default it
        has its container alone.
        """
        text = environment.get(SHARE_VARIABLE)
        return cls(**json.loads(text)) if text else cls()

    @property
    def environment(self) -> dict[str, str]:
        """The variable that a worker reads its share from."""
        return {SHARE_VARIABLE: json.dumps(asdict(self))}

    def of_ranks(self, num_local: int) -> "LimitsShare":
        """Returns the share of one of so many ranks that a worker has on this machine."""
        return replace(self, num_workers=self.num_workers * num_local)

    def num_bytes(self, limit: int) -> int:
        """Returns how many bytes of a limit of memory the worker has."""
        return max(0, limit - self.other_bytes) // self.num_workers

    def num_tasks(self, limit: int) -> int:
        """Returns how many of a limit of tasks the worker has."""
        return max(0, limit - self.other_tasks) // self.num_workers


class EndWatch:
    """Watches the kernel's count of killed processes from the start of a process on."""

    def __init__(self) -> None:
        self._num_kills = count_memory_kills()

    def describe(self, status: int | None) -> str:
        """Returns how the process ended, for a log.

        Args:
            status: its status; negative: the number of the signal that ended it.
        """
        text = f"ended with status {status}"
        num_kills = count_memory_kills()
        if status not in _KILLED or num_kills is None or self._num_kills is None:
            return text
        if num_kills <= self._num_kills:
            return f"{text}: killed, but not by the kernel for lack of memory"
        text += ": the kernel killed it for lack of memory"
        limit, remedy = read_memory().limit, "set a lower --kv-cache-memory-bytes"
        if limit is None:
            return f"{text} of this machine; {remedy}"
        limited = f"at the limit of {mebibytes(limit)} of this container"
        return f"{text}, {limited}; {MEMORY_REMEDY}, or {remedy}"


def check_command(command: str, root: Path = Path("/")) -> None:
    """Checks, before a server's command imports what it needs, that its container can hold it.

    Args:
        command: of `baton`.
        root: the folder that holds `proc` and `sys`.

    Raises:
        ConfigurationError: a limit is too low; has the numbers.
    """
    needs = _NEEDS_OF_COMMANDS.get(command)
    if needs is not None:
        check_needs(f"baton {command}", needs, root=root)
        if read_tasks(root).limit is not None:  # it starts a thread for each core otherwise
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def check_needs(name: str, needs: Needs, num_workers: int = 1, root: Path = Path("/")) -> None:
    """Checks that the limits of the container are not below what processes need in any case.

    Args:
        name: what needs it, for the error.
        needs: of all the processes.
        num_workers: the workers among them, each of which computes on a thread at least.
        root: the folder that holds `proc` and `sys`.

    Raises:
        ConfigurationError: one of them is; has the numbers.
    """
    memory = read_memory(root).limit
    if memory is not None and memory < needs.num_bytes:
        raise ConfigurationError(
            f"the memory limit of this container is {mebibytes(memory)}; {name} needs at least "
            f"{mebibytes(needs.num_bytes)}, the model and its KV cache not counted: "
            f"{MEMORY_REMEDY}"
        )
    tasks, needed = read_tasks(root).limit, needs.all_tasks + num_workers * _TASKS_PER_THREAD
    if tasks is not None and tasks < needed:
        raise _too_few_tasks(tasks, name, needed)


def plan_threads(
    num_threads: int | None, default: int, share: LimitsShare, root: Path = Path("/")
) -> int:
    """Returns on how many threads a worker computes: as many as the flag says, or as the cores and
    the limit of tasks allow.

    Args:
        num_threads: `--num-threads`; None for the default.
        default: the number without a limit of tasks.
        share: the worker's share of the limit.
        root: the folder that holds `proc` and `sys`.

    Raises:
        ConfigurationError: the limit allows none, or fewer than the flag says; has the numbers.
    """
    num_wanted, limit = num_threads or default, read_tasks(root).limit
    if limit is None:
        return num_wanted
    others = WORKER_NEEDS.all_tasks
    most = (share.num_tasks(limit) - others) // _TASKS_PER_THREAD
    if most >= num_wanted or (most > 0 and num_threads is None):
        return min(num_wanted, most)
    flag = "" if num_threads is None else f" with --num-threads {num_threads}"
    needed = share.other_tasks + share.num_workers * (others + _TASKS_PER_THREAD * num_wanted)
    if num_threads is None:
        needed -= share.num_workers * _TASKS_PER_THREAD * (num_wanted - 1)
    name = "the worker" if share.num_workers == 1 else f"a container of {share.num_workers} workers"
    raise _too_few_tasks(limit, f"{name}{flag}", needed)


def _too_few_tasks(limit: int, name: str, needed: int) -> ConfigurationError:
    return ConfigurationError(
        f"the limit of tasks (pids) of this container is {limit}; {name} needs {needed}, for its "
        f"threads and for the health check: {_TASKS_REMEDY}"
    )


def mebibytes(num_bytes: int) -> str:
    """Returns a size in MiB, rounded up."""
    return f"{-(-num_bytes // _MEBIBYTE)} MiB"


def describe_limits(root: Path = Path("/")) -> str:
    """Returns the limits of this process, for its log.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    memory, tasks = read_memory(root).limit, read_tasks(root).limit
    return (
        f"memory={'none' if memory is None else mebibytes(memory)} "
        f"cores={usable_cores()} tasks={'none' if tasks is None else tasks}"
    )
