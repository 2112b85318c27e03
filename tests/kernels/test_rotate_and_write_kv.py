"""What is done to queries, keys and values before attention, against float64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import QkNorms, Rotation
from tests.support.kernel_checks import DTYPES, assert_within, eps_of, normal
from tests.support.paged_batches import shuffled_tables, step_metadata

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPANS = [(30, 1), (0, 20), (13, 5), (0, 1)]


@dataclass(frozen=True)
class Case:
    """Q, K and V of a step as parts of one tensor, and a pool full of NaN."""

    qkv: torch.Tensor  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]
    pool: torch.Tensor
    meta: kernels.AttentionMetadata
    num_heads: int
    rotation: Rotation | None
    norms: QkNorms | None

    def parts(self):
        num_kv_heads = self.pool.shape[3]
        return self.qkv.split((self.num_heads, num_kv_heads, num_kv_heads), dim=1)

    def run(self, query, key, value):
        return kernels.rotate_and_write_kv(
            query,
            key,
            value,
            self.pool[:, 1],
            self.meta,
            rotation=self.rotation,
            norms=self.norms,
        )

    def check(self, parts=None):
        """Runs the case on `parts`, which hold what its own do."""
        query, key, value = (part.double() for part in self.parts())
        value = value.to(self.qkv.dtype)
        prepared = self.run(*(parts or self.parts()))
        written = self._take_written()
        norms = self.norms
        assert torch.equal(written[:, 1], value)
        assert_within(prepared, *self._expected(query, norms and norms.query_weight))
        assert_within(written[:, 0], *self._expected(key, norms and norms.key_weight))
        assert self.pool.isnan().all()

    def _take_written(self):
        """K and V of each token, `[num_tokens, 2, num_kv_heads, head_dim]`, NaN in their place."""
        block_size = self.pool.shape[4]
        slots = self.meta.slot_mapping
        place = slots // block_size, 1, slice(None), slice(None), slots % block_size
        written = self.pool[place].clone()
        self.pool[place] = torch.nan
        return written

    def _expected(self, states, weight):
        """What Q or K become, and how far off they may be."""
        eps = eps_of(self.qkv.dtype)
        bound = torch.zeros_like(states)
        if weight is not None:
            mean = states.square().mean(-1, keepdim=True)
            states = states / (mean + self.norms.eps).sqrt() * weight.double()
            bound = (eps + 8 * eps_of(torch.float32)) * states.abs()
        if self.rotation is None:
            return states, bound
        cos = self.rotation.cos.double().unsqueeze(1)
        sin = self.rotation.sin.double().unsqueeze(1)
        first, second = states.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        magnitudes = states.abs().add(bound).unflatten(-1, (2, -1)).sum(-2)
        # Torch rounds the angles' cosines and each product to the type.
        return turned, bound + (2.5 * eps * magnitudes).repeat(1, 1, 2)


def make_case(
    *,
    spans=SPANS,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype=torch.float32,
    rotates=True,
    has_norms=False,
    seed=0,
):
    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed)
    positions, meta = step_metadata(spans, tables, block_size)
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    frequencies = 1e4 ** (-torch.arange(head_dim // 2) / max(1, head_dim // 2))
    norms = [normal(head_dim, dtype=dtype, seed=seed + which) for which in (1, 2)]
    return Case(
        qkv=normal(len(positions), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=seed),
        pool=torch.full(shape, torch.nan, dtype=dtype),
        meta=meta,
        num_heads=num_heads,
        rotation=kernels.rotary_angles(positions, frequencies, 1.0) if rotates else None,
        norms=QkNorms(*norms, eps=1e-6) if has_norms else None,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 96, 128])
def test_rotated(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5, 31, 64])
def test_not_rotated(head_dim, has_norms, dtype):
    make_case(head_dim=head_dim, has_norms=has_norms, dtype=dtype, rotates=False).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1), (14, 2), (4, 4)])
def test_heads(heads, dtype):
    make_case(num_heads=heads[0], num_kv_heads=heads[1], has_norms=True, dtype=dtype).check()


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
def test_parts_that_lie_otherwise(dtype):
    """Copies, as of GPT-2's parts, and heads that do not lie side by side."""
    case = make_case(dtype=dtype, has_norms=True)
    parts = [part.clone() for part in case.parts()]
    case.check([part.clone() for part in parts])
    case.check([part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts])
    case.check([part.repeat_interleave(2, dim=2)[:, :, ::2] for part in parts])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_the_rest_of_a_wider_tensor_stay(dtype):
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
def test_a_token_that_is_not_finite_spoils_no_other(dtype):
    case = make_case(dtype=dtype, has_norms=True)
    spoiled = make_case(dtype=dtype, has_norms=True)
    spoiled.qkv[4, 1:7, 3] = torch.nan  # some heads of its query and a key
    expected = case.run(*case.parts())
    prepared = spoiled.run(*spoiled.parts())
    assert prepared[4, 1:6].isnan().all()
    prepared[4, 1:6] = expected[4, 1:6]
    assert torch.equal(prepared, expected)
    keys, poisoned = case._take_written(), spoiled._take_written()
    assert poisoned[4, 0, 0].isnan().all()
    poisoned[4, 0, 0] = keys[4, 0, 0]
    assert torch.equal(poisoned, keys)
