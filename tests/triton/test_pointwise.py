"""Norms, rotary angles, gates and maxima in Triton, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Activation, NormKind, reference
from kernels.triton import pointwise
from tests.support.devices import DEVICE, IS_CUDA, rounding_error
from tests.support.kernel_checks import (
    assert_within,
    eps_of,
    gated_values,
    normal,
    spacing_at_zero,
)
from tests.support.pairs import pairs

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS32 = eps_of(torch.float32)
FEW = settings(max_examples=15, deadline=None)
INFINITY = math.inf


def on_device(*shape, dtype=torch.float32, seed=0):
    return normal(*shape, dtype=dtype, seed=seed).to(DEVICE)


def check_rms_norm(hidden, weight, eps=1e-5):
    out = pointwise.rms_norm(hidden, weight, eps)
    wide = hidden.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert out.shape == hidden.shape
    assert out.dtype == hidden.dtype
    # Rounded before and after the weight is applied; the mean is a sum in float32.
    num_eps = 4 + hidden.shape[-1] ** 0.5 / 4
    bound = (2 * rounding_error(hidden.dtype) + num_eps * EPS32) * expected.abs()
    # Near zero, rounding errs by the spacing of numbers, which the weight may multiply.
    assert_within(out, expected, bound + 8 * spacing_at_zero(hidden.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 33, 768, 2817])
def test_rms_norm(size, dtype):
    for rows in (1, 5):
        hidden = on_device(rows, size, dtype=dtype) * 3
        check_rms_norm(hidden, on_device(size, dtype=dtype, seed=1))


@FEW
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-2, 1.0, 1e3]),
)
def test_rms_norm_of_any_shape(rows, size, dtype, scale):
    hidden = on_device(rows, size, dtype=dtype) * scale
    check_rms_norm(hidden, on_device(size, dtype=dtype, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_rows_and_of_more_axes(dtype):
    wide, weight = on_device(6, 4, 90, dtype=dtype), on_device(30, dtype=dtype, seed=1)
    for hidden in (wide[:, :, 20:50], wide[::2, 1:3, ::3], wide[:, 0, 3:33], wide[1, :, :30]):
        check_rms_norm(hidden, weight)


@pytest.mark.parametrize(
    ("kind", "has_residual", "dtype"), pairs([*NormKind], [False, True], DTYPES)
)
def test_rms_norms_of_other_kinds_and_with_a_residual(kind, has_residual, dtype):
    """Equals the reference's, but for numbers that another order of the sum rounds otherwise."""
    wide = normal(4, 200, dtype=dtype) * 3
    hidden, weight = wide[:, 13:150], normal(137, dtype=dtype, seed=1)
    residual = normal(4, 300, dtype=dtype, seed=2)[:, ::2][:, :137] if has_residual else None
    expected = reference.rms_norm(hidden, weight, 1e-5, kind=kind, residual=residual)
    moved = None if residual is None else residual.to(DEVICE)
    out = pointwise.rms_norm(
        hidden.to(DEVICE), weight.to(DEVICE), 1e-5, kind=kind, residual=moved
    ).cpu()
    assert out.dtype == dtype
    magnitudes = expected.double().abs() + (0 if residual is None else residual.double().abs())
    assert_within(out, expected.double(), 4 * eps_of(dtype) * magnitudes + 8 * EPS32)
    if dtype == torch.float16 or (IS_CUDA and dtype == torch.bfloat16):
        assert int((out != expected).sum()) <= 5


@pytest.mark.parametrize(("has_weight", "has_residual", "dtype"), pairs([0, 1], [0, 1], DTYPES))
def test_layer_norm(has_weight, has_residual, dtype):
    hidden = (normal(4, 200, dtype=dtype) * 3 + 10)[:, 13:150]
    weight, bias = (normal(137, dtype=dtype, seed=seed) if has_weight else None for seed in (1, 2))
    residual = normal(4, 137, dtype=dtype, seed=3) if has_residual else None
    wide = [None if x is None else x.double() for x in (hidden, weight, bias, residual)]
    expected = reference.layer_norm(*wide[:3], 1e-5, wide[3])
    given = [None if x is None else x.to(DEVICE) for x in (hidden, weight, bias, residual)]
    out = pointwise.layer_norm(*given[:3], 1e-5, given[3])
    assert out.dtype == dtype
    bound = 2 * rounding_error(dtype) * (1 + 2 * expected.abs()) + 200 * EPS32
    assert_within(out, expected, bound)


def test_rms_norm_of_no_rows():
    weight = on_device(8)
    assert pointwise.rms_norm(torch.empty(0, 8, device=DEVICE), weight, 1e-5).shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_rows_that_are_zero_or_not_finite(dtype):
    hidden, weight = on_device(4, 40, dtype=dtype), torch.ones(40, dtype=dtype, device=DEVICE)
    expected = pointwise.rms_norm(hidden, weight, 1e-6)
    hidden[1] = 0
    hidden[2, 39] = math.nan
    out = pointwise.rms_norm(hidden, weight, 1e-6)
    assert torch.equal(out[[0, 3]], expected[[0, 3]])
    assert not out[1].any()
    assert out[2].isnan().all()


