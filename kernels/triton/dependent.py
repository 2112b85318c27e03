"""Programmatic dependent launch: kernels that begin before the ones in front of them have ended.

Otherwise the device is idle between two kernels of a stream while the first one ends and the second
one begins. A kernel launched with `dependent_launch` may begin once all programs of the kernel in
front of it have called `wait_for_inputs` or ended. It reads and writes nothing that other kernels
write before it has called `wait_for_inputs`, which returns when all kernels in front of it have
ended and what they wrote can be seen (CUDA programming guide, "Programmatic Dependent Launch and
Synchronization"). In a CUDA graph the launches become edges of the same kind.
"""

import functools

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch_table

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # in older versions
    gdc_launch_dependents = gdc_wait = None

__all__ = ["dependent_launch", "prefetch", "wait_for_inputs"]

_MIN_CAPABILITY = (9, 0)
_IS_INTERPRETED = triton.knobs.runtime.interpret


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Returns the arguments of a launch whose kernel calls `wait_for_inputs(IS_DEPENDENT)`."""
    if launch_table(device).mechanisms.dependent_launch and _is_served(device):
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@functools.cache
def _is_served(device: torch.device) -> bool:
    """Whether the device has such launches, and this Triton; kernels compiled for a GPU on a
    machine without one are for one that has them.
    """
    if _IS_INTERPRETED or gdc_wait is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


@triton.jit
def wait_for_inputs(IS_DEPENDENT: tl.constexpr):
    """Waits until the kernels in front have ended, then lets the kernel behind begin.

    In this order at most two kernels run at a time, and a kernel that has ended says that all
    kernels in front of it have.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers, IS_DEPENDENT: tl.constexpr):
    """Reads the lines of 128 bytes at these addresses into the L2 cache, without waiting for them.

    For memory that no kernel writes, before `wait_for_inputs`.
    """
    if IS_DEPENDENT:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
