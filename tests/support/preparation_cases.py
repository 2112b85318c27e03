"""Queries, keys and values to prepare for attention, and the expected results."""

from dataclasses import dataclass
from types import ModuleType

import torch

import kernels
from kernels import NormKind, QkNorms, Rotation, reference
from tests.support.kernel_checks import CPU, assert_within, eps_of, normal, spacing_at_zero
from tests.support.paged_batches import meta_on, shuffled_tables, step_metadata

__all__ = ["PreparationCase", "make_case"]

SPANS = [(30, 1), (0, 20), (13, 5), (0, 1)]


@dataclass(frozen=True)
class PreparationCase:
    """Q, K and V of a step as parts of one tensor, and a pool full of NaN.

    Attributes:
        module: module with the `rotate_and_write_kv` to test.
        rounding: largest relative change of a number when it is stored.
    """

    module: ModuleType
    rounding: float
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
        return self.module.rotate_and_write_kv(
            query,
            key,
            value,
            self.pool[:, 1],
            self.meta,
            rotation=self.rotation,
            norms=self.norms,
        )

    def check(self, parts=None):
        """Runs the case on `parts`, which equal its own parts, and checks the results."""
        query, key, value = (part.double() for part in self.parts())
        prepared = self.run(*(parts or self.parts()))
        written, norms = self.take_written(), self.norms
        if norms is None or not norms.norms_values:
            assert torch.equal(written[:, 1], value.to(self.qkv.dtype))
        else:
            mean = value.square().mean(-1, keepdim=True)
            value /= (mean + norms.eps).sqrt()
            bound = (self.rounding + 8 * eps_of(torch.float32)) * value.abs()
            assert_within(written[:, 1], value, bound + spacing_at_zero(self.qkv.dtype))
        assert_within(prepared, *self._expected(query, norms and norms.query_weight))
        assert_within(written[:, 0], *self._expected(key, norms and norms.key_weight))
        assert self.pool.isnan().all()

    def take_written(self):
        """Returns the written K and V, `[num_tokens, 2, num_kv_heads, head_dim]`.

        Overwrites them with NaN in the pool.
        """
        block_size = self.pool.shape[4]
        slots = self.meta.slot_mapping
        place = slots // block_size, 1, slice(None), slice(None), slots % block_size
        written = self.pool[place].clone()
        self.pool[place] = torch.nan
        return written

    def _expected(self, states, weight):
        """Returns the expected Q or K, and their largest errors."""
        bound = torch.zeros_like(states)
        if weight is not None:
            mean = states.square().mean(-1, keepdim=True)
            factors = weight.double() + (1 if self.norms.kind is NormKind.OFFSET else 0)
            states = states / (mean + self.norms.eps).sqrt() * factors
            bound = (2 * self.rounding + 8 * eps_of(torch.float32)) * states.abs()
            bound += 8 * spacing_at_zero(self.qkv.dtype)
        if self.rotation is None:
            return states, bound
        cos = self.rotation.cos.double().unsqueeze(1)
        sin = self.rotation.sin.double().unsqueeze(1)
        rotary_dim = 2 * cos.shape[-1]
        unrotated, same_bound = states[..., rotary_dim:], bound[..., rotary_dim:]
        states, bound = states[..., :rotary_dim], bound[..., :rotary_dim]
        first, second = states.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        magnitudes = states.abs().add(bound).unflatten(-1, (2, -1)).sum(-2)
        # Torch rounds the angles' cosines and each product to the type.
        rotated_bound = bound.unflatten(-1, (2, -1)).sum(-2) + 5 * self.rounding * magnitudes
        rotated_bound = rotated_bound.repeat(1, 1, 2) + spacing_at_zero(self.qkv.dtype)
        return torch.cat((*turned, unrotated), -1), torch.cat((rotated_bound, same_bound), -1)


def make_case(
    *,
    spans=SPANS,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype=torch.float32,
    rotates=True,
    rotary_dim=None,
    has_norms=False,
    norm_kind=NormKind.ROUNDED,
    norms_values=False,
    seed=0,
    module=kernels,
    device=CPU,
    rounding=None,
):
    """Returns a case on `device`.

    The whole head is rotated by default; `rounding` defaults to half the distance of two numbers.
    """
    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed)
    positions, meta = step_metadata(spans, tables, block_size)
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim)
    num_pairs = (head_dim if rotary_dim is None else rotary_dim) // 2
    frequencies = 1e4 ** (-torch.arange(num_pairs) / max(1, num_pairs))
    rotation = reference.rotary_angles(positions, frequencies, 1.3)
    norms = [normal(head_dim, dtype=dtype, seed=seed + which).to(device) for which in (1, 2)]
    qkv_shape = len(positions), num_heads + 2 * num_kv_heads, head_dim
    return PreparationCase(
        module=module,
        rounding=eps_of(dtype) / 2 if rounding is None else rounding,
        qkv=normal(*qkv_shape, dtype=dtype, seed=seed).to(device),
        pool=torch.full(shape, torch.nan, dtype=dtype, device=device),
        meta=meta_on(device, meta),
        num_heads=num_heads,
        rotation=Rotation(rotation.cos.to(device), rotation.sin.to(device)) if rotates else None,
        norms=QkNorms(*norms, 1e-6, norm_kind, norms_values=norms_values) if has_norms else None,
    )
