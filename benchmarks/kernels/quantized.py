"""Cases of products of quantized weights: the blocks of the weight are read from memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import kernels
from benchmarks.kernels.case import Call, Case, Cost, DecoderShape, Numbers, Sizes, rows_in_words
from kernels import QuantizedForm, WeightUse, reference
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat

__all__ = ["quantized_cases"]

_FORMATS = ("INT4_128", "INT8", "Q4_K", "MXFP4")
_ENCODED = ("INT4_128", "INT8")
"""Formats to which `kernels.quantize_rows` rounds; blocks of the others are random bytes."""
_MXFP4_EXPONENTS = (117, 121)
"""Of scales of 2^-10 to 2^-6, as matrices of some thousand columns have them."""
_Q4_K_SCALE = 2.0**-12


def quantized_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """The gated layer's weight in the formats whose blocks divide its inputs, exact as if it were
    stored in `dtype`.
    """
    num_outputs, num_inputs = 2 * shape.num_gated, shape.width
    formats = [FORMATS[name] for name in _FORMATS]
    for weight_format in formats:
        if num_inputs % (weight_format.block or 1):
            continue
        for num_rows in sizes.product_rows:
            num_bytes = num_outputs * weight_format.row_bytes(num_inputs)
            yield Case(
                "linear_quantized",
                f"{weight_format.name} {num_outputs} x {num_inputs}",
                rows_in_words(num_rows),
                Cost(num_bytes, 2 * num_rows * num_outputs * num_inputs),
                num_inputs,
                partial(_calls, weight_format, num_outputs, num_inputs, num_rows),
            )


def _calls(
    weight_format: WeightFormat,
    num_outputs: int,
    num_inputs: int,
    num_rows: int,
    numbers: Numbers,
    num_copies: int,
) -> Sequence[Call]:
    rows = _rows(weight_format, num_outputs, num_inputs, numbers)
    hidden = numbers.normal(num_rows, num_inputs)
    weights = [_weight(rows, numbers) for _ in range(num_copies)]
    return [partial(numbers.module.linear, hidden, weight) for weight in weights]


def _weight(rows: BlockRows, numbers: Numbers) -> kernels.Weight:
    """Returns a weight of the rows; for the reference a dense one of the numbers that they mean."""
    num_rows, num_columns = rows.shape
    dtype, device, use = numbers.dtype, numbers.device, WeightUse.LINEAR
    if numbers.module is reference:
        matrix = kernels.dequantize(rows, dtype).to(numbers.kept_as)
        weight = reference.make_weight(num_rows, num_columns, matrix.dtype, device, use)
        weight.rows(0, num_rows).copy_(matrix)
        return weight
    form = QuantizedForm(rows.format, is_exact=True)
    quantized: kernels.Weight = numbers.module.make_weight(
        num_rows, num_columns, dtype, device, use, form
    )
    target: Any = quantized.rows(0, num_rows)
    target.copy_(rows)
    return quantized


def _rows(
    weight_format: WeightFormat, num_rows: int, num_columns: int, numbers: Numbers
) -> BlockRows:
    if weight_format.name in _ENCODED:
        scale = num_columns**-0.5
        matrix = numbers.in_float32().normal(num_rows, num_columns, seed=1, scale=scale)
        return kernels.quantize_rows(matrix, weight_format)
    generator = torch.Generator(numbers.device).manual_seed(1)
    draw = partial(torch.randint, generator=generator, dtype=torch.uint8, device=numbers.device)
    data = draw(0, 256, (num_rows, weight_format.row_bytes(num_columns)))
    blocks = data.view(-1, weight_format.block_bytes)
    if weight_format.name == "MXFP4":
        blocks[:, 0] = draw(*_MXFP4_EXPONENTS, (len(blocks),))
    else:  # Q4_K begins with the scales of a block's scales and of its offsets
        scales = torch.full((len(blocks), 2), _Q4_K_SCALE, dtype=torch.float16)
        blocks[:, :4] = scales.view(torch.uint8).to(numbers.device)
    return BlockRows(weight_format, data, num_columns)
