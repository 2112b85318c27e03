"""Products of few rows in Triton, against float64: norms, activations, gates, residuals, and what
they are not used for.
"""

from dataclasses import replace

import pytest
import torch

from kernels import Activation, InputNorm, NormKind, WeightUse, reference
from kernels.triton import few_rows, launch, linear
from kernels.triton.launch import FewRowLaunch, Rows, replaced_launch_table
from tests.support.devices import DEVICE, rounding_error
from tests.support.kernel_checks import assert_within, eps_of, gated_values, normal, product_bound
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory", "small_programs")

DTYPES = [torch.bfloat16, torch.float16]
# (rows, columns, outputs): one tile, parts of tiles, several tiles.
SHAPES = [(1, 16, 24), (3, 33, 17), (16, 64, 32), (5, 200, 50), (2, 1, 1)]
NORMS = [None, *NormKind]


@pytest.fixture(scope="module")
def small_programs():
    """Turns the products on, with programs of 16 outputs and steps of 32 inputs."""
    table = launch.launch_table(DEVICE)
    rows = Rows((FewRowLaunch(block_n=16, block_k=32, num_warps=1, num_stages=2),))
    mechanisms = replace(table.mechanisms, few_row_products=True)
    with replaced_launch_table(replace(table, few_row_linear=rows, mechanisms=mechanisms)):
        yield


@pytest.fixture
def products(monkeypatch):
    """The number of products of few rows so far."""
    seen, compute = [], few_rows.few_rows_linear

    def count(*args):
        seen.append(args)
        return compute(*args)

    monkeypatch.setattr(linear, "few_rows_linear", count)
    return seen


def on_device(*shape, dtype, seed=0):
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def filled_weight(matrix, use=WeightUse.LINEAR):
    weight = reference.make_weight(*matrix.shape, matrix.dtype, DEVICE, use)
    weight.rows(0, len(matrix)).copy_(matrix)
    return weight


def norm_of(columns, dtype, kind):
    if kind is None:
        return None
    return InputNorm(on_device(columns, dtype=dtype, seed=9) / 2 + 1, 1e-5, kind)


def normed(hidden, norm):
    """Returns the norm of float64 inputs, without roundings."""
    wide = hidden.double()
    if norm is None:
        return wide
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    factors = norm.weight.double() + (norm.kind is NormKind.OFFSET)
    return wide * factors


def sums_of(hidden, matrix, norm, dtype):
    """Returns exact sums, and how far those of a kernel may be from them."""
    inputs, numbers = normed(hidden, norm), matrix.double()
    bound = product_bound(inputs, matrix)
    if norm is not None:  # inputs are rounded up to twice, and their mean is one of float32
        bound = bound + 2.1 * rounding_error(dtype) * (inputs.abs() @ numbers.abs().T)
    return inputs @ numbers.T, bound


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("shape", "kind", "extras", "dtype"),
    pairs(SHAPES, NORMS, ["", "bias", "residual", "bias, residual"], DTYPES),
)
def test_linear(shape, kind, extras, dtype, products):
    rows, columns, outputs = shape
    hidden = on_device(rows, columns, dtype=dtype)
    matrix, norm = on_device(outputs, columns, dtype=dtype, seed=1), norm_of(columns, dtype, kind)
    bias = on_device(outputs, dtype=dtype, seed=2) if "bias" in extras else None
    residual = on_device(rows, outputs, dtype=dtype, seed=3) if "residual" in extras else None
    expected, bound = sums_of(hidden, matrix, norm, dtype)
    addends = [addend.double() for addend in (bias, residual) if addend is not None]
    expected = (expected + (0 if bias is None else bias.double())) * 0.5
    expected = expected if residual is None else expected + residual.double()
    float32_error = eps_of(torch.float32) * sum(addend.abs() for addend in addends)
    bound = bound + float32_error + rounding_error(dtype) * expected.abs()
    place = None if residual is None else residual.data_ptr()
    out = linear.linear(hidden, filled_weight(matrix), bias, residual, scale=0.5, norm=norm)
    assert out.dtype == dtype
    assert place in (None, out.data_ptr())
    assert_within(out, expected, 1.01 * bound + 1e-6)
    assert len(products) == 1


