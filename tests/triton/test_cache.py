"""Triton's preparation of queries, keys and values for attention, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import NormKind
from kernels.reference.cache import quantize_kv
from kernels.triton import cache
from tests.support import preparation_cases
from tests.support.devices import DEVICE, rounding_error
from tests.support.pairs import pairs

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.sampled(one_in=2)]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NARROW_DTYPES = [torch.float8_e4m3fn, torch.int8]
SPANS = [(30, 1), (0, 2), (13, 2)]  # few tokens: each is slow to interpret


def make_case(*, dtype=torch.float32, spans=SPANS, **options):
    return preparation_cases.make_case(
        dtype=dtype,
        spans=spans,
        module=cache,
        device=DEVICE,
        rounding=rounding_error(dtype),
        **options,
    )


@pytest.mark.parametrize(
    ("head_dim", "has_norms", "dtype"), pairs([2, 64, 80, 128, 256], [False, True], DTYPES)
)
def test_states_with_rotation(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5])
def test_states_without_rotation(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype, rotates=False).check()


@pytest.mark.parametrize(
    ("dims", "norm_kind", "dtype"),
    pairs([(8, 2), (7, 4), (96, 72), (128, 32)], [None, *NormKind], DTYPES),
)
def test_partial_rotation_and_kinds_of_norms(dims, norm_kind, dtype):
    options = {} if norm_kind is None else {"has_norms": True, "norm_kind": norm_kind}
    make_case(head_dim=dims[0], rotary_dim=dims[1], dtype=dtype, **options).check()


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (14, 2), (4, 4), (64, 8)])
def test_heads(heads):
    make_case(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64, has_norms=True).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [96])
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
    none, kv = key[:, :0], case.pool[:, 1, :, :0]
    prepared = cache.rotate_and_write_kv(
        query, none, none, kv, case.meta, rotation=case.rotation, norms=case.norms
    )
    assert torch.equal(prepared, expected)
    assert case.pool.isnan().all()


def test_more_heads_than_a_program_processes():
    make_case(num_heads=24, num_kv_heads=12, head_dim=256, has_norms=True, spans=[(3, 2)]).check()


@settings(max_examples=15, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 2)), min_size=1, max_size=2),
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


def test_parts_may_be_strided():
    """Contiguous copies, as for GPT-2, and heads that are not adjacent."""
    case = make_case(has_norms=True)
    parts = [part.clone() for part in case.parts()]
    case.check([part.clone() for part in parts])
    case.check([part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts])
    case.check([part.repeat_interleave(2, dim=2)[:, :, ::2] for part in parts])


def test_a_query_of_dense_heads_is_rotated_in_place():
    case = make_case()
    query, key, value = case.parts()
    assert case.run(query, key, value).data_ptr() == query.data_ptr()


def test_values_and_the_rest_of_a_wider_tensor_are_unchanged():
    case = make_case()
    wide = torch.full((len(case.qkv), 13, 8), 3.0, device=DEVICE)
    wide[:, 2:12] = case.qkv
    parts = wide[:, 2:12].split((6, 2, 2), dim=1)
    values = parts[2].clone()
    case.check(parts)
    assert torch.equal(parts[2], values)
    assert (wide[:, :2] == 3).all()
    assert (wide[:, 12] == 3).all()


def test_a_non_finite_token_does_not_affect_others():
    case, spoiled = make_case(has_norms=True), make_case(has_norms=True)
    spoiled.qkv[3, 1:7, 3] = torch.nan  # some heads of its query and a key
    expected, prepared = case.run(*case.parts()), spoiled.run(*spoiled.parts())
    assert prepared[3, 1:6].isnan().all()
    prepared[3, 1:6] = expected[3, 1:6]
    assert torch.equal(prepared, expected)
    keys, poisoned = case.take_written(), spoiled.take_written()
    assert poisoned[3, 0, 0].isnan().all()
    poisoned[3, 0, 0] = keys[3, 0, 0]
    assert torch.equal(poisoned, keys)


def test_a_step_of_no_tokens():
    case = make_case(spans=[])
    assert case.run(*case.parts()).shape == (0, 6, 8)
    assert case.pool.isnan().all()


class NarrowCase:
    """A case whose keys and values go to an 8-bit cache full of 7s, with scales of 7."""

    def __init__(self, narrow_dtype=torch.float8_e4m3fn, **options):
        self.case = make_case(**options)
        self.narrow_dtype = narrow_dtype
        shape = self.case.pool.shape
        self.pool = torch.full(shape, 7, dtype=torch.uint8, device=DEVICE)
        # Heads are outermost, so that the strides differ from the pool's.
        scales = torch.full((shape[3], shape[0], 2, shape[4]), 7.0, device=DEVICE)
        self.scales = scales.permute(1, 2, 0, 3)

    def run(self, parts=None):
        """Returns the query, and bytes and scales `[num_tokens, 2, num_kv_heads, ...]`.

        Checks that the rest of the cache is unchanged.
        """
        case = self.case
        query = cache.rotate_and_write_kv(
            *(parts or case.parts()),
            self.pool.view(self.narrow_dtype)[:, 1],
            case.meta,
            rotation=case.rotation,
            norms=case.norms,
            kv_scales=self.scales,
        )
        block_size, slots = self.pool.shape[4], case.meta.slot_mapping
        place = slots // block_size, slice(None), slice(None), slots % block_size
        narrow, scales = self.pool[:, 1][place].clone(), self.scales[place].clone()
        self.pool[:, 1][place], self.scales[place] = 7, 7
        assert (self.pool == 7).all()
        assert (self.scales == 7).all()
        return query, narrow, scales


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "dtype", "narrow_dtype"),
    [
        (*sizes, dtype, narrow_dtype)
        for sizes, dtype, narrow_dtype in pairs(
            [(2, None), (64, 16), (80, None)], DTYPES, NARROW_DTYPES
        )
    ],
)
def test_keys_and_values_are_quantized_like_the_reference_bit_for_bit(
    head_dim, rotary_dim, dtype, narrow_dtype
):
    options = {"head_dim": head_dim, "rotary_dim": rotary_dim, "dtype": dtype, "has_norms": True}
    query, narrow, scales = NarrowCase(narrow_dtype, **options).run()
    plain = make_case(**options)
    assert torch.equal(query, plain.run(*plain.parts()))
    bits, factors = quantize_kv(plain.take_written().cpu(), narrow_dtype)
    assert torch.equal(narrow.cpu(), bits.view(torch.uint8))
    assert torch.equal(scales.cpu(), factors)


def test_every_rounding_of_an_8_bit_float():
    """All 8-bit floats, the midpoints between them, and the float32 neighbours of all of these."""
    floats = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat((floats, (floats[1:] + floats[:-1]) / 2))
    above, below = torch.nextafter(points, points * 2), torch.nextafter(points, -points)
    points = torch.cat((points, above, below)).clamp(max=448)
    points = torch.cat((points, -points))
    head_dim = 2 * (len(points) // 2 + 1)
    narrow_case = NarrowCase(spans=[(0, 1)], num_heads=1, num_kv_heads=1, head_dim=head_dim)
    values = torch.zeros(1, 1, head_dim)
    values[0, 0, : len(points)] = points
    values[0, 0, -1] = 448  # the scale is 1
    query, key, _ = narrow_case.case.parts()
    _, narrow, scales = narrow_case.run((query, key, values.to(DEVICE)))
    assert scales[0, 1].tolist() == [1.0]
    expected = values.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(narrow[:, 1].cpu(), expected)


@pytest.mark.parametrize("narrow_dtype", NARROW_DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_quantized_states_of_any_size(scale, narrow_dtype):
    narrow_case = NarrowCase(narrow_dtype, rotates=False)
    narrow_case.case.qkv.clamp_(-1, 1).mul_(scale)
    *_, value = narrow_case.case.parts()
    _, narrow, scales = narrow_case.run()
    bits, factors = quantize_kv(value.cpu(), narrow_dtype)
    assert torch.equal(narrow[:, 1].cpu(), bits.view(torch.uint8))
    assert torch.equal(scales[:, 1].cpu(), factors)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.parametrize("narrow_dtype", NARROW_DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_kept_and_do_not_affect_other_heads(bad, narrow_dtype):
    narrow_case = NarrowCase(narrow_dtype, rotates=False)
    narrow_case.case.qkv[2, 7, 5] = bad  # the second head of a key
    _, narrow, scales = narrow_case.run()
    wide = narrow.view(narrow_dtype).float() * scales.unsqueeze(-1)
    assert not wide[2, 0, 1].isfinite().any()
    wide[2, 0, 1] = 0
    assert wide.isfinite().all()
