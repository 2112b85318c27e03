"""Weights are filled in any order, part by part, from tensors of any type and strides."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import Activation, SegmentedWeight, WeightUse
from tests.support.kernel_checks import CPU, DTYPES, filled_weight, native_only, normal

USES = [WeightUse.LINEAR, WeightUse.LOOKUP]


def rows_of(weight):
    return kernels.embed(torch.arange(weight.num_rows), weight)


def parts_between(boundaries, stop):
    """Returns (first, count) of the parts of `range(stop)` between boundaries."""
    edges = [0, *sorted({b for b in boundaries if 0 < b < stop}), stop]
    return [(first, end - first) for first, end in itertools.pairwise(edges)]


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 130),
    num_columns=st.integers(1, 40),
    boundaries=st.lists(st.integers(1, 129), max_size=5),
    use=st.sampled_from(USES),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_weight_may_be_filled_in_parts_in_any_order(
    num_rows, num_columns, boundaries, use, dtype, data
):
    matrix = normal(num_rows, num_columns, dtype=dtype)
    weight = kernels.make_weight(num_rows, num_columns, dtype, CPU, use)
    for first, count in data.draw(st.permutations(parts_between(boundaries, num_rows))):
        weight.rows(first, count).copy_(matrix[first : first + count])
    assert torch.equal(rows_of(weight), matrix)


@settings(max_examples=30, deadline=None)
@given(
    half=st.integers(1, 70),
    boundaries=st.lists(st.integers(1, 139), max_size=4),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_a_gated_weight_may_be_filled_in_parts_in_any_order(half, boundaries, dtype, data):
    matrix, hidden = normal(2 * half, 9, dtype=dtype), normal(3, 9, dtype=dtype, seed=1)
    weight = kernels.make_weight(2 * half, 9, dtype, CPU, WeightUse.GATED_LINEAR)
    parts = parts_between([*boundaries, half], 2 * half)  # within one half each
    for first, count in data.draw(st.permutations(parts)):
        weight.rows(first, count).copy_(matrix[first : first + count])
    whole = filled_weight(matrix, WeightUse.GATED_LINEAR)
    out = kernels.linear_gated(hidden, weight, None, Activation.SILU)
    assert torch.equal(out, kernels.linear_gated(hidden, whole, None, Activation.SILU))


SOURCES = {
    "float32": lambda matrix: matrix,
    "bfloat16": lambda matrix: matrix.bfloat16(),
    "float16": lambda matrix: matrix.half(),
    "float64": lambda matrix: matrix.double(),
    "transposed": lambda matrix: matrix.T.contiguous().T,
    "transposed bfloat16": lambda matrix: matrix.bfloat16().T.contiguous().T,
    "every other": lambda matrix: matrix.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "one row for all": lambda matrix: matrix[:1].expand(len(matrix), -1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_any_type_and_strides(source, use, dtype):
    given_rows = SOURCES[source](normal(37, 11))
    weight = kernels.make_weight(37, 11, dtype, CPU, use)
    weight.rows(0, 37).copy_(given_rows)
    assert torch.equal(rows_of(weight), given_rows.to(dtype))


@pytest.mark.parametrize("use", list(WeightUse))
def test_rows_have_their_shape_and_bytes(use):
    rows = kernels.make_weight(90, 7, torch.bfloat16, CPU, use).rows(45, 13)
    assert tuple(rows.shape) == (13, 7)
    assert rows.nbytes == 13 * 7 * 2


@pytest.mark.parametrize("use", list(WeightUse))
@pytest.mark.parametrize("shape", [(12, 7), (14, 7), (13, 6), (13, 8), (7, 13), (13, 7, 1)])
def test_a_source_of_another_shape_is_refused(shape, use):
    weight = kernels.make_weight(90, 7, torch.float32, CPU, use)
    with pytest.raises((ValueError, RuntimeError), match=r"shape|size"):
        weight.rows(5, 13).copy_(torch.zeros(shape))


@native_only("slices of tensors do not check their bounds")
@pytest.mark.parametrize(
    ("use", "first", "count"),
    [
        (WeightUse.LINEAR, 0, 91),
        (WeightUse.LINEAR, 90, 1),
        (WeightUse.LINEAR, -1, 1),
        (WeightUse.GATED_LINEAR, 80, 11),
        (WeightUse.GATED_LINEAR, 40, 6),
        (WeightUse.GATED_LINEAR, 0, 90),
    ],
)
def test_rows_past_the_end_or_of_both_halves_are_refused(use, first, count):
    weight = kernels.make_weight(90, 7, torch.float32, CPU, use)
    with pytest.raises(ValueError, match=f"rows {first} to {first + count} do not lie"):
        weight.rows(first, count)


@native_only("the memory of a new tensor is not zeroed")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_were_not_filled_are_zero(dtype):
    weight = kernels.make_weight(100, 13, dtype, CPU, WeightUse.LINEAR)
    weight.rows(33, 5).copy_(torch.ones(5, 13))
    expected = torch.zeros(100, 13, dtype=dtype)
    expected[33:38] = 1
    assert torch.equal(rows_of(weight), expected)
    assert int(weight.data.count_nonzero()) == 5 * 13


@pytest.mark.parametrize("dtype", DTYPES)
def test_filling_rows_does_not_change_others(dtype):
    matrix = normal(70, 9, dtype=dtype)
    weight = filled_weight(matrix)
    weight.rows(31, 2).copy_(torch.zeros(2, 9))
    matrix[31:33] = 0
    assert torch.equal(rows_of(weight), matrix)


def test_meta_weights_hold_nothing_and_keep_their_shape():
    weight = kernels.make_weight(10**6, 10**6, torch.float32, torch.device("meta"), USES[0])
    assert (weight.num_rows, weight.num_columns, weight.data.device.type) == (10**6, 10**6, "meta")


@native_only("weights in several formats")
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_a_weight_are_computed_as_one(dtype):
    """Their rows are no multiples of a panel's, and need not be filled in order."""
    matrix, hidden = normal(70, 9, dtype=dtype), normal(3, 9, dtype=dtype, seed=1)
    bias, residual = normal(70, dtype=dtype, seed=2), normal(3, 70, dtype=dtype, seed=3)
    weight = segmented(matrix, [33, 2, 35], WeightUse.LINEAR)
    moved = weight.with_tensors([tensor.clone() for tensor in weight.tensors()])
    arguments = {"activation": Activation.GELU, "scale": 0.5, "cap": 2.0}
    expected = kernels.linear(hidden, filled_weight(matrix), bias, residual, **arguments)
    for each in (weight, moved):
        assert torch.equal(kernels.linear(hidden, each, bias, residual, **arguments), expected)
    assert weight.nbytes == sum(tensor.nbytes for tensor in moved.tensors())
    assert len({*weight.tensors(), *moved.tensors()}) == 6
    assert weight.describe() == moved.describe() != segmented(matrix, [35, 35]).describe()
    with pytest.raises(ValueError, match="rows 30 to 34 do not lie within one segment"):
        weight.rows(30, 4)


@native_only("weights in several formats")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_halves_of_a_gated_weight_may_be_segments(dtype):
    matrix, hidden = normal(70, 9, dtype=dtype), normal(3, 9, dtype=dtype, seed=1)
    bias, whole = normal(70, dtype=dtype, seed=2), filled_weight(matrix, WeightUse.GATED_LINEAR)
    weight = segmented(matrix, [35, 35], WeightUse.GATED_LINEAR)
    expected = kernels.linear_gated(hidden, whole, bias, Activation.SILU)
    assert torch.equal(kernels.linear_gated(hidden, weight, bias, Activation.SILU), expected)


def segmented(matrix, sizes, use=WeightUse.LINEAR):
    """A weight of segments, the last of which is filled first."""
    parts = [filled_weight(torch.zeros_like(part)) for part in matrix.split(sizes)]
    weight = SegmentedWeight(*matrix.shape, use, tuple(parts))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for start, size in reversed(list(zip(starts, sizes, strict=True))):
        weight.rows(start, size).copy_(matrix[start : start + size])
    return weight
