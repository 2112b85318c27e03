"""Where the tests of the Triton kernels and of the device runtime compute.

On the CPU, through Triton's interpreter; with `BATON_TEST_DEVICE=cuda` compiled, on a GPU.
"""

import os

import torch

__all__ = ["DEVICE", "IS_CUDA", "rounding_error"]

DEVICE = torch.device(os.environ.get("BATON_TEST_DEVICE", "cpu"))
IS_CUDA = DEVICE.type == "cuda"


def rounding_error(dtype: torch.dtype) -> float:
    """By which share of itself a kernel's number may change when it is stored as `dtype`.

    Half the distance of two numbers; Triton's interpreter cuts bfloat16 off instead of rounding.
    """
    is_cut_off = dtype == torch.bfloat16 and not IS_CUDA
    return torch.finfo(dtype).eps * (1.0 if is_cut_off else 0.5)