@pytest.mark.parametrize(
    ("activation", "has_bias", "is_gated", "dtype"),
    pairs([*Activation], [False, True], [False, True], DTYPES),
)
def test_activations_and_gates(activation, has_bias, is_gated, dtype, products):
    rows, columns, outputs = 5, 70, 19
    hidden, norm = on_device(rows, columns, dtype=dtype), norm_of(columns, dtype, NormKind.ROUNDED)
    num_rows = 2 * outputs if is_gated else outputs
    matrix = on_device(num_rows, columns, dtype=dtype, seed=1) / columns**0.5
    bias = on_device(num_rows, dtype=dtype, seed=2) if has_bias else None
    sums, bound = sums_of(hidden, matrix, norm, dtype)
    sums = sums + (0 if bias is None else bias.double())
    bound = 1.2 * (bound + rounding_error(dtype) * sums.abs())  # slopes are 1.13 at most
    use = WeightUse.GATED_LINEAR if is_gated else WeightUse.LINEAR
    weight = filled_weight(matrix, use)
    if is_gated:
        gates, values = sums.chunk(2, dim=1)
        gate_bound, value_bound = bound.chunk(2, dim=1)
        values, activated = gated_values(values, activation), reference.activate(gates, activation)
        expected = activated * values
        bound = gate_bound * (values.abs() + value_bound) + activated.abs() * value_bound
        bound = bound + rounding_error(dtype) * activated.abs() * (1 + values.abs())
        out = linear.linear_gated(hidden, weight, bias, activation, norm=norm)
    else:
        expected = reference.activate(sums, activation)
        out = linear.linear(hidden, weight, bias, activation=activation, norm=norm)
    assert_within(out, expected, bound + 2 * rounding_error(dtype) * expected.abs() + 1e-6)
    assert len(products) == 1


def test_inputs_whose_rows_are_apart(products):
    wide = on_device(4, 50, dtype=torch.bfloat16)
    matrix = on_device(20, 30, dtype=torch.bfloat16, seed=1)
    hidden = wide[:, 5:35]
    out = linear.linear(hidden, filled_weight(matrix))
    expected, bound = sums_of(hidden, matrix, None, torch.bfloat16)
    assert_within(out, expected, bound + rounding_error(torch.bfloat16) * expected.abs())
    assert len(products) == 1


@pytest.mark.parametrize("rows", [0, 17])
def test_other_numbers_of_rows_are_left_to_the_library(rows, products):
    hidden = on_device(rows, 30, dtype=torch.bfloat16)
    matrix = on_device(20, 30, dtype=torch.bfloat16, seed=1)
    norm = norm_of(30, torch.bfloat16, NormKind.ROUNDED)
    out = linear.linear(hidden, filled_weight(matrix), norm=norm)
    expected, bound = sums_of(hidden, matrix, norm, torch.bfloat16)
    bound = bound + 2 * rounding_error(torch.bfloat16) * expected.abs()
    assert_within(out, expected, bound)
    assert not products


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"out_dtype": torch.float32}),
    ],
)
def test_other_results_are_left_to_the_library(dtype, options, products):
    hidden, matrix = on_device(3, 30, dtype=dtype), on_device(20, 30, dtype=dtype, seed=1)
    linear.linear(hidden, filled_weight(matrix), **options)
    assert not products


def test_a_norm_of_large_inputs_does_not_overflow():
    """A float16 input times the norm's weight may exceed the largest number."""
    hidden = on_device(3, 40, dtype=torch.float16) * 10_000
    matrix = on_device(20, 40, dtype=torch.float16, seed=1) / 7
    norm = InputNorm(torch.full_like(hidden[0], 30.0), 1e-5, NormKind.ROUNDED)
    out = linear.linear(hidden, filled_weight(matrix), norm=norm)
    expected, bound = sums_of(hidden, matrix, norm, torch.float16)
    assert_within(out, expected, bound + rounding_error(torch.float16) * expected.abs())
