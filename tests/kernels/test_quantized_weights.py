"""Weights in storage formats: filled in parts, looked up, and multiplied as their numbers are."""

import itertools

import pytest
import torch

import kernels
from kernels import Activation, QuantizedForm, SegmentedWeight, WeightUse
from kernels.block_rows import BlockRows
from tests.support.kernel_checks import CPU, DTYPES, filled_weight, normal
from tests.support.quantized_rows import random_rows

SERVED = kernels.served_formats(CPU, torch.float32).exact
NAMES = sorted(each.name for each in SERVED)
pytestmark = pytest.mark.skipif(not SERVED, reason="no kernels for quantized weights")
# One of each kind of scales.
SOME = [name for name in ("Q8_0", "Q5_1", "Q6_K", "INT8", "INT4_128", "FP8") if name in NAMES]


def quantized(rows: BlockRows, dtype, use=WeightUse.LINEAR, parts=(), *, is_exact=True):
    """Returns a weight that holds rows, of which parts between boundaries are filled last first."""
    form = QuantizedForm(rows.format, is_exact)
    weight = kernels.make_weight(*rows.shape, dtype, CPU, use, form)
    half = [len(rows.data) // 2] if use is WeightUse.GATED_LINEAR else []
    edges = sorted({0, *parts, *half, len(rows.data)})
    for first, end in reversed(list(itertools.pairwise(edges))):
        weight.rows(first, end - first).copy_(rows.take(slice(first, end)))
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use", [WeightUse.LINEAR, WeightUse.LOOKUP])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_looked_up_as_the_numbers_of_their_blocks(name, use, dtype):
    rows = random_rows(name, 70, 512)
    weight = quantized(rows, dtype, use, parts=(3, 37, 64))
    numbers = kernels.dequantize(rows, dtype)
    ids = torch.tensor([69, 0, 33, 33, 5])
    assert torch.equal(kernels.embed(ids, weight), numbers[ids])
    addend = normal(5, 512, dtype=dtype)
    scaled = kernels.embed(ids, weight, scale=1.7, addend=addend)
    assert torch.equal(scaled, numbers[ids] * 1.7 + addend)
    part = kernels.embed_part(ids, weight, first_id=4)
    held = torch.where(ids[:, None] >= 4, numbers[(ids - 4).clamp(min=0)].float(), 0.0)
    assert torch.equal(part, held)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_exact_products_have_the_bits_of_the_dense_layer(name, dtype):
    rows = random_rows(name, 70, 512)
    dense = filled_weight(kernels.dequantize(rows, dtype))
    weight = quantized(rows, dtype, parts=(5, 38))
    bias, arguments = normal(70, dtype=dtype), {"activation": Activation.GELU, "cap": 3.0}
    for num_rows in (1, 3, 17):
        hidden = normal(num_rows, 512, dtype=dtype, seed=num_rows)
        residual = normal(num_rows, 70, dtype=dtype, seed=2)
        expected = kernels.linear(hidden, dense, bias, residual, **arguments)
        assert torch.equal(kernels.linear(hidden, weight, bias, residual, **arguments), expected)
        expected = kernels.linear(hidden, dense, out_dtype=torch.float32)
        assert torch.equal(kernels.linear(hidden, weight, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SOME)
def test_exact_gated_products_have_the_bits_of_the_dense_layer(name, dtype):
    rows = random_rows(name, 90, 256)
    gated = WeightUse.GATED_LINEAR
    dense = filled_weight(kernels.dequantize(rows, dtype), gated)
    hidden, bias = normal(5, 256, dtype=dtype), normal(90, dtype=dtype)
    expected = kernels.linear_gated(hidden, dense, bias, Activation.SILU)
    whole = quantized(rows, dtype, gated, parts=(7, 60))
    halves = [quantized(rows.take(part), dtype) for part in (slice(0, 45), slice(45, 90))]
    for weight in (whole, SegmentedWeight(90, 256, gated, tuple(halves))):
        assert torch.equal(kernels.linear_gated(hidden, weight, bias, Activation.SILU), expected)


@pytest.mark.parametrize("name", SOME)
def test_other_rows_are_refused(name):
    weight = quantized(random_rows(name, 33, 256), torch.float32)
    other = "Q4_0" if name != "Q4_0" else "Q8_0"
    with pytest.raises(ValueError, match=f"source is {other}, not {name}"):
        weight.rows(0, 33).copy_(random_rows(other, 33, 256))
    with pytest.raises(ValueError, match="source has shape"):
        weight.rows(0, 32).copy_(random_rows(name, 33, 256))


def test_rows_of_no_whole_blocks_are_a_mistake():
    rows = random_rows("Q8_0", 32, 96)
    with pytest.raises(AssertionError):
        quantized(BlockRows(rows.format, rows.data, 80), torch.float32)
