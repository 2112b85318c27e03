"""Linear layers, gated ones and look-ups, against products in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import Activation, WeightUse, reference
from tests.support.kernel_checks import (
    DTYPES,
    IS_NATIVE,
    assert_within,
    eps_of,
    filled_weight,
    gated_values,
    native_only,
    normal,
    product_bound,
)
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Rows, columns, outputs: one of each, primes, whole panels and one more or less.
SHAPES = [
    (1, 1, 1),
    (1, 5, 33),
    (3, 31, 1),
    (2, 33, 31),
    (5, 100, 5),
    (1, 2817, 100),
    (4, 64, 2817),
    (33, 31, 32),
    (100, 64, 65),
]


def check_linear(rows, columns, outputs, dtype, *, bias, residual, out_dtype, seed=0):
    hidden = normal(rows, columns, dtype=dtype, seed=seed)
    matrix = normal(outputs, columns, dtype=dtype, seed=seed + 1)
    added = normal(outputs, dtype=dtype, seed=seed + 2) if bias else None
    skipped = normal(rows, outputs, dtype=dtype, seed=seed + 3) if residual else None
    out = kernels.linear(hidden, filled_weight(matrix), added, skipped, out_dtype=out_dtype)
    expected = hidden.double() @ matrix.double().T + (0 if added is None else added.double())
    # Torch rounds the product before the residual is added, and before it is widened.
    rounded = expected.abs()
    if skipped is not None:
        expected = expected + skipped.double()
        rounded = rounded + expected.abs() + skipped.abs()
    assert out.dtype == (out_dtype or dtype)
    assert out.shape == expected.shape
    eps = eps_of(out.dtype if IS_NATIVE else dtype)
    assert_within(out, expected, product_bound(hidden, matrix) + eps * rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape, dtype):
    check_linear(*shape, dtype, bias=False, residual=False, out_dtype=None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", range(1, 31))
def test_linear_of_every_number_of_rows_in_a_tile(rows, dtype):
    check_linear(rows, 37, 41, dtype, bias=True, residual=True, out_dtype=None)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 130),
    outputs=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    residual=st.booleans(),
    out_dtype=st.sampled_from([None, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_linear_of_any_shape(rows, columns, outputs, **options):
    check_linear(rows, columns, outputs, **options)


@pytest.mark.parametrize(
    ("activation", "cap", "extras", "shape", "dtype"),
    pairs(
        [None, *Activation],
        [None, 3.0],
        ["", "bias, residual", "wide"],
        [(1, 5, 33), (30, 64, 50)],
        DTYPES,
    ),
)
def test_activations_scales_and_caps(activation, cap, extras, shape, dtype):
    rows, columns, outputs = shape
    hidden = normal(rows, columns, dtype=dtype)
    matrix = normal(outputs, columns, dtype=dtype, seed=1)
    bias = normal(outputs, dtype=dtype, seed=2) if "bias" in extras else None
    residual = normal(rows, outputs, dtype=dtype, seed=3) if "residual" in extras else None
    out_dtype = torch.float32 if "wide" in extras else dtype
    sums = hidden.double() @ matrix.double().T + (0 if bias is None else bias.double())
    expected = sums if activation is None else reference.activate(sums, activation)
    expected = expected * 1.5
    expected = expected if cap is None else cap * torch.tanh(expected / cap)
    out = kernels.linear(
        hidden,
        filled_weight(matrix),
        bias,
        None if residual is None else residual.clone(),
        out_dtype=out_dtype,
        activation=activation,
        scale=1.5,
        cap=cap,
    )
    assert out.dtype == out_dtype
    # Slopes are below 1.2 times the scale. Sums may be rounded before, torch rounds each result.
    eps = eps_of(dtype if activation or not IS_NATIVE else out_dtype)
    bound = 1.8 * (product_bound(hidden, matrix) + eps * sums.abs())
    bound += 2 * eps * expected.abs() + 4 * eps_of(torch.float32) * sums.abs()
    if residual is not None:
        expected = expected + residual.double()
        bound += eps * expected.abs()
    assert_within(out, expected, bound)


@native_only("torch's tanh has other errors")
def test_a_cap_keeps_the_digits_of_small_and_large_logits():
    hidden = torch.logspace(-8, 3, 200).unsqueeze(1)
    hidden = torch.cat((hidden, -hidden))
    weight = filled_weight(torch.ones(1, 1))
    out = kernels.linear(hidden, weight, out_dtype=torch.float32, cap=30.0)
    expected = 30 * torch.tanh(hidden.double() / 30)
    assert_within(out, expected, 4 * eps_of(torch.float32) * expected.abs())


@native_only("torch rounds to the type of its operands first")
def test_a_wide_result_of_narrow_operands_is_never_rounded_to_their_type():
    hidden, matrix = normal(3, 64, dtype=torch.bfloat16), normal(50, 64, dtype=torch.bfloat16)
    out = kernels.linear(hidden, filled_weight(matrix), out_dtype=torch.float32)
    assert not torch.equal(out, out.bfloat16().float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_columns_may_be_strided(dtype):
    matrix, residual = normal(45, 30, dtype=dtype), normal(7, 90, dtype=dtype, seed=1)
    weight = filled_weight(matrix)
    wide = normal(7, 100, dtype=dtype, seed=2)
    for hidden in (wide[:, 11:41], wide[::2, 3:33], wide[:, ::3][:, :30], wide.T[:30].T):
        for part in (residual[:, 40:85], residual[:, ::2], residual.T[40:85].T):
            skipped = part[: len(hidden)]
            out = kernels.linear(hidden, weight, None, skipped)
            product = hidden.double() @ matrix.double().T
            rounded = 2 * product.abs() + skipped.abs()
            bound = product_bound(hidden, matrix) + eps_of(dtype) * rounded
            assert_within(out, product + skipped.double(), bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_row_does_not_affect_others(dtype):
    hidden, matrix = normal(26, 50, dtype=dtype), normal(70, 50, dtype=dtype)
    weight = filled_weight(matrix)
    expected = kernels.linear(hidden, weight)
    for row, value in ((0, torch.nan), (13, torch.inf), (25, -torch.inf)):
        spoiled = hidden.clone()
        spoiled[row, 7] = value
        out = kernels.linear(spoiled, weight)
        assert not out[row].isfinite().any()
        others = [i for i in range(26) if i != row]
        assert torch.equal(out[others], expected[others])


def check_gated(rows, columns, outputs, dtype, *, bias, activation=Activation.SILU, seed=0):
    hidden = normal(rows, columns, dtype=dtype, seed=seed)
    matrix = (normal(2 * outputs, columns, seed=seed + 1) * 2 / columns**0.5).to(dtype)
    added = normal(2 * outputs, dtype=dtype, seed=seed + 2) if bias else None
    weight = filled_weight(matrix, WeightUse.GATED_LINEAR)
    out = kernels.linear_gated(hidden, weight, added, activation)
    sums = hidden.double() @ matrix.double().T + (0 if added is None else added.double())
    gate, up = sums.chunk(2, dim=1)
    activated = reference.activate(gate, activation)
    up = gated_values(up, activation)
    expected = activated * up
    # Gate, up, activation and product are each rounded to the type; slopes are below 1.2.
    off = product_bound(hidden, matrix) + eps_of(dtype) * sums.abs()
    off_gate, off_up = off.chunk(2, dim=1)
    bound = 1.2 * off_gate * (up.abs() + off_up)
    bound += activated.abs() * (off_up + 4 * eps_of(dtype) * up.abs())
    bound += 2 * eps_of(torch.float32) * (gate * up).abs()
    if activation is Activation.CLAMPED_SILU:
        bound += 2 * eps_of(dtype) * expected.abs()  # the sum with 1 is rounded too
    assert out.dtype == dtype
    assert_within(out, expected, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 31, 15), (3, 33, 16), (13, 100, 17), (2, 2817, 33), (30, 64, 100)]
)
def test_gated_linear(shape, bias, dtype):
    check_gated(*shape, dtype, bias=bias)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 100),
    outputs=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    activation=st.sampled_from(Activation),
    seed=st.integers(0, 1000),
)
def test_gated_linear_of_any_shape(rows, columns, outputs, **options):
    check_gated(rows, columns, outputs, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero_neither_overflow_nor_vanish(dtype):
    values = torch.tensor([-1e4, -300.0, -100.0, -89.0, -20.0, 0.0, 20.0, 89.0, 300.0, 1e4])
    hidden = values.to(dtype).unsqueeze(1)
    matrix = torch.tensor([[1.0], [0.0]], dtype=dtype)  # gate is the value, up its bias
    weight = filled_weight(matrix, WeightUse.GATED_LINEAR)
    bias = torch.tensor([0.0, 1.0], dtype=dtype)
    out = kernels.linear_gated(hidden, weight, bias, Activation.SILU)
    wide = hidden.double()
    # Results below the smallest normal number may be flushed to zero.
    bound = 3 * eps_of(dtype) * wide.abs() * wide.sigmoid() + 1e-35
    assert_within(out, wide * wide.sigmoid(), bound)


TOKENS = [0, 32, 31, 5, 5, 99, 64, 0, 98, 1, 33]


@pytest.mark.parametrize("use", [WeightUse.LOOKUP, WeightUse.LINEAR])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 31, 64, 100])
def test_embed_gives_rows_bit_for_bit(columns, dtype, use):
    matrix = normal(100, columns, dtype=dtype)
    token_ids = torch.tensor(TOKENS)
    assert torch.equal(kernels.embed(token_ids, filled_weight(matrix, use)), matrix[token_ids])


@pytest.mark.parametrize("use", [WeightUse.LOOKUP, WeightUse.LINEAR])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 31, 64])
def test_embed_scales_rows_and_adds_others_as_torch_does(columns, dtype, use):
    matrix, token_ids = normal(100, columns, dtype=dtype), torch.tensor(TOKENS)
    weight, wide = filled_weight(matrix, use), normal(len(TOKENS), 200, dtype=dtype, seed=1)
    scaled = kernels.embed(token_ids, weight, scale=1.7)
    assert torch.equal(scaled, matrix[token_ids] * 1.7)
    for addend in (wide[:, 40 : 40 + columns], wide[:, ::3][:, :columns]):
        summed = kernels.embed(token_ids, weight, addend=addend)
        assert torch.equal(summed, matrix[token_ids] + addend)
        both = kernels.embed(token_ids, weight, scale=1.7, addend=addend)
        assert torch.equal(both, scaled + addend)


@pytest.mark.parametrize("use", [WeightUse.LOOKUP, WeightUse.LINEAR])
def test_embed_of_no_tokens_and_of_strided_tokens(use):
    matrix = normal(100, 12)
    weight = filled_weight(matrix, use)
    assert kernels.embed(torch.tensor([], dtype=torch.int64), weight).shape == (0, 12)
    token_ids = torch.tensor(TOKENS)[::2]
    assert torch.equal(kernels.embed(token_ids, weight), matrix[token_ids])


@native_only("torch raises an error")
@pytest.mark.parametrize("use", [WeightUse.LOOKUP, WeightUse.LINEAR])
def test_no_memory_beyond_a_table_is_read_for_ids_outside_of_it(use):
    memory = normal(110, 12)
    inside = torch.tensor([3, 99])
    outside = torch.tensor([3, -1, 100, 109, 2**40, -(2**63), 99])
    is_inside = torch.tensor([True, *[False] * 5, True])
    for taken in (
        kernels.embed(outside, filled_weight(memory[:100], use)),
        kernels.take_rows(memory[:100], outside),
    ):
        assert torch.equal(taken[is_inside], memory[inside])
        assert (taken[~is_inside] == 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("rows", [[], [6], [0, 3, 4, 19], TOKENS[:-6]])
def test_rows_are_taken_bit_for_bit_from_any_strides(rows, dtype):
    wide = normal(100, 90, dtype=dtype)
    rows = torch.tensor(rows, dtype=torch.int64)
    for matrix in (wide, wide[:, 7:40], wide[::5, :33], wide[10:, ::3], wide.T, wide[:40, 3:4]):
        rows = rows.clamp(max=len(matrix) - 1)
        taken = kernels.take_rows(matrix, rows)
        assert taken.is_contiguous()
        assert torch.equal(taken, matrix[rows])
        memory = torch.full((2, *taken.shape), torch.nan, dtype=dtype)
        assert kernels.take_rows(matrix, rows, memory[1]).data_ptr() == memory[1].data_ptr()
        assert torch.equal(memory[1], taken)
        assert memory[0].isnan().all()
    apart = torch.tensor(TOKENS)[::2]
    assert torch.equal(kernels.take_rows(wide, apart), wide[apart])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_no_rows(dtype):
    weight = filled_weight(normal(40, 8, dtype=dtype))
    assert kernels.linear(normal(0, 8, dtype=dtype), weight).shape == (0, 40)


@pytest.mark.parametrize("hidden", [normal(2, 9), normal(2, 8, dtype=torch.bfloat16)])
def test_another_width_or_type_than_the_weights_is_refused(hidden):
    with pytest.raises((AssertionError, RuntimeError)):
        kernels.linear(hidden, filled_weight(normal(40, 8)))
