"""Random rows in every storage format, of about the same numbers."""

import numpy as np
import torch

import kernels
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS
from tests.support.kernel_checks import normal
from tests.support.quantized_checkpoints import GGML_KINDS, stored_tensor

_MAX_E4M3 = 448


def random_rows(name: str, num_rows: int, num_columns: int, *, seed: int = 0) -> BlockRows:
    """Returns rows in a format, of numbers whose deviation is about 0.1.

    Args:
        name: of the format.
        num_rows: number of rows.
        num_columns: their length, of whole blocks.
        seed: of the numbers.
    """
    weight_format, numbers = FORMATS[name], normal(num_rows, num_columns, seed=seed) / 10
    if name in GGML_KINDS:
        stored, _ = stored_tensor(numbers.numpy(), name, seed=seed)
        data = torch.from_numpy(np.ascontiguousarray(stored))
        return BlockRows(weight_format, data, num_columns)
    if not name.startswith("FP8"):
        return kernels.quantize_rows(numbers, weight_format)
    blocks = numbers.view(-1, weight_format.block or num_columns)
    scales = blocks.abs().amax(dim=1, keepdim=True) / _MAX_E4M3
    codes = (blocks / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    data = torch.cat((scales.view(torch.uint8), codes), dim=1).view(num_rows, -1)
    return BlockRows(weight_format, data, num_columns)
