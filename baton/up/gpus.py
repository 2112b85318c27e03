"""The GPUs of a cluster's workers on this machine: their own ones, or a share of one."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig

__all__ = ["GPUS_VARIABLE", "GpuShare", "default_workers", "share_gpus", "visible_gpus"]

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""One of them exists where a driver is loaded: on Linux, and in Windows' Linux."""


@dataclass(frozen=True, slots=True)
class GpuShare:
    """The GPUs of one worker.

    Attributes:
        gpus: their names, as CUDA_VISIBLE_DEVICES has them; none for a worker on the CPU, or on the
            GPU that `--device` names.
        num_workers: number of workers that share them.
    """

    gpus: tuple[str, ...] = ()
    num_workers: int = 1

    @property
    def is_shared(self) -> bool:
        """Whether other workers use the same GPUs."""
        return self.num_workers > 1

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker's process."""
        return {GPUS_VARIABLE: ",".join(self.gpus)} if self.gpus else {}

    def divide_memory(self, engine: EngineConfig) -> EngineConfig:
        """Returns the worker's config, whose share of memory leaves room for the other workers.

        A share that is smaller than the default was chosen with them in mind, and stays as far as
        all of them fit.
        """
        utilization = engine.gpu_memory_utilization
        share = max(utilization, DEFAULT_GPU_MEMORY_UTILIZATION) / self.num_workers
        return replace(engine, gpu_memory_utilization=min(utilization, share))


def visible_gpus() -> tuple[str, ...]:
    """Returns the GPUs that processes of this machine may use."""
    if not any(path.exists() for path in _DRIVER_FILES):
        return ()
    import torch  # takes seconds

    count = torch.cuda.device_count()
    named = os.environ.get(GPUS_VARIABLE)
    names = [str(index) for index in range(count)] if named is None else named.split(",")
    return tuple(name.strip() for name in names[:count])


def default_workers(gpus: Sequence[str], engine: EngineConfig) -> tuple[int, int]:
    """Returns the numbers of prefill and of decode workers that nobody has chosen.

    One of each; where there are GPUs for one engine alone, one worker computes prompts too: two
    would need its weights twice, and halve what is left for KV.

    Args:
        gpus: the machine's GPUs.
        engine: config of every worker.
    """
    if engine.device == "cpu" or not gpus:
        return 1, 1
    has_one = engine.device not in ("auto", "cuda") or len(gpus) // engine.num_ranks <= 1
    return (0, 1) if has_one else (1, 1)


def share_gpus(gpus: Sequence[str], engine: EngineConfig, num_workers: int) -> list[GpuShare]:
    """Divides GPUs among workers, as many for each as its engine has ranks.

    Workers get GPUs of their own as far as there are enough; the others share those, in turn.

    Args:
        gpus: the machine's GPUs.
        engine: config of every worker.
        num_workers: number of workers.
    """
    num_ranks = engine.num_ranks
    num_groups = len(gpus) // num_ranks
    # Without GPUs workers run on the CPU, or refuse to start and say why, as they do where their
    # engines have more ranks than there are GPUs.
    if not num_groups or engine.device == "cpu":
        return [GpuShare()] * num_workers
    if engine.device not in ("auto", "cuda"):  # one GPU by its number, for all workers
        return [GpuShare((), num_workers)] * num_workers
    groups = [tuple(gpus[num_ranks * n : num_ranks * (n + 1)]) for n in range(num_groups)]
    sizes = Counter(number % num_groups for number in range(num_workers))
    return [
        GpuShare(groups[number % num_groups], sizes[number % num_groups])
        for number in range(num_workers)
    ]
