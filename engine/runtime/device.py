"""Helpers for the torch device that an engine computes on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from baton.common.errors import ConfigurationError
from engine.config import (
    AUTO,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineConfig,
)

__all__ = [
    "Fetched",
    "copy_rows",
    "current",
    "fetch",
    "resolve_device",
    "to_device",
    "used_bytes",
    "wait_for",
    "with_device_defaults",
]

_DEVICE_FIELDS = ("async_scheduling", "max_step_ms", "max_num_seqs", "max_num_batched_tokens")
"""Fields of the config whose defaults depend on the device."""
_STEP_SIZES = ((60 << 30, 256, 8192), (20 << 30, 128, 4096))
"""Sequences and tokens of a step, by the minimum of bytes of a GPU that a worker may use."""


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """Returns the device that `--device` names; "auto" is CUDA's current GPU, else the CPU.

    Args:
        name: the flag's value.
        local_rank: of one of several ranks, as in `EngineRanks`: it has the GPU with this number,
            or the only one of its machine or container. None for one rank.

    Raises:
        ConfigurationError: there is no such device, or it is a GPU and Triton is not installed, or
            it is one GPU for several ranks.
    """
    device = _find_device(name)
    if device.type == "cuda" and local_rank is not None and torch.cuda.device_count() > 1:
        if name not in ("auto", "cuda"):
            raise ConfigurationError(
                f"--device is {name}, one GPU, and the engine has several ranks: use cuda, and "
                "choose GPUs by CUDA_VISIBLE_DEVICES"
            )
        device = _find_device(f"cuda:{local_rank}")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigurationError(
            f"--device {name} is a GPU, whose kernels need Triton: pip install 'baton-llm[gpu]'"
        )
    return device


def _find_device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_cuda):
        return torch.device("cpu")
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count() if has_cuda else 0)]
    if name in ("auto", "cuda") and has_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    if name not in names:
        known = ", ".join(["auto", "cpu", *(["cuda"] if names else []), *names])
        raise ConfigurationError(f"--device is {name!r}; this machine has {known}")
    torch.cuda.set_device(name)
    return torch.device(name)


def with_device_defaults(config: EngineConfig) -> EngineConfig:
    """Returns the config with defaults that depend on the device filled in.

    Raises:
        ConfigurationError: there is no such device.
    """
    unset = [name for name in _DEVICE_FIELDS if getattr(config, name) is None]
    if not unset:
        return config
    device = resolve_device(config.device)
    is_on_gpu = device.type == "cuda"
    sizes = _step_sizes(device, config.gpu_memory_utilization)
    defaults = (is_on_gpu, 0 if is_on_gpu else AUTO, *sizes)
    by_name: dict[str, Any] = dict(zip(_DEVICE_FIELDS, defaults, strict=True))
    return replace(config, **{name: by_name[name] for name in unset})


def _step_sizes(device: torch.device, utilization: float) -> tuple[int, int]:
    """Returns how many sequences and tokens a step may have: more, the more memory there is."""
    if device.type == "cuda":
        usable = utilization * torch.cuda.get_device_properties(device).total_memory
        for min_bytes, num_seqs, num_tokens in _STEP_SIZES:
            if usable >= min_bytes:
                return num_seqs, num_tokens
    return DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS


def used_bytes(device: torch.device) -> int:
    """Returns the number of bytes in use on a GPU, by all processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the thread's current device, as launching kernels needs; no-op on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Returns once the device has completed all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns the array as a tensor on the device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor


def copy_rows(tensor: torch.Tensor, rows: np.ndarray, values: np.ndarray) -> None:
    """Writes `values[i]` to `tensor[rows[i]]`, for rows that are all different.

    On a CPU it is no torch operation: its threads would compete with those of the kernels, which
    takes milliseconds.
    """
    if tensor.device.type == "cpu":
        tensor.numpy()[rows] = values
    else:
        tensor.index_copy_(0, to_device(rows, tensor.device), to_device(values, tensor.device))


@dataclass(frozen=True, slots=True)
class Fetched:
    """Copies of device tensors on the host, possibly still being made.

    Attributes:
        tensors: the copies; their content is undefined until `wait` has returned.
    """

    tensors: tuple[torch.Tensor, ...]
    _event: torch.cuda.Event | None

    def is_done(self) -> bool:
        """Returns whether the copies are complete."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns once the copies are complete.

        Raises:
            RuntimeError: the device failed before that.
        """
        if self._event is not None:
            self._event.synchronize()


def fetch(device: torch.device, tensors: Sequence[torch.Tensor]) -> Fetched:
    """Starts to copy tensors to the host, behind all work submitted to their device so far.

    Work submitted later may overwrite the tensors.
    """
    is_on_gpu = device.type == "cuda"
    copies = tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_on_gpu) for tensor in tensors
    )
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event() if is_on_gpu else None  # type: ignore[no-untyped-call]
    if event is not None:
        event.record()
    return Fetched(copies, event)
