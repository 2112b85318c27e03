"""Latent vectors to write to the cache, heads with a matrix each, and the expected results."""

from dataclasses import dataclass, replace
from types import ModuleType

import torch

import kernels
from kernels import Rotation, WeightUse, reference
from tests.support.kernel_checks import (
    CPU,
    assert_within,
    eps_of,
    normal,
    product_bound,
    spacing_at_zero,
)
from tests.support.paged_batches import meta_on, shuffled_tables, step_metadata

__all__ = ["LatentCase", "check_head_linear", "filled_stack", "make_case"]

SPANS = [(30, 1), (0, 20), (13, 5), (0, 1)]
_EPS = 1e-6


@dataclass(frozen=True)
class LatentCase:
    """Queries and latent vectors of a step as parts of wider tensors, and a pool full of NaN.

    Attributes:
        module: module with the `rotate_and_write_latent` to test.
        rounding: largest relative change of a number when it is stored.
    """

    module: ModuleType
    rounding: float
    query: torch.Tensor  # [num_tokens, num_heads, query_dim]
    latent: torch.Tensor  # [num_tokens, head_dim]
    pool: torch.Tensor
    meta: kernels.AttentionMetadata
    norm_weight: torch.Tensor
    rotation: Rotation
    scales: torch.Tensor | None = None

    def run(self):
        return self.module.rotate_and_write_latent(
            self.query,
            self.latent,
            self.pool[:, 1],
            self.meta,
            norm_weight=self.norm_weight,
            eps=_EPS,
            rotation=self.rotation,
            kv_scales=None if self.scales is None else self.scales[:, 1],
        )

    def check(self):
        """Runs the case and checks the results."""
        query, latent = self.query.double(), self.latent.double()
        latent_dim, rotary_dim = len(self.norm_weight), 2 * self.rotation.cos.shape[1]
        rotated = self.run()
        written = self.take_written()
        plain = query[..., :-rotary_dim]
        assert torch.equal(rotated[..., :-rotary_dim].double(), plain)
        assert_within(rotated[..., -rotary_dim:], *self._turned(query[..., -rotary_dim:]))
        unnormed = latent[:, :latent_dim]
        mean = unnormed.square().mean(-1, keepdim=True)
        normed = unnormed / (mean + _EPS).sqrt() * self.norm_weight.double()
        bound = (2 * self.rounding + 8 * eps_of(torch.float32)) * normed.abs()
        assert_within(written[:, :latent_dim], normed, bound + 8 * spacing_at_zero(written.dtype))
        turned, bound = self._turned(latent[:, None, latent_dim:])
        assert_within(written[:, latent_dim:], turned[:, 0], bound[:, 0])
        assert self.pool.isnan().all()

    def take_written(self):
        """Returns the written vectors, `[num_tokens, head_dim]`; the pool is NaN again."""
        block_size, slots = self.pool.shape[4], self.meta.slot_mapping
        place = slots // block_size, 1, 0, 0, slots % block_size
        written = self.pool[place].clone()
        self.pool[place] = torch.nan
        return written

    def _turned(self, states):
        """Returns rotated `[num_tokens, num_heads, rotary_dim]`, and its largest errors."""
        cos = self.rotation.cos.double().unsqueeze(1)
        sin = self.rotation.sin.double().unsqueeze(1)
        first, second = states.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        magnitudes = (first.abs() + second.abs()).repeat(1, 1, 2)
        return turned, 5 * self.rounding * magnitudes + spacing_at_zero(self.query.dtype)


def make_case(
    *,
    spans=SPANS,
    num_heads=5,
    plain_dim=6,
    latent_dim=24,
    rotary_dim=8,
    block_size=4,
    dtype=torch.float32,
    seed=0,
    module=kernels,
    device=CPU,
    rounding=None,
):
    """Returns a case on `device`; `rounding` defaults to half the distance of two numbers."""
    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed)
    positions, meta = step_metadata(spans, tables, block_size)
    head_dim, num_tokens = latent_dim + rotary_dim, len(positions)
    frequencies = 1e4 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    rotation = reference.rotary_angles(positions, frequencies, 1.3)
    query = normal(num_tokens, num_heads, plain_dim + rotary_dim, dtype=dtype, seed=seed)
    # As one projection computes it, beside others.
    wide = normal(num_tokens, head_dim + 3, dtype=dtype, seed=seed + 1).to(device)
    pool = torch.full((num_blocks, 3, 1, 1, block_size, head_dim), torch.nan, dtype=dtype)
    return LatentCase(
        module=module,
        rounding=eps_of(dtype) / 2 if rounding is None else rounding,
        query=query.to(device),
        latent=wide[:, 3:],
        pool=pool.to(device),
        meta=meta_on(device, meta),
        norm_weight=normal(latent_dim, dtype=dtype, seed=seed + 2).to(device),
        rotation=Rotation(rotation.cos.to(device), rotation.sin.to(device)),
    )


def filled_stack(ops, matrices, device=CPU):
    """Returns a weight that holds `[num_matrices, rows, columns]`."""
    shape = matrices.shape
    weight = ops.make_weight_stack(*shape, matrices.dtype, device, WeightUse.LINEAR)
    for number, matrix in enumerate(matrices):
        weight.rows(number * shape[1], shape[1]).copy_(matrix)
    return weight


def check_head_linear(ops, num_tokens, num_heads, shape, *, dtype, num_copied=0, device=CPU):
    """Checks products of heads with matrices of `shape`, and that the rest is copied.

    Args:
        ops: module with `make_weight_stack` and `head_linear`.
        num_tokens: number of rows.
        num_heads: number of heads.
        shape: rows and columns of a matrix.
        dtype: element type.
        num_copied: elements of each head behind those that are multiplied.
        device: that computes.
    """
    matrices = normal(num_heads, *shape, seed=2, dtype=dtype)
    # Heads of a wider tensor, and one more of them.
    width = shape[1] + num_copied
    wide = normal(num_tokens, num_heads + 1, width, seed=3, dtype=dtype).to(device)
    states = wide[:, :num_heads]
    out = ops.head_linear(states, filled_stack(ops, matrices, device))
    assert out.dtype == dtype
    assert out.shape == (num_tokens, num_heads, shape[0] + num_copied)
    factors = states[..., : shape[1]].to(CPU)
    assert torch.equal(out[..., shape[0] :], states[..., shape[1] :])
    for head in range(num_heads):
        expected = factors[:, head].double() @ matrices[head].double().T
        bound = product_bound(factors[:, head], matrices[head]) + eps_of(dtype) * expected.abs()
        assert_within(out[:, head, : shape[0]].to(CPU), expected, bound)
    return out


def quantized(case, dtype=torch.float8_e4m3fn):
    """Returns the case with a pool of 8-bit elements."""
    scales = torch.full(case.pool.shape[:5], torch.nan, device=case.pool.device)
    narrow = torch.full(case.pool.shape, 0xFF, dtype=torch.uint8, device=case.pool.device)
    return replace(case, pool=narrow.view(dtype), scales=scales)
