"""Preparation of queries, keys and values for attention, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import NormKind
from tests.support.kernel_checks import DTYPES
from tests.support.pairs import pairs
from tests.support.preparation_cases import make_case

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 96, 128])
def test_states_with_rotation(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5, 31, 64])
def test_states_without_rotation(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype, rotates=False).check()


@pytest.mark.parametrize(
    ("dims", "norm_kind", "dtype"),
    pairs([(8, 2), (7, 4), (96, 72), (128, 32), (64, 34)], [None, *NormKind], DTYPES),
)
def test_partial_rotation_and_kinds_of_norms(dims, norm_kind, dtype):
    options = {} if norm_kind is None else {"has_norms": True, "norm_kind": norm_kind}
    make_case(head_dim=dims[0], rotary_dim=dims[1], dtype=dtype, **options).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1), (14, 2), (4, 4)])
def test_heads(heads, dtype):
    make_case(num_heads=heads[0], num_kv_heads=heads[1], has_norms=True, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [7, 96])
def test_normalized_values_that_are_the_keys(head_dim, dtype):
    case = make_case(head_dim=head_dim, dtype=dtype, has_norms=True, norms_values=True)
    query, key, value = case.parts()
    value.copy_(key)
    case.check((query, key, key))


def test_queries_alone():
    """The layer reads the keys and values of another one."""
    case = make_case(has_norms=True)
    query, key, _ = case.parts()
    expected = case.run(query.clone(), key.clone(), key.clone())
    case.take_written()
    cache, none = case.pool[:, 1, :, :0], key[:, :0]
    prepared = kernels.rotate_and_write_kv(
        query, none, none, cache, case.meta, rotation=case.rotation, norms=case.norms
    )
    assert torch.equal(prepared, expected)
    assert case.pool.isnan().all()


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (5, 1)]),
    half_dim=st.integers(1, 40),
    block_size=st.integers(1, 50),
    dtype=st.sampled_from(DTYPES),
    rotates=st.booleans(),
    has_norms=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(heads, half_dim, **options):
    make_case(num_heads=heads[0], num_kv_heads=heads[1], head_dim=2 * half_dim, **options).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_over_several_threads(dtype):
    case = make_case(spans=[(7, 300), (0, 150)], head_dim=64, block_size=16, dtype=dtype)
    before = kernels.num_threads()
    try:
        kernels.set_num_threads(3)
        case.check()
    finally:
        kernels.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_may_be_strided(dtype):
    """Contiguous copies, as for GPT-2, and heads that are not adjacent."""
    case = make_case(dtype=dtype, has_norms=True)
    parts = [part.clone() for part in case.parts()]
    case.check([part.clone() for part in parts])
    case.check([part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts])
    case.check([part.repeat_interleave(2, dim=2)[:, :, ::2] for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_the_rest_of_a_wider_tensor_are_unchanged(dtype):
    case = make_case(dtype=dtype)
    wide = torch.full((len(case.qkv), 13, 8), 3.0, dtype=dtype)
    wide[:, 2:12] = case.qkv
    parts = wide[:, 2:12].split((6, 2, 2), dim=1)
    values = parts[2].clone()
    case.check(parts)
    assert torch.equal(parts[2], values)
    assert (wide[:, :2] == 3).all()
    assert (wide[:, 12] == 3).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_non_finite_token_does_not_affect_others(dtype):
    case = make_case(dtype=dtype, has_norms=True)
    spoiled = make_case(dtype=dtype, has_norms=True)
    spoiled.qkv[4, 1:7, 3] = torch.nan  # some heads of its query and a key
    expected = case.run(*case.parts())
    prepared = spoiled.run(*spoiled.parts())
    assert prepared[4, 1:6].isnan().all()
    prepared[4, 1:6] = expected[4, 1:6]
    assert torch.equal(prepared, expected)
    keys, poisoned = case.take_written(), spoiled.take_written()
    assert poisoned[4, 0, 0].isnan().all()
    poisoned[4, 0, 0] = keys[4, 0, 0]
    assert torch.equal(poisoned, keys)
