"""Where the tests of the Triton kernels and of the device runtime compute.

On the CPU, through Triton's interpreter; with `BATON_TEST_DEVICE=cuda` compiled, on a GPU.
"""

import os

import torch

__all__ = ["DEVICE", "IS_CUDA"]

DEVICE = torch.device(os.environ.get("BATON_TEST_DEVICE", "cpu"))
IS_CUDA = DEVICE.type == "cuda"
