"""The device of the tests of the Triton kernels and of the device runtime.

It is the CPU, where Triton interprets kernels, or with `BATON_TEST_DEVICE=cuda` a GPU, where it
compiles them.
"""

import os

import torch

__all__ = ["DEVICE", "IS_CUDA", "rounding_error"]

DEVICE = torch.device(os.environ.get("BATON_TEST_DEVICE", "cpu"))
IS_CUDA = DEVICE.type == "cuda"


def rounding_error(dtype: torch.dtype) -> float:
    """Returns the largest relative change of a kernel's number when it is stored as `dtype`.

    It is half the distance of two numbers, or the whole one for bfloat16 in Triton's interpreter,
    which truncates instead of rounding.
    """
    is_cut_off = dtype == torch.bfloat16 and not IS_CUDA
    return torch.finfo(dtype).eps * (1.0 if is_cut_off else 0.5)
