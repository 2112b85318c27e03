"""Rows of random blocks in the storage formats of quantized weights."""

import numpy as np
import torch

from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, GGML_FORMATS

__all__ = ["GGML_TYPES", "random_rows"]

GGML_TYPES = {weight_format.name: number for number, weight_format in GGML_FORMATS.items()}


def random_rows(name, num_rows, num_columns, *, seed=0, any_scale=False):
    """Returns rows of random bytes.

    Args:
        name: of the format.
        num_rows: number of rows.
        num_columns: their length.
        seed: of the bytes.
        any_scale: whether scales are any numbers, also infinity or NaN; otherwise they are near 1.
    """
    weight_format, generator = FORMATS[name], np.random.default_rng(seed)
    row_bytes = weight_format.row_bytes(num_columns)
    data = generator.integers(0, 256, (num_rows, row_bytes), np.uint8)
    blocks = data.reshape(-1, weight_format.row_bytes(weight_format.block or num_columns))
    if name.startswith("FP8"):
        codes = blocks[:, 4:]
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    if not any_scale:
        if name == "MXFP4":
            blocks[:, 0] = 120 + blocks[:, 0] % 16
        elif name in GGML_TYPES:
            for place in {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(name, (0,)):
                halves = generator.uniform(-1, 1, (len(blocks), 1)).astype(np.float16)
                blocks[:, place : place + 2] = halves.view(np.uint8)
            if name in ("Q4_1", "Q5_1"):
                blocks[:, 2:4] = blocks[:, 0:2]
        else:
            num_scales = 2 if name.startswith("INT4") else 1
            floats = generator.uniform(-1, 1, (len(blocks), num_scales)).astype(np.float32)
            blocks[:, : 4 * num_scales] = floats.view(np.uint8)
    return BlockRows(weight_format, torch.from_numpy(data), num_columns)
