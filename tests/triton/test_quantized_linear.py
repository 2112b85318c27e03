"""Quantized weights on a GPU: numbers, products, experts and look-ups, against float64."""

import pytest
import torch

from kernels import (
    Activation,
    Cut,
    QuantizedForm,
    RoutingRule,
    SegmentedWeight,
    WeightUse,
    dequantize,
)
from kernels.formats import FORMATS
from kernels.triton import experts, linear, quantized, routing
from kernels.triton.scaled_weight import layout_of
from tests.support.devices import DEVICE, IS_CUDA, rounding_error
from tests.support.kernel_checks import assert_within, eps_of, gated_values, normal, product_bound
from tests.support.quantized_rows import random_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = {0: 77, 32: 96, 128: 384, 256: 768}
"""By the columns of a block, some that do not fill the last chunk where that can be."""
needs_float8 = pytest.mark.skipif(
    IS_CUDA and torch.cuda.get_device_capability() < (8, 9), reason="no products of e4m3"
)


def rows_of(name, num_rows=19, seed=3):
    return random_rows(name, num_rows, COLUMNS[FORMATS[name].block], seed=seed)


def weight_of(rows, dtype, use=WeightUse.LINEAR, *, is_exact=True):
    """Returns a weight that holds rows, which lie in memory that was full of other bytes."""
    form = QuantizedForm(rows.format, is_exact)
    weight = quantized.make_weight(*rows.shape, dtype, DEVICE, use, form)
    weight.data.fill_(0xFF)
    weight.rows(0, 5).copy_(rows.take(slice(5)))
    weight.rows(5, len(rows.data) - 5).copy_(rows.take(slice(5, None)))
    return weight


def inputs_of(num_rows, num_columns, dtype):
    """Returns inputs in the columns of a wider matrix."""
    wide = normal(num_rows, num_columns + 3, dtype=dtype, seed=1).to(DEVICE) / 32
    return wide[:, :num_columns]


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_format(name):
    rows = rows_of(name)
    expected = dequantize(rows, torch.float32).to(DEVICE)
    assert torch.equal(quantized.dequantized(weight_of(rows, torch.float32)), expected)
    for dtype in DTYPES[1:]:
        actual = quantized.dequantized(weight_of(rows, dtype))
        bound = rounding_error(dtype) * expected.double().abs() + 1e-7
        assert_within(actual, expected.double(), bound)


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_few_and_of_many_rows(name):
    for dtype, num_rows in zip(DTYPES, (7, 1, quantized.MAX_FEW_ROWS + 1), strict=True):
        weight = weight_of(rows_of(name), dtype)
        hidden = inputs_of(num_rows, weight.num_columns, dtype)
        matrix = quantized.dequantized(weight)
        expected = hidden.double() @ matrix.double().T
        bound = product_bound(hidden, matrix)
        for out_dtype in (dtype, torch.float32):
            out = linear.linear(hidden, weight, out_dtype=out_dtype)
            assert out.dtype == out_dtype
            assert_within(out, expected, bound + eps_of(out_dtype) * expected.abs())


def test_no_rows():
    weight = weight_of(rows_of("Q4_K"), torch.float32)
    assert linear.linear(torch.empty(0, 768, device=DEVICE), weight).shape == (0, 19)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("activation", "cap"), [(None, None), (Activation.SILU, 3.0)])
