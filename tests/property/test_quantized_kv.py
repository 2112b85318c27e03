"""Rounding errors of K and V as 8-bit elements with a scale."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference.cache import quantize_kv

_TINY = torch.finfo(torch.float32).tiny
_FLOAT8, _INT8 = torch.float8_e4m3fn, torch.int8
# Half the distance between neighbouring values: relative for floats with a mantissa of 3 bits,
# absolute for the smallest floats, which are 2**-9 apart, and for integers.
_RELATIVE = {_FLOAT8: 2.0**-4, _INT8: 0.0}
_SMALLEST = {_FLOAT8: 2.0**-10, _INT8: 0.5}
_LARGEST = {_FLOAT8: 448, _INT8: 127}
_LARGE = 2.0**100
_ROUNDINGS = 1e-6  # rounding of the division and of the product

vectors = st.lists(st.floats(-_LARGE, _LARGE, width=32), min_size=1, max_size=40)
types = pytest.mark.parametrize("dtype", [_FLOAT8, _INT8])


def _restored(narrow, scales):
    return narrow.double() * scales.double().unsqueeze(-1)


def _bound(states, scales, dtype):
    relative = _RELATIVE[dtype] * states.double().abs()
    return torch.maximum(relative, _SMALLEST[dtype] * scales.double().unsqueeze(-1))


@types
@settings(max_examples=60, deadline=None)
@given(values=vectors)
def test_every_element_is_restored_within_half_a_step(values, dtype):
    states = torch.tensor([values])
    narrow, scales = quantize_kv(states, dtype)
    assert narrow.dtype is dtype
    assert scales.dtype is torch.float32
    assert scales.shape == (1,)
    assert (scales > 0).all()
    error = (_restored(narrow, scales) - states.double()).abs()
    bound = _bound(states, scales, dtype)
    assert (error <= bound * (1 + _ROUNDINGS) + _ROUNDINGS * states.double().abs()).all()


@types
@settings(max_examples=40, deadline=None)
@given(values=vectors)
def test_the_largest_element_and_all_signs_are_kept(values, dtype):
    states = torch.tensor([values])
    restored = _restored(*quantize_kv(states, dtype))
    largest = states.abs().argmax()
    if states.abs().max() > _TINY * _LARGEST[dtype]:
        assert math.isclose(restored[0, largest], states[0, largest], rel_tol=_ROUNDINGS)
    assert (restored * states.double() >= 0).all()


@types
@settings(max_examples=50, deadline=None)
@given(
    tokens=st.lists(st.tuples(*[st.floats(-_LARGE, _LARGE, width=32)] * 4), min_size=1, max_size=6)
)
def test_a_token_is_quantized_independently_of_others(tokens, dtype):
    together = quantize_kv(torch.tensor(tokens), dtype)
    for index, token in enumerate(tokens):
        alone = quantize_kv(torch.tensor([token]), dtype)
        assert torch.equal(together[0].view(torch.uint8)[index], alone[0].view(torch.uint8)[0])
        assert together[1][index] == alone[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_are_restored_as_zeros(dtype):
    narrow, scales = quantize_kv(torch.zeros(2, 3, 8, dtype=dtype), _INT8)
    assert (narrow.view(torch.uint8) == 0).all()
    assert (scales > 0).all()
    assert scales.shape == (2, 3)


@types
def test_values_too_small_for_their_own_scale_stay_small(dtype):
    smallest = torch.tensor([[1e-45, -1e-45, 0.0], [_TINY, -_TINY / 2, 0.0]])
    narrow, scales = quantize_kv(smallest, dtype)
    assert scales.isfinite().all()
    error = (_restored(narrow, scales) - smallest.double()).abs()
    assert (error <= _bound(smallest, scales, dtype)).all()


@types
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_are_not_restored_as_finite(bad, dtype):
    states = torch.tensor([[1.0, 2.0, 3.0], [1.0, bad, 3.0]])
    restored = _restored(*quantize_kv(states, dtype))
    assert restored[0].isfinite().all()
    assert not restored[1].isfinite().any()
