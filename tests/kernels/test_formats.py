"""Storage formats in the library: panels, decoding, and products like those of a dense weight."""

import itertools

import gguf
import numpy as np
import pytest
import torch

import kernels
from kernels import Activation, Cut, QuantizedForm, RoutingRule, WeightUse
from kernels.formats import FORMATS
from kernels.library import commands
from tests.support.kernel_checks import CPU, DTYPES, filled_weight, normal, on_threads
from tests.support.quantized_rows import GGML_TYPES, random_rows

LIBRARY = commands.library()
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="no native kernels"),
    pytest.mark.usefixtures("poisoned_memory"),
]
SCALES_OF_SUPER_BLOCKS = {"Q4_K": 4736 / 4608, "Q5_K": 5760 / 5632}
"""Bytes of panels by bytes of blocks, of formats whose panels have 8 bits for scales of 6."""
UNUSED = 0xFF
"""Fills panels before rows are packed."""
KINDS = ["Q8_0", "Q4_1", "Q5_0", "Q5_K", "Q6_K", "MXFP4", "INT8", "INT4_128", "FP8"]
"""One format of each kind of codes and scales."""


def decoded(rows):
    """Returns the numbers of rows as the library decodes them."""
    out = torch.empty(rows.shape)
    data = rows.data
    arguments = data.data_ptr(), data.stride(0), *rows.shape, out.data_ptr()
    LIBRARY.decode_rows(rows.format.code, *arguments)
    return out


def packed(rows, dtype=torch.float32, use=WeightUse.LINEAR, parts=()):
    """Returns a weight that holds rows, of which parts between boundaries are packed last first."""
    weight = kernels.make_weight(*rows.shape, dtype, CPU, use, QuantizedForm(rows.format, True))
    weight.data.fill_(UNUSED)
    edges = [0, *parts, len(rows.data)]
    for first, end in reversed([*itertools.pairwise(edges)]):
        weight.rows(first, end - first).copy_(rows.take(slice(first, end)))
    return weight


def bits(numbers):
    """Returns the bits of float32 numbers, with one pattern for all that are NaN."""
    return torch.where(numbers.isnan(), torch.nan, numbers).view(torch.int32)


@pytest.mark.parametrize("name", FORMATS)
def test_panels_are_as_large_as_blocks(name):
    weight_format = FORMATS[name]
    expected = 32 * weight_format.row_bytes(512) * SCALES_OF_SUPER_BLOCKS.get(name, 1)
    for num_rows, num_panels in [(1, 1), (32, 1), (33, 2), (70, 3)]:
        num_bytes = LIBRARY.quantized_bytes(weight_format.code, num_rows, 512)
        assert num_bytes == num_panels * expected
    # Squares are whole, and panels begin at whole cache lines.
    if not weight_format.block:
        assert LIBRARY.quantized_bytes(weight_format.code, 1, 33) == 128 + 2 * 1024
    assert LIBRARY.quantized_bytes(FORMATS["MXFP4"].code, 64, 32) == 2 * (32 + 512 + 32)


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_rows_have_the_bits_of_the_reference(name):
    num_columns = 512 if FORMATS[name].block else 45
    for num_rows in (1, 3, 70):
        rows = random_rows(name, num_rows, num_columns, seed=num_rows, any_scale=True)
        numbers = decoded(rows)
        assert torch.equal(bits(numbers), bits(kernels.dequantize(rows, torch.float32)))
        if name in GGML_TYPES:
            with np.errstate(all="ignore"):
                data, kind = rows.data.numpy(), gguf.GGMLQuantizationType(GGML_TYPES[name])
                expected = torch.from_numpy(gguf.dequantize(data, kind))
            assert torch.equal(bits(numbers), bits(expected))


