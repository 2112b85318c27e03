"""Linear layers on a GPU, against float64: bias, residual, types and in-place results."""

import pytest
import torch

from kernels import Activation, WeightUse, reference
from kernels.triton import linear
from tests.support.devices import DEVICE, rounding_error
from tests.support.kernel_checks import assert_within, eps_of, normal, product_bound
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 16, 24), (1, 16, 24), (3, 33, 17), (40, 96, 50)]


@pytest.fixture(autouse=True)
def plain_float32_products():
    """Keeps a GPU from computing float32 products with operands of fewer bits (TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(*shape, dtype, seed=0):
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def filled_weight(matrix, use=WeightUse.LINEAR):
    weight = reference.make_weight(*matrix.shape, matrix.dtype, DEVICE, use)
    weight.rows(0, len(matrix)).copy_(matrix)
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_linear(rows, columns, outputs, has_residual, has_bias, dtype):
    hidden = on_device(rows, columns, dtype=dtype)
    matrix = on_device(outputs, columns, dtype=dtype, seed=1)
    bias = on_device(outputs, dtype=dtype, seed=2) if has_bias else None
    residual = on_device(rows, outputs, dtype=dtype, seed=3) if has_residual else None
    expected, bound = hidden.double() @ matrix.double().T, product_bound(hidden, matrix)
    addends = [addend.double() for addend in (bias, residual) if addend is not None]
    sizes = expected.abs()
    for addend in addends:
        expected = expected + addend
        sizes = sizes + addend.abs()
    # A rounding per addend, of sums that may be larger than the result.
    bound = bound + (1 + len(addends)) * eps_of(dtype) / 2 * sizes
    out = linear.linear(hidden, filled_weight(matrix), bias, residual)
    assert out.dtype == dtype
    assert_within(out, expected, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_in_another_type(dtype):
    """A step whose chunks draw nothing asks for no logits."""
    weight = filled_weight(on_device(24, 16, dtype=dtype))
    hidden = on_device(0, 16, dtype=dtype)
    out = linear.linear(hidden, weight, out_dtype=torch.float32)
    assert (out.shape, out.dtype) == ((0, 24), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_in_place_and_rounded_once(dtype):
    hidden = on_device(5, 32, dtype=dtype)
    matrix = on_device(8, 32, dtype=dtype, seed=1)
    residual = on_device(5, 8, dtype=dtype, seed=2)
    expected = residual.double() + hidden.double() @ matrix.double().T
    bound = product_bound(hidden, matrix) + eps_of(dtype) / 2 * expected.abs()
    out = linear.linear(hidden, filled_weight(matrix), residual=residual)
    assert out.data_ptr() == residual.data_ptr()
    # Besides the product's error, the sum has one rounding of float32.
    assert_within(out, expected, 1.01 * bound + eps_of(torch.float32) * expected.abs())


@pytest.mark.parametrize(
    ("activation", "cap", "extras", "dtype"),
    pairs([None, *Activation], [None, 3.0], ["", "bias, residual", "wide"], DTYPES),
)
def test_activations_scales_and_caps(activation, cap, extras, dtype):
    hidden = on_device(5, 33, dtype=dtype)
    matrix = on_device(17, 33, dtype=dtype, seed=1) / 2
    bias = on_device(17, dtype=dtype, seed=2) if "bias" in extras else None
    residual = on_device(5, 17, dtype=dtype, seed=3) if "residual" in extras else None
    sums = hidden.double() @ matrix.double().T + (0 if bias is None else bias.double())
    expected = sums if activation is None else reference.activate(sums, activation)
    expected = expected * 1.5
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    bound = 1.8 * (product_bound(hidden, matrix) + 2 * rounding_error(dtype) * (1 + sums.abs()))
    if residual is not None:
        bound += 2 * rounding_error(dtype) * expected.abs()
        expected = expected + residual.double()
    out_dtype = torch.float32 if "wide" in extras else dtype
    out = linear.linear(
        hidden,
        filled_weight(matrix),
        bias,
        residual,
        out_dtype=out_dtype,
        activation=activation,
        scale=1.5,
        cap=cap,
    )
    assert out.dtype == out_dtype
    assert_within(out, expected, bound + 2 * rounding_error(dtype) * expected.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", [(), ("bias",), ("bias", "residual")])
def test_logits_are_never_rounded_to_the_type_of_the_weights(extras, dtype):
    hidden = on_device(4, 48, dtype=dtype)
    matrix = on_device(70, 48, dtype=dtype, seed=1)
    bias = on_device(70, dtype=dtype, seed=2) if "bias" in extras else None
    residual = on_device(4, 70, dtype=dtype, seed=3) if "residual" in extras else None
    expected = hidden.double() @ matrix.double().T
    for addend in (bias, residual):
        expected = expected if addend is None else expected + addend.double()
    out = linear.linear(hidden, filled_weight(matrix), bias, residual, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    bound = 2 * product_bound(hidden, matrix) + 4 * eps_of(torch.float32) * (1 + expected.abs())
    assert_within(out, expected, bound)


@pytest.mark.parametrize(
    ("dtype", "rows", "options"),
    pairs(DTYPES, [0, 4], [{}, {"scale": 0.5}, {"cap": 3.0}]),
)
def test_logits_are_written_in_place(dtype, rows, options):
    hidden = on_device(rows, 48, dtype=dtype)
    weight = filled_weight(on_device(70, 48, dtype=dtype, seed=1))
    out = torch.full((rows, 70), torch.nan, device=DEVICE)
    expected = linear.linear(hidden, weight, out_dtype=torch.float32, **options)
    written = linear.linear(hidden, weight, out_dtype=torch.float32, out=out, **options)
    assert written.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_gated(rows, columns, outputs, has_bias, dtype):
    hidden = on_device(rows, columns, dtype=dtype)
    matrix = on_device(2 * outputs, columns, dtype=dtype, seed=1) / columns**0.5
    bias = on_device(2 * outputs, dtype=dtype, seed=2) if has_bias else None
    weight = filled_weight(matrix, WeightUse.GATED_LINEAR)
    out = linear.linear_gated(hidden, weight, bias, Activation.SILU)
    wide = hidden.double() @ matrix.double().T + (0 if bias is None else bias.double())
    gate, up = wide.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    error = product_bound(hidden, matrix) + (1 + has_bias) * eps_of(dtype) / 2 * wide.abs()
    gate_error, up_error = error.chunk(2, dim=-1)
    # The slope of the gate is 1.1 at most.
    bound = 1.1 * gate_error * (up.abs() + up_error) + gate.abs() * up_error
    bound = bound + (rounding_error(dtype) + 8 * eps_of(torch.float32)) * expected.abs()
    assert out.dtype == dtype
    assert out.shape == (rows, outputs)
    assert_within(out, expected, bound + 1e-7)


def test_embedding_rows_and_rows_of_a_matrix():
    matrix = on_device(9, 6, dtype=torch.bfloat16)
    ids = torch.tensor([8, 0, 0, 3], device=DEVICE)
    assert torch.equal(reference.embed(ids, filled_weight(matrix, WeightUse.LOOKUP)), matrix[ids])
    assert torch.equal(reference.take_rows(matrix[:, 1:4], ids), matrix[ids, 1:4])