def test_rms_norm_of_large_half_precision_values_does_not_overflow():
    hidden = torch.full((1, 8), 6e4, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(8, dtype=torch.float16, device=DEVICE)
    assert torch.equal(pointwise.rms_norm(hidden, weight, 1e-6), torch.ones_like(hidden))


@pytest.mark.parametrize(
    ("size", "activation", "dtype"), pairs([1, 7, 257, 2050], [*Activation], DTYPES)
)
def test_gate_rows(size, activation, dtype):
    both = on_device(3, 2 * size + 6, dtype=dtype)[:, 4 : 4 + 2 * size] * 3
    gates, values = both.chunk(2, dim=-1)
    out = pointwise.gate_rows(values, gates, activation)
    wide = gates.double()
    factors = gated_values(values, activation)
    expected = reference.activate(wide, activation) * factors.double()
    assert out.dtype == dtype
    assert out.is_contiguous()
    # A GPU's exponential of x errs by the rounding of x as a power of 2, and 1 + erf(x) or
    # 1 + tanh(x) by that of 1.
    # The sum of a clamped value and 1 is rounded too.
    num_roundings = 2 if activation is Activation.CLAMPED_SILU else 1
    bound = num_roundings * rounding_error(dtype) + (8 + 2 * wide.abs()) * EPS32
    bound = bound * expected.abs()
    bound = bound + 2 * EPS32 * (wide * factors.double()).abs()
    assert_within(out, expected, bound + spacing_at_zero(dtype))


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH, Activation.GELU])
def test_activations_of_large_gates_are_zero_or_the_gate(activation):
    gates = torch.tensor([[-1e4, -100.0, 100.0, 1e4, math.nan]], device=DEVICE)
    out = pointwise.gate_rows(torch.ones_like(gates), gates, activation)[0]
    assert out[:4].tolist() == [0, pytest.approx(0, abs=1e-30), 100, 1e4]
    assert out[4].isnan()


@pytest.mark.parametrize("amplitude", [1.0, 1.37])
@pytest.mark.parametrize(("num_tokens", "half_dim"), [(1, 1), (5, 17), (33, 64), (100, 40)])
def test_rotary_angles(num_tokens, half_dim, amplitude):
    frequencies = 1e4 ** (-torch.arange(half_dim) / half_dim)
    positions = torch.randint(0, 40_000, (num_tokens,))
    positions[0] = 0
    rotation = pointwise.rotary_angles(positions.to(DEVICE), frequencies.to(DEVICE), amplitude)
    # The angle is rounded to float32, as the models were trained with.
    angles = (positions.unsqueeze(1).float() * frequencies).double()
    bound = torch.tensor(2 * EPS32 * amplitude)
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    assert_within(rotation.cos.cpu(), angles.cos() * amplitude, bound)
    assert_within(rotation.sin.cpu(), angles.sin() * amplitude, bound)


def test_rotary_angles_of_strided_positions():
    frequencies, positions = torch.tensor([1.0, 0.1], device=DEVICE), torch.arange(20).to(DEVICE)
    apart = pointwise.rotary_angles(positions[3::4], frequencies, 1.0)
    dense = pointwise.rotary_angles(positions[3::4].clone(), frequencies, 1.0)
    assert torch.equal(apart.cos, dense.cos)
    assert torch.equal(apart.sin, dense.sin)


def check_maxima(logits):
    """Checks that maxima and their indices equal those of the reference."""
    maxima, indices = pointwise.row_maxima(logits.to(DEVICE))
    assert (maxima.dtype, indices.dtype) == (torch.float32, torch.int64)
    expected, places = reference.row_maxima(logits)
    assert torch.equal(indices.cpu(), places)
    assert torch.equal(maxima.cpu().nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("size", [1, 5, 4095, 4096, 4097, 12289])
@pytest.mark.parametrize("rows", [1, 3])
def test_row_maxima(rows, size):
    check_maxima(normal(rows, size))


def test_row_maxima_of_a_large_vocabulary():
    check_maxima(normal(3, 262_144))


@FEW
@given(st.data())
def test_row_maxima_of_ties_nan_and_infinities(data):
    size = data.draw(st.integers(1, 70))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, INFINITY, -INFINITY])
    if data.draw(st.booleans()):
        value |= st.just(math.nan)
    rows = st.lists(st.lists(value, min_size=size, max_size=size), min_size=1, max_size=4)
    check_maxima(torch.tensor(data.draw(rows)))


@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8192, 9000])
@pytest.mark.parametrize("value", [5.0, INFINITY, math.nan])
def test_the_largest_logit_is_found_at_any_place(place, value):
    logits = normal(2, 9001).clamp(max=4)
    logits[1, place] = value
    check_maxima(logits)


@pytest.mark.parametrize("places", [(0, 8999), (4095, 4096), (100, 101), (5000, 8999)])
def test_the_first_of_equal_maxima_is_found_across_parts(places):
    logits = normal(1, 9000).clamp(max=4)
    logits[0, list(places)] = 5
    check_maxima(logits)
    assert int(pointwise.row_maxima(logits.to(DEVICE))[1]) == places[0]


def test_rows_without_a_finite_value_have_no_index():
    logits = torch.full((2, 5000), -INFINITY)
    logits[1] = math.nan
    assert pointwise.row_maxima(logits.to(DEVICE))[1].tolist() == [-1, -1]


def test_row_maxima_are_written_to_out():
    logits = on_device(9, 60)
    logits[4, 7] = math.nan
    maxima, indices = torch.full((12,), 5.0, device=DEVICE), torch.full((12,), 5, device=DEVICE)
    found = pointwise.row_maxima(logits, (maxima[2:11], indices[2:11]))
    places = [maxima[2:].data_ptr(), indices[2:].data_ptr()]
    assert [tensor.data_ptr() for tensor in found] == places
    for got, expected in zip(found, pointwise.row_maxima(logits), strict=True):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert maxima[[0, 1, 11]].tolist() == indices[[0, 1, 11]].tolist() == [5, 5, 5]


def test_row_maxima_of_strided_logits():
    logits = normal(9, 60)
    for view in (logits[::2], logits[:, 5:38], logits[1:, ::2], logits.T):
        check_maxima(view)