def test_what_follows_a_product_of_segments(has_bias, activation, cap):
    segments = [weight_of(rows_of(name), torch.float32) for name in ("Q5_0", "INT4_32")]
    dense = quantized.make_weight(4, 96, torch.float32, DEVICE, WeightUse.LINEAR)
    dense.rows(0, 4).copy_(normal(4, 96, seed=5))
    weight = SegmentedWeight(42, 96, WeightUse.LINEAR, (*segments, dense))
    matrix = torch.cat([*map(quantized.dequantized, segments), dense.data]).double()
    hidden, residual = inputs_of(3, 96, torch.float32), normal(3, 42, seed=6).to(DEVICE)
    bias = normal(42, seed=7).to(DEVICE) if has_bias else None
    expected = hidden.double() @ matrix.T + (0 if bias is None else bias.double())
    if activation is not None:
        expected = torch.nn.functional.silu(expected)
    expected = expected * 0.5
    if cap is not None:
        expected = cap * torch.tanh(expected / cap)
    expected += residual.double()
    out = linear.linear(hidden, weight, bias, residual, activation=activation, scale=0.5, cap=cap)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_gated_layer():
    rows = rows_of("Q4_1", num_rows=26)
    weight = weight_of(rows, torch.float32, WeightUse.GATED_LINEAR)
    hidden = inputs_of(4, weight.num_columns, torch.float32)
    gate, up = (hidden.double() @ quantized.dequantized(weight).double().T).chunk(2, dim=1)
    out = linear.linear_gated(hidden, weight, None, Activation.SILU)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "is_gated", "dtype"),
    [
        ("MXFP4", True, torch.float32),
        ("Q6_K", False, torch.float32),
        ("INT4_128", True, torch.bfloat16),
    ],
)
def test_experts(name, is_gated, dtype):
    num_experts, width, weight_format = 5, 7, FORMATS[name]
    num_rows, num_columns = width * (1 + is_gated), COLUMNS[weight_format.block]
    use = WeightUse.GATED_LINEAR if is_gated else WeightUse.LINEAR
    stack = quantized.make_weight_stack(
        num_experts, num_rows, num_columns, dtype, DEVICE, use, QuantizedForm(weight_format, True)
    )
    stack.data.fill_(0xFF)
    for number in range(num_experts):
        blocks = random_rows(name, num_rows, num_columns, seed=number)
        stack.rows(number * num_rows, num_rows).copy_(blocks)
    logits = normal(6, num_experts).to(DEVICE)
    routed = routing.route_experts(logits, RoutingRule(2), Cut.whole(num_experts))
    hidden = inputs_of(6, num_columns, dtype)
    out = experts.expert_linear(hidden, stack, routed, gathers=True)
    for number in range(num_experts):
        slots = slice(*routed.starts[number : number + 2].tolist())
        inputs = hidden[routed.rows[slots].long()].double()
        expected = inputs @ quantized.dequantized(stack.matrix(number)).double().T
        if is_gated:
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * gated_values(up, Activation.SILU)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(
            out[slots].double(), expected, rtol=tolerance, atol=tolerance * 10
        )


def test_look_ups():
    weight = weight_of(rows_of("Q8_0"), torch.float32, WeightUse.LOOKUP)
    matrix = quantized.dequantized(weight)
    ids, addend = torch.tensor([18, 0, 18, 3], device=DEVICE), normal(4, 96, seed=2).to(DEVICE)
    assert torch.equal(quantized.embed(ids, weight), matrix[ids])
    both = quantized.embed(ids, weight, scale=0.5, addend=addend)
    torch.testing.assert_close(both, matrix[ids] * 0.5 + addend)
    part = quantized.embed_part(ids, weight, 2)
    assert torch.equal(part, torch.stack([matrix[16], 0 * matrix[0], matrix[16], matrix[1]]))


@needs_float8
@pytest.mark.parametrize(("num_rows", "num_columns"), [(32, 96), (19, 77)])
def test_products_of_8_bit_floats(num_rows, num_columns):
    """Also where cuBLAS has none, for sizes that are no multiples of 16."""
    rows = random_rows("FP8", num_rows, num_columns, seed=1)
    weight = weight_of(rows, torch.bfloat16, is_exact=False)
    hidden = inputs_of(5, num_columns, torch.bfloat16)
    hidden[2] = 0
    matrix = dequantize(rows, torch.float32).double().to(DEVICE)
    # e4m3 has three bits of mantissa; below a scale's 448 * 2**-15 its steps are equal.
    steps = hidden.double().abs() / 16 + hidden.double().abs().amax(1, keepdim=True) * 2.0**-18
    expected = hidden.double() @ matrix.T
    bound = steps @ matrix.abs().T + product_bound(hidden, matrix) + 0.02 * expected.abs()
    out = linear.linear(hidden, weight)
    assert out.dtype == torch.bfloat16
    assert_within(out, expected, bound)
    assert not (out[2] != 0).any()


def test_rows_of_another_format_are_refused():
    weight = quantized.make_weight(
        2, 96, torch.float32, DEVICE, WeightUse.LINEAR, QuantizedForm(FORMATS["Q8_0"], True)
    )
    with pytest.raises(ValueError, match="Q4_0, not Q8_0"):
        weight.rows(0, 2).copy_(random_rows("Q4_0", 2, 96))
    with pytest.raises(ValueError, match="shape"):
        weight.rows(0, 1).copy_(random_rows("Q8_0", 2, 96))


def test_rows_take_the_bits_of_their_format_and_scales():
    bits = {
        name: layout_of(FORMATS[name], 4096).row_bytes * 8 / 4096
        for name in ("Q4_0", "Q4_K", "INT4_128", "MXFP4", "Q8_0", "Q6_K", "FP8")
    }
    assert bits == pytest.approx(
        {
            "Q4_0": 6,
            "Q4_K": 6,
            "INT4_128": 4.5,
            "MXFP4": 5,
            "Q8_0": 9,
            "Q6_K": 10,
            "FP8": 8,
        },
        abs=0.05,
    )
