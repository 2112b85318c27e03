"""Products of weights in storage formats with activations that are rounded to int8."""

import pytest
import torch

import kernels
from kernels import Activation, Cut, QuantizedForm, RoutingRule, WeightUse
from kernels.formats import FORMATS
from kernels.library import commands
from tests.support.kernel_checks import CPU, DTYPES, assert_within, normal, on_threads
from tests.support.quantized_rows import random_rows

pytestmark = [
    pytest.mark.skipif(commands.library() is None, reason="no native kernels"),
    pytest.mark.usefixtures("poisoned_memory"),
]
FAST = [name for name in FORMATS if not name.startswith("FP8")]
KINDS = ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "MXFP4", "INT8", "INT4_32"]
"""One format of each kind of codes and scales."""
CODE_BYTES = {
    **dict.fromkeys(["Q8_0", "Q4_0", "Q5_0"], slice(2, None)),
    **dict.fromkeys(["Q4_1", "Q5_1", "INT8", "INT8_32", "INT8_128"], slice(4, None)),
    **dict.fromkeys(["INT4_32", "INT4_128"], slice(8, None)),
    **dict.fromkeys(["Q4_K", "Q5_K"], slice(16, None)),
    "Q6_K": slice(0, 192),
    "MXFP4": slice(1, None),
}
"""The bytes of a block that are codes."""
EPS = torch.finfo(torch.float32).eps
COLUMNS = [32, 256, 288, 640]


