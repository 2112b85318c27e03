"""Rows in storage formats: their numbers, and rounding floating-point rows to formats."""

import struct

import gguf
import numpy as np
import pytest
import torch

import kernels
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, GGML_FORMATS
from tests.support.kernel_checks import normal

_ROWS = 96
# Places of float16 scales in a block.
_HALF_SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
}
_ROUNDED = ["INT8", "INT8_32", "INT8_128", "INT4_32", "INT4_128"]


def _random_blocks(weight_format, num_blocks, seed=0):
    """Returns blocks of random bytes, whose float16 scales are any but NaN."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (num_blocks, weight_format.block_bytes), np.uint8)
    for first in _HALF_SCALES[weight_format.name]:
        halves = random.integers(0, 2**16, num_blocks, np.uint16)
        is_nan = np.isnan(halves.view(np.float16))
        blocks[:, first : first + 2] = np.where(is_nan, 0, halves)[:, None].view(np.uint8)
    if weight_format.name == "MXFP4":  # each exponent
        blocks[:, 0] = np.arange(num_blocks) % 256
    return blocks


def _bits(numbers):
    """Returns the bits of float32 numbers, with one pattern for all that are NaN."""
    return np.where(np.isnan(numbers), np.float32(np.nan), numbers).view(np.int32)


@pytest.mark.parametrize("type_id", GGML_FORMATS)
def test_formats_of_ggml_have_the_bits_of_its_library(type_id):
    weight_format = GGML_FORMATS[type_id]
    data = _random_blocks(weight_format, _ROWS * 3).reshape(_ROWS, -1)
    rows = BlockRows(weight_format, torch.from_numpy(data), 3 * weight_format.block)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, gguf.GGMLQuantizationType(type_id))
    numbers = kernels.dequantize(rows, torch.float32)
    np.testing.assert_array_equal(_bits(numbers.numpy()), _bits(expected))
    rounded = torch.from_numpy(expected).to(torch.bfloat16)
    assert torch.equal(kernels.dequantize(rows, torch.bfloat16).nan_to_num(), rounded.nan_to_num())


@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "MXFP4", "INT8", "INT4_32"])
def test_any_rows_of_any_place_in_memory_have_the_same_numbers(name):
    weight_format = FORMATS[name]
    num_columns = weight_format.block or 45
    row_bytes = weight_format.row_bytes(num_columns)
    content = torch.randint(0, 120, (7 * row_bytes + 1,), dtype=torch.uint8)
    data = content[1:].view(7, row_bytes)  # at an odd address
    rows = BlockRows(weight_format, data, num_columns)
    whole = kernels.dequantize(rows, torch.float32)
    order = torch.tensor([5, 0, 0, 6])
    assert torch.equal(kernels.dequantize(rows.take(order), torch.float32), whole[order])
    every_other = rows.take(slice(1, None, 2))
    assert torch.equal(kernels.dequantize(every_other, torch.float32), whole[1::2])
    assert kernels.dequantize(rows.take(slice(0, 0)), torch.float32).shape == (0, num_columns)


def test_large_weights_are_dequantized_in_pieces():
    matrix = normal(3, 2**17, seed=3)  # two rows are a piece
    rows = kernels.quantize_rows(matrix, FORMATS["INT8_32"])
    pieces = [kernels.dequantize(rows.take(slice(row, row + 1)), torch.float32) for row in range(3)]
    assert torch.equal(kernels.dequantize(rows, torch.float32), torch.cat(pieces))


@pytest.mark.parametrize("name", ["INT8", "INT8_32", "INT8_128"])
def test_int8_codes_have_one_scale_per_block(name):
    codes = np.arange(-128, 128, dtype=np.int8)
    block = FORMATS[name].block or 256
    scales = np.float32([0.1, -3.7e-3, 2.5e-41, 1e30, 1, 2, 3, 4])[: 256 // block]
    data = b"".join(
        struct.pack("<f", scale) + codes[first : first + block].tobytes()
        for scale, first in zip(scales, range(0, 256, block), strict=True)
    )
    expected = codes.astype(np.float32) * np.repeat(scales, block)
    np.testing.assert_array_equal(_numbers(name, data, 256), expected)


@pytest.mark.parametrize("name", ["INT4_32", "INT4_128"])
def test_int4_codes_have_a_scale_and_a_zero_point_per_block(name):
    block, random = FORMATS[name].block, np.random.default_rng(5)
    codes = random.integers(0, 16, block * 2, np.uint8)
    scales, zeros = np.float32([-0.3, 1e-39]), np.float32([7, 3.5])
    data = b""
    for number, (scale, zero) in enumerate(zip(scales, zeros, strict=True)):
        data += struct.pack("<ff", scale, zero)
        for first in range(number * block, (number + 1) * block, 32):
            low, high = codes[first : first + 16], codes[first + 16 : first + 32]
            data += (low | high << 4).tobytes()
    expected = np.repeat(scales, block) * (codes - np.repeat(zeros, block))
    np.testing.assert_array_equal(_numbers(name, data, block * 2), expected)


@pytest.mark.parametrize("name", ["FP8", "FP8_128"])
def test_fp8_codes_are_e4m3(name):
    block, codes = FORMATS[name].block or 256, np.arange(256, dtype=np.uint8)
    scales = np.float32([0.03, -7.0])[: 256 // block]
    data = b"".join(
        struct.pack("<f", scale) + codes[first : first + block].tobytes()
        for scale, first in zip(scales, range(0, 256, block), strict=True)
    )
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7).astype(float)
    magnitude = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa / 512)
    magnitude[codes & 127 == 127] = np.nan
    values = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    np.testing.assert_array_equal(_numbers(name, data, 256), values * np.repeat(scales, block))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", _ROUNDED)
def test_rows_are_rounded_to_the_nearest_codes(name, dtype):
    weight_format, columns = FORMATS[name], 384
    factors = torch.tensor([1, 1e-30, 50, 0, 3])[:, None]
    matrix = (normal(5, columns, seed=1) * factors).to(dtype)
    rows = kernels.quantize_rows(matrix, weight_format)
    assert rows.data.shape == (5, weight_format.row_bytes(columns))
    numbers = kernels.dequantize(rows, torch.float32)
    block = weight_format.block or columns
    groups, rounded = (values.float().unflatten(1, (-1, block)) for values in (matrix, numbers))
    levels = 127 if name.startswith("INT8") else 8
    steps = groups.abs().amax(2, keepdim=True) / levels
    # The largest 4-bit code is 7: numbers near the other end of the range are half a step further.
    allowed = torch.where(groups.abs() > (levels - 1) * steps, 1.0, 0.5) * steps
    assert ((groups - rounded).abs() <= allowed * (1 + 1e-5)).all()
    largest = groups.abs().amax(2)
    assert torch.allclose(rounded.abs().amax(2), largest, rtol=1e-6)
    again = kernels.quantize_rows(numbers, weight_format)
    assert torch.allclose(kernels.dequantize(again, torch.float32), numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["INT8_32", "INT4_32"])
def test_blocks_with_infinity_or_nan_become_nan(name):
    matrix = normal(1, 96, seed=2)
    matrix[0, 3], matrix[0, 40] = torch.inf, torch.nan
    rows = kernels.quantize_rows(matrix, FORMATS[name])
    is_nan = kernels.dequantize(rows, torch.float32).isnan()
    assert is_nan[0, :64].all()
    assert not is_nan[0, 64:].any()


@pytest.mark.parametrize(("name", "columns"), [("INT4_32", 40), ("INT8_128", 64), ("FP8", 32)])
def test_other_formats_and_widths_are_refused(name, columns):
    with pytest.raises(ValueError, match=f"{columns} columns cannot be rounded to {name}"):
        kernels.quantize_rows(torch.ones(2, columns), FORMATS[name])


def _numbers(name, data, num_columns):
    data = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1)
    return kernels.dequantize(BlockRows(FORMATS[name], data, num_columns), torch.float32)[0].numpy()