@pytest.mark.parametrize("exponent", [0, 1, 2, 127, 254])
def test_extreme_exponents_have_the_bits_of_the_reference(exponent):
    rows = random_rows("MXFP4", 3, 64)
    rows.data.view(3, 2, 17)[:, :, 0] = exponent
    assert torch.equal(bits(decoded(rows)), bits(kernels.dequantize(rows, torch.float32)))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_panels_and_of_blocks_are_looked_up(name):
    num_columns = 256 if FORMATS[name].block else 33
    rows = random_rows(name, 70, num_columns)
    expected = kernels.dequantize(rows, torch.float32)
    panels = packed(rows, parts=(1, 31, 33, 66))
    form = QuantizedForm(rows.format, True)
    blocks = kernels.make_weight(*rows.shape, torch.float32, CPU, WeightUse.LOOKUP, form)
    blocks.rows(0, 70).copy_(rows)
    ids = torch.cat((torch.arange(70), torch.tensor([-1, 70, 3])))
    for weight in (panels, blocks):
        looked_up = on_threads([1, 2], lambda weight=weight: kernels.embed(ids, weight))
        for numbers in looked_up:
            assert torch.equal(bits(numbers[:70]), bits(expected))
            assert torch.equal(bits(numbers[72]), bits(expected[3]))
            assert not numbers[70:72].any()


@pytest.mark.parametrize("name", KINDS)
def test_gated_rows_lie_in_pairs_of_half_panels(name):
    count = 37
    rows = random_rows(name, 2 * count, 256)
    parts = (5, 16, count, count + 20)
    gated = packed(rows, use=WeightUse.GATED_LINEAR, parts=parts)
    order = torch.arange(2 * count).view(2, count)[:, :32].reshape(2, 2, 16).transpose(0, 1)
    plain = packed(rows.take(order.flatten()))
    assert torch.equal(gated.data[: len(plain.data)], plain.data)


# Rows, outputs, inputs of whole blocks, inputs of others: of blocks of rows, panels and squares.
SHAPES = [(1, 33, 256, 31), (5, 1, 512, 65), (13, 70, 256, 288), (300, 40, 768, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_exact_products_have_the_bits_of_a_dense_weight(name, shape, dtype):
    num_rows, width, *columns = shape
    rows = random_rows(name, width, columns[not FORMATS[name].block])
    matrix = kernels.dequantize(rows, dtype)
    dense, weight = filled_weight(matrix), packed(rows, dtype)
    hidden = normal(num_rows, rows.num_columns, dtype=dtype)
    bias, residual = normal(width, dtype=dtype), normal(num_rows, width, dtype=dtype, seed=1)
    options = {"activation": Activation.SILU, "scale": 0.5, "cap": 30.0}
    expected = kernels.linear(hidden, dense, bias, residual, **options)
    results = on_threads([1, 2], lambda: kernels.linear(hidden, weight, bias, residual, **options))
    assert all(torch.equal(actual, expected) for actual in results)
    expected = kernels.linear(hidden, dense, out_dtype=torch.float32)
    assert torch.equal(kernels.linear(hidden, weight, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_exact_experts_have_the_bits_of_dense_ones(name, is_gated, dtype):
    num_experts, width = 6, 38
    use = WeightUse.GATED_LINEAR if is_gated else WeightUse.LINEAR
    rows = random_rows(name, num_experts * width, 256)
    matrix = kernels.dequantize(rows, dtype)
    dense = kernels.make_weight_stack(num_experts, width, 256, dtype, CPU, use)
    form = QuantizedForm(rows.format, True)
    weight = kernels.make_weight_stack(num_experts, width, 256, dtype, CPU, use, form)
    weight.data.fill_(UNUSED)
    step = width // 2 if is_gated else width
    for first in range(0, num_experts * width, step):
        dense.rows(first, step).copy_(matrix[first : first + step])
        weight.rows(first, step).copy_(rows.take(slice(first, first + step)))
    hidden, bias = normal(17, 256, dtype=dtype), normal(num_experts, width, dtype=dtype)
    routing = kernels.route_experts(normal(17, num_experts), RoutingRule(2), Cut.whole(num_experts))
    expected = kernels.expert_linear(hidden, dense, routing, bias, gathers=True)
    assert torch.equal(kernels.expert_linear(hidden, weight, routing, bias, gathers=True), expected)
