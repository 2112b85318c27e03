"""The torch device that an engine computes on."""

import numpy as np
import torch

from baton.errors import ConfigurationError

__all__ = ["resolve_device", "to_device", "used_bytes", "wait_for"]


def resolve_device(name: str) -> torch.device:
    """The device a flag names; "auto" is CUDA's current one where there is one, else the CPU.

    Raises:
        ConfigurationError: there is no such device.
    """
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


def used_bytes(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def wait_for(device: torch.device) -> None:
    """Returns once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array as a tensor on the device; on the CPU it shares the array's memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor
