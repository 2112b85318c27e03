"""Norms, rotary angles and maxima, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import Activation, NormKind, reference
from tests.support.kernel_checks import DTYPES, assert_within, eps_of, gated_values, normal
from tests.support.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS32 = eps_of(torch.float32)
SIZES = [1, 5, 15, 16, 17, 31, 33, 100, 768, 2817]


def check_rms_norm(hidden, weight, eps=1e-5, kind=NormKind.ROUNDED, residual=None):
    added = None if residual is None else residual.clone()
    out = kernels.rms_norm(hidden, weight, eps, kind=kind, residual=added)
    wide = hidden.double()
    factors = weight.double() + (1.0 if kind is NormKind.OFFSET else 0.0)
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * factors
    assert out.shape == hidden.shape
    assert out.dtype == hidden.dtype
    # The mean is a sum in float32; half an eps of error for each rounding to the type.
    num_roundings = 2 if kind is NormKind.ROUNDED else 1
    num_eps = 4 + hidden.shape[-1] ** 0.5 / 4
    factor_eps = EPS32 if kind is NormKind.OFFSET else 0.0  # near -1, 1 + weight loses digits
    bound = (num_roundings * eps_of(hidden.dtype) / 2 + num_eps * EPS32) * expected.abs()
    bound = bound + factor_eps * (expected / factors).abs().nan_to_num()
    if residual is not None:
        expected = expected + residual.double()
        bound = bound + (eps_of(hidden.dtype) / 2 + EPS32) * expected.abs()
    assert_within(out, expected, bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_rms_norm(rows, size, dtype):
    check_rms_norm(normal(rows, size, dtype=dtype) * 3, normal(size, dtype=dtype, seed=1))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
    kind=st.sampled_from(NormKind),
    has_residual=st.booleans(),
)
def test_rms_norm_of_any_shape(rows, size, dtype, scale, kind, has_residual):
    hidden, weight = normal(rows, size, dtype=dtype) * scale, normal(size, dtype=dtype, seed=1)
    residual = normal(rows, size, dtype=dtype, seed=2) if has_residual else None
    check_rms_norm(hidden, weight, kind=kind, residual=residual)


@pytest.mark.parametrize("kind", NormKind)
def test_norms_round_as_transformers_models_do(kind):
    """One rounding more or less changes some of 5000 numbers."""
    hidden, weight = normal(5, 1000, dtype=torch.bfloat16), normal(1000, seed=1).bfloat16()
    normed = hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    factors = weight.double() + (1.0 if kind is NormKind.OFFSET else 0.0)
    if kind is NormKind.ROUNDED:
        normed = normed.bfloat16().double()
    expected = (normed * factors).bfloat16()
    out = kernels.rms_norm(hidden, weight, 1e-6, kind=kind)
    num_different = int((out != expected).sum())
    assert num_different <= 5, "sums in float32 change few roundings"
    residual = normal(5, 1000, dtype=torch.bfloat16, seed=2)
    total = kernels.rms_norm(hidden, weight, 1e-6, kind=kind, residual=residual.clone())
    assert torch.equal(total, residual + out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_rows_and_of_more_axes(dtype):
    wide, weight = normal(6, 4, 90, dtype=dtype), normal(30, dtype=dtype, seed=1)
    for hidden in (wide[:, :, 20:50], wide[::2, 1:3, ::3], wide[:, 0, 3:33], wide[1, :, :30]):
        check_rms_norm(hidden, weight)
        check_rms_norm(hidden.clone(), weight, residual=hidden)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 300) | st.sampled_from([768, 2817]),
    dtype=st.sampled_from(DTYPES),
    mean=st.sampled_from([0.0, 100.0]),
    parts=st.sets(st.sampled_from(["weight", "bias", "residual"])),
)
def test_layer_norm(rows, size, dtype, mean, parts):
    hidden = (normal(rows, 2 * size, dtype=dtype) * 3 + mean)[:, size // 2 : size // 2 + size]
    weight = normal(size, dtype=dtype, seed=1) if "weight" in parts else None
    bias = normal(size, dtype=dtype, seed=2) if "bias" in parts else None
    residual = normal(rows, size, dtype=dtype, seed=3) if "residual" in parts else None
    added = None if residual is None else residual.clone()
    out = kernels.layer_norm(hidden, weight, bias, 1e-5, added)
    assert out.dtype == dtype

    wide = hidden.double()
    factor = (wide.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt()
    normed = (wide - wide.mean(-1, keepdim=True)) * factor
    weight, bias = (1.0 if weight is None else weight.double()), (0.0 if bias is None else bias)
    expected = normed * weight + bias
    num_eps = 8 + size**0.5 / 4
    # An error of the mean is that of sums of `hidden`.
    error = num_eps * EPS32 * (normed.abs() + wide.abs().amax(-1, keepdim=True) * factor)
    bound = (error * weight if isinstance(weight, float) else error * weight.abs()) + EPS32
    bound = bound + (eps_of(dtype) / 2 + EPS32) * expected.abs()
    if residual is not None:
        expected = expected + residual.double()
        bound = bound + (eps_of(dtype) / 2 + EPS32) * expected.abs()
    assert_within(out, expected, bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_rows_that_are_zero_or_not_finite(dtype):
    hidden, weight = normal(4, 40, dtype=dtype), torch.ones(40, dtype=dtype)
    expected = kernels.rms_norm(hidden, weight, 1e-6)
    hidden[1] = 0
    hidden[2, 39] = math.nan
    out = kernels.rms_norm(hidden, weight, 1e-6)
    assert torch.equal(out[[0, 3]], expected[[0, 3]])
    assert not out[1].any()
    assert out[2].isnan().all()


@pytest.mark.parametrize(
    ("size", "activation", "dtype"), pairs([1, 7, 16, 33, 2050], [None, *Activation], DTYPES)
)
def test_gate_rows(size, activation, dtype):
    wide = normal(5, 2 * size + 6, dtype=dtype)[:, 4 : 4 + 2 * size] * 4
    gates, values = wide.chunk(2, dim=-1)
    for parts in ((values, gates), (values.clone(), gates), (values.T.contiguous().T, gates)):
        out = kernels.gate_rows(*parts, activation)
        assert out.is_contiguous()
        assert out.dtype == dtype
        factors = gated_values(values, activation)
        expected = reference.activate(gates.double(), activation) * factors.double()
        # The activation and the product are rounded; torch's forms cancel digits below zero.
        bound = (eps_of(dtype) + 8 * (1 + gates.double().abs()) * EPS32) * expected.abs()
        bound = bound + 2 * EPS32 * (gates.double() * factors.double()).abs()
        assert_within(out, expected, bound)


@pytest.mark.parametrize("activation", Activation)
def test_activations_of_numbers_far_from_zero(activation):
    numbers = torch.tensor([-1e30, -1e4, -90.0, -15.0, -0.0, 15.0, 90.0, 1e4, 1e30, torch.nan])
    gates = numbers.repeat(2, 3)
    out = kernels.gate_rows(torch.ones_like(gates), gates, activation)
    factor = 2.0 if activation is Activation.CLAMPED_SILU else 1.0
    expected = factor * reference.activate(gates.double(), activation).nan_to_num()
    assert out[:, 9::10].isnan().all()
    assert_within(out.nan_to_num(), expected, 3e-6 * (1 + expected.abs()))


@pytest.mark.parametrize("amplitude", [1.0, 1.37])
@pytest.mark.parametrize("half_dim", [1, 4, 16, 17, 40, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 100])
def test_rotary_angles(num_tokens, half_dim, amplitude):
    frequencies = 1e4 ** (-torch.arange(half_dim) / half_dim)
    positions = torch.randint(0, 40_000, (num_tokens,))
    positions[0] = 0
    rotation = kernels.rotary_angles(positions, frequencies, amplitude)
    # The angle is rounded to float32, as the models were trained with.
    angles = (positions.unsqueeze(1).float() * frequencies).double()
    bound = torch.tensor(2 * EPS32 * amplitude)
    assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
    assert_within(rotation.cos, angles.cos() * amplitude, bound)
    assert_within(rotation.sin, angles.sin() * amplitude, bound)


def test_rotary_angles_of_strided_positions():
    frequencies, positions = torch.tensor([1.0, 0.1]), torch.arange(20)
    apart = kernels.rotary_angles(positions[3::4], frequencies, 1.0)
    dense = kernels.rotary_angles(positions[3::4].clone(), frequencies, 1.0)
    assert torch.equal(apart.cos, dense.cos)
    assert torch.equal(apart.sin, dense.sin)


def check_maxima(logits):
    maxima, indices = kernels.row_maxima(logits)
    assert (maxima.dtype, indices.dtype) == (torch.float32, torch.int64)
    for row, values in enumerate(logits.tolist()):
        nans = [i for i, value in enumerate(values) if math.isnan(value)]
        first = nans[0] if nans else values.index(max(values))
        assert int(indices[row]) == (first if math.isfinite(values[first]) else -1)
        assert nans or float(maxima[row]) == values[first]
        assert not nans or math.isnan(maxima[row])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 30])
def test_row_maxima(rows, size):
    check_maxima(normal(rows, size))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_row_maxima_of_ties_nan_and_infinities(data):
    size = data.draw(st.integers(1, 70))
    value = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45, math.inf, -math.inf])
    if data.draw(st.booleans()):
        value |= st.just(math.nan)
    rows = st.lists(st.lists(value, min_size=size, max_size=size), min_size=1, max_size=4)
    check_maxima(torch.tensor(data.draw(rows)))


@pytest.mark.parametrize("place", [0, 7, 8, 31, 32, 64, 98, 99, 100])
@pytest.mark.parametrize("value", [5.0, math.inf, math.nan])
def test_the_largest_logit_is_found_at_any_place(place, value):
    logits = normal(2, 101).clamp(max=4)
    logits[1, place] = value
    check_maxima(logits)


def test_row_maxima_are_written_to_out():
    logits = normal(9, 60)
    logits[4, 7] = math.nan
    maxima, indices = torch.full((12,), 5.0), torch.full((12,), 5)
    found = kernels.row_maxima(logits, (maxima[2:11], indices[2:11]))
    assert [tensor.data_ptr() for tensor in found] == [
        maxima[2:].data_ptr(),
        indices[2:].data_ptr(),
    ]
    for got, expected in zip(found, kernels.row_maxima(logits), strict=True):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert maxima[[0, 1, 11]].tolist() == indices[[0, 1, 11]].tolist() == [5, 5, 5]


def test_row_maxima_of_strided_logits():
    logits = normal(9, 60)
    for view in (logits[::2], logits[:, 5:38], logits[1:, ::2], logits.T):
        check_maxima(view)