def columns_for(name, num_columns):
    """Returns the nearest number of columns of whole blocks, at least one."""
    block = FORMATS[name].block or 1
    return max(1, num_columns // block) * block


def fast_weight(rows, dtype=torch.float32, use=WeightUse.LINEAR):
    """Returns a weight that holds rows, for products of integers."""
    weight = kernels.make_weight(*rows.shape, dtype, CPU, use, QuantizedForm(rows.format, False))
    weight.data.fill_(0xFF)
    num_parts = 2 if use is WeightUse.GATED_LINEAR else 1
    count = len(rows.data) // num_parts
    for part in range(num_parts):
        some = slice(part * count, (part + 1) * count)
        weight.rows(some.start, count).copy_(rows.take(some))
    return weight


def rounded(hidden, run):
    """Returns activations as products of integers see them, and half the step of their rounding.

    Args:
        hidden: the activations.
        run: number of columns that are rounded with one scale.
    """
    size = hidden.shape[1]
    padded = torch.nn.functional.pad(hidden.float(), (0, -size % run))
    blocks = padded.view(len(hidden), -1, run)
    scales = blocks.abs().amax(2, keepdim=True) / 127
    codes = (blocks.double() * (1 / scales).nan_to_num(0, posinf=0).double()).round()
    values = (codes * scales.double()).flatten(1)[:, :size]
    return values, (scales / 2).expand_as(blocks).flatten(1)[:, :size].double()


def magnitudes(matrix):
    """Returns the largest magnitude of each element's block of 32: a bound of its summands."""
    size = matrix.shape[1]
    padded = torch.nn.functional.pad(matrix.double().abs(), (0, -size % 32))
    blocks = padded.view(len(matrix), -1, 32)
    return blocks.amax(2, keepdim=True).expand_as(blocks).flatten(1)[:, :size]


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("name", FAST)
def test_products_are_as_near_as_int8_activations_allow(name, case):
    num_columns = columns_for(name, COLUMNS[case]) + (13 if name == "INT8" else 0)
    outputs = [1, 33, 70, 32][case]
    rows = random_rows(name, outputs, num_columns, seed=case)
    matrix = kernels.dequantize(rows, torch.float32).double()
    hidden = normal([5, 64, 3, 17][case], num_columns, seed=case + 1)
    actual = kernels.linear(hidden, fast_weight(rows))
    values, steps = rounded(hidden, 32 if name in ("Q4_K", "Q5_K") else 16)
    float_error = (4 + num_columns / 16) * EPS * (values.abs() @ (4 * magnitudes(matrix)).T)
    assert_within(actual, values @ matrix.T, float_error)
    assert_within(actual, hidden.double() @ matrix.T, steps @ matrix.abs().T + float_error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_results_are_finished_without_rounding_in_between(name, dtype):
    rows = random_rows(name, 37, 256)
    rows = type(rows)(rows.format, rows.data.repeat(2, 1), rows.num_columns)
    hidden, bias = normal(6, 256, dtype=dtype), normal(74, dtype=dtype)
    residual = normal(6, 74, dtype=dtype, seed=2)
    weight = fast_weight(rows, dtype)
    plain = kernels.linear(hidden, weight, out_dtype=torch.float32)
    options = {"activation": Activation.SILU, "scale": 0.5, "cap": 30.0}
    actual = kernels.linear(hidden, weight, bias, residual, **options)
    inner = torch.nn.functional.silu(plain + bias.float()) * 0.5
    expected = 30 * torch.tanh(inner / 30) + residual.float()
    assert_within(actual, expected.double(), 4e-6 + expected.abs() * 2 * torch.finfo(dtype).eps)

    gated = fast_weight(rows, dtype, WeightUse.GATED_LINEAR)
    halves = kernels.linear_gated(hidden, gated, bias, Activation.RELU)
    gate, up = (plain + bias.float()).chunk(2, 1)
    assert torch.equal(halves, (torch.relu(gate) * up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAST)
def test_a_rows_bits_depend_on_the_row_alone(name, dtype):
    """Few rows unpack codes in registers; many rows multiply codes that were unpacked before."""
    rows = random_rows(name, 70, columns_for(name, 640))
    weight = fast_weight(rows, dtype)
    hidden = normal(150, rows.num_columns, dtype=dtype)
    expected = torch.cat([kernels.linear(row, weight) for row in hidden.split(1)])
    assert not expected.isnan().any()
    for count in (2, 3, 4, 5, 6, 7, 17, 64, 150):
        for actual in on_threads(
            [1, 2], lambda count=count: kernels.linear(hidden[:count], weight)
        ):
            assert torch.equal(actual, expected[:count])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", FAST)
def test_largest_codes_do_not_overflow(name, sign):
    """The largest magnitudes of codes and activations: sums of products that must fit an int16."""
    rows = random_rows(name, 32, columns_for(name, 256))
    weight_format = rows.format
    blocks = rows.data.view(-1, weight_format.row_bytes(weight_format.block or rows.num_columns))
    blocks[:, CODE_BYTES[name]] = 0x77 if name == "MXFP4" else 0x80 if "8" in name else 0xFF
    matrix = kernels.dequantize(rows, torch.float32).double()
    hidden = torch.full((40, rows.num_columns), 127.0 * sign)
    expected = hidden.double() @ matrix.T
    for some in (hidden, hidden[:3]):
        bound = 64 * EPS * (some.double().abs() @ (4 * magnitudes(matrix)).T)
        assert_within(kernels.linear(some, fast_weight(rows)), expected[: len(some)], bound)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", KINDS)
def test_only_rows_that_are_not_finite_give_nan(name, value):
    rows = random_rows(name, 33, 256)
    weight, hidden = fast_weight(rows), normal(20, 256)
    expected = kernels.linear(hidden, weight)
    for count in (20, 3):
        damaged = hidden[:count].clone()
        damaged[1, 77] = value
        actual = kernels.linear(damaged, weight)
        assert actual[1].isnan().all()
        others = [i for i in range(count) if i != 1]
        assert torch.equal(actual[others], expected[others])


def test_tiny_and_zero_rows():
    rows = random_rows("Q8_0", 33, 64)
    hidden = torch.zeros(3, 64)
    hidden[1] = 1e-40
    hidden[2, 0], hidden[2, 40] = 3e38, 1e-36
    matrix = kernels.dequantize(rows, torch.float32).double()
    actual = kernels.linear(hidden, fast_weight(rows))
    assert not actual[:2].any()
    expected = hidden[2:].double() @ matrix.T
    is_finite = expected.abs() < 3e38
    assert_within(actual[2:][is_finite], expected[is_finite], expected[is_finite].abs() * 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "MXFP4"])
def test_experts_have_the_bits_of_layers(name, is_gated, dtype):
    num_experts, width = 5, 38
    use = WeightUse.GATED_LINEAR if is_gated else WeightUse.LINEAR
    rows = random_rows(name, num_experts * width, 256)
    form = QuantizedForm(rows.format, False)
    stack = kernels.make_weight_stack(num_experts, width, 256, dtype, CPU, use, form)
    step = width // 2 if is_gated else width
    for first in range(0, num_experts * width, step):
        stack.rows(first, step).copy_(rows.take(slice(first, first + step)))
    hidden = normal(40, 256, dtype=dtype)
    routing = kernels.route_experts(normal(40, num_experts), RoutingRule(2), Cut.whole(num_experts))
    actual = kernels.expert_linear(hidden, stack, routing, gathers=True)
    for expert in range(num_experts):
        some = slice(expert * width, (expert + 1) * width)
        weight = fast_weight(rows.take(some), dtype, use)
        first, end = routing.starts[expert : expert + 2].tolist()
        inputs = hidden[routing.rows[first:end].long()]
        if is_gated:
            expected = kernels.linear_gated(inputs, weight, None, Activation.SILU)
        else:
            expected = kernels.linear(inputs, weight)
        assert torch.equal(actual[first:end], expected)
