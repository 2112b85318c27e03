"""Steps of attention over pools full of NaN, and their expected results in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import kernels
from kernels.paged_kv import AttentionMetadata
from kernels.reference.cache import quantize_kv, write_kv
from tests.support.kernel_checks import CPU, IS_NATIVE, assert_within, eps_of
from tests.support.paged_batches import meta_on, shuffled_tables, step_metadata

__all__ = ["AttentionCase", "make_case"]

_EPS32 = torch.finfo(torch.float32).eps
# Torch keeps scores in the type of the operands; the native kernels keep them in float32.
_NARROW_SCORES_FACTOR = 8
_LAYER = 1


@dataclass(frozen=True)
class AttentionCase:
    """A step with its KV in one layer of a pool of three, and the same KV as plain tensors.

    Attributes:
        query: `[num_tokens, num_heads, head_dim]`.
        pool: KV pool; NaN except where `contexts` was written.
        meta: metadata of the step.
        contexts: per sequence K and V, `[context, num_kv_heads, head_dim]`; V has `value_dim`
            elements if that is not None.
        spans: (start, query length) of each sequence.
        scale: factor on the scores.
        soft_cap: cap of the scores; None for none.
        sinks: `[num_heads]`, of the type of `query`; None for none.
        scales_pool: scales of a pool of 8-bit elements, laid out as its tokens.
        value_dim: elements of a value of latent attention; None if the pool holds V.
    """

    query: torch.Tensor
    pool: torch.Tensor
    meta: AttentionMetadata
    contexts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    spans: Sequence[tuple[int, int]]
    scale: float

    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    scales_pool: torch.Tensor | None = None
    value_dim: int | None = None

    @property
    def kv_layer(self) -> torch.Tensor:
        return self.pool[:, _LAYER]

    def attend(self, sliding_window: int | None = None, *, module=kernels) -> torch.Tensor:
        return module.paged_attention(
            self.query,
            self.kv_layer,
            self.meta,
            scale=self.scale,
            sliding_window=sliding_window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            kv_scales=None if self.scales_pool is None else self.scales_pool[:, _LAYER],
            value_dim=self.value_dim,
        )

    def expected(self, sliding_window: int | None = None) -> torch.Tensor:
        """Returns what `attend` should, in float64 on the CPU."""
        return self._expected_and_errors(sliding_window)[0]

    def check(
        self,
        sliding_window: int | None = None,
        *,
        module=kernels,
        rounding: float | None = None,
    ) -> torch.Tensor:
        """Attends with a module's kernels, and compares with the oracle.

        Args:
            sliding_window: how many tokens a query sees.
            module: module with `paged_attention`.
            rounding: largest relative change of a number when it is stored as the type; that
                of the CPU's kernels if None.
        """
        output = self.attend(sliding_window, module=module)
        assert output.dtype == self.query.dtype
        assert output.device == self.query.device
        expected, magnitudes, relative = self._expected_and_errors(sliding_window)
        if self.query.dtype != torch.float32:
            if rounding is None:
                rounding = (
                    (1 if IS_NATIVE else _NARROW_SCORES_FACTOR) * eps_of(self.query.dtype) / 2
                )
            # Each weight is rounded to the type, and the result.
            relative = relative + 2 * rounding
        assert_within(output.cpu(), expected, relative * magnitudes)
        return output

    def on(self, device: torch.device) -> "AttentionCase":
        """Returns the case with all tensors that kernels read on `device`."""
        scales_pool = None if self.scales_pool is None else self.scales_pool.to(device)
        sinks = None if self.sinks is None else self.sinks.to(device)
        return replace(
            self,
            query=self.query.to(device),
            pool=self.pool.to(device),
            meta=meta_on(device, self.meta),
            sinks=sinks,
            scales_pool=scales_pool,
        )

    def quantized(self, dtype: torch.dtype = torch.float8_e4m3fn) -> "AttentionCase":
        """Returns the case with a pool of 8-bit elements; it expects results of the rounded KV."""
        narrow, scales_pool = quantize_kv(self.pool, dtype)
        contexts = []
        for context in self.contexts:
            parts = [quantize_kv(states, dtype) for states in context[: self.pool.shape[2]]]
            wide = [part.double() * scales.double().unsqueeze(-1) for part, scales in parts]
            contexts.append((wide[0], wide[-1][..., : self.value_dim]))
        return replace(self, pool=narrow, scales_pool=scales_pool, contexts=contexts)

    def with_freed_blocks(self, sliding_window: int) -> "AttentionCase":
        """Returns the case with NaN and zeroed block tables before the windows."""
        pool, tables = self.pool.clone(), self.meta.block_tables.clone()
        block_size = pool.shape[4]
        for (start, _), table in zip(self.spans, tables, strict=True):
            first_seen = max(0, start - sliding_window + 1)
            num_blocks, num_slots = divmod(first_seen, block_size)
            table[:num_blocks] = 0
            if num_slots:
                pool[table[num_blocks], :, :, :, :num_slots] = torch.nan
        return replace(self, pool=pool, meta=replace(self.meta, block_tables=tables))

    def _expected_and_errors(
        self, sliding_window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the result, the sums of magnitudes, and float32's error relative to these."""
        chunks = self.query.to(CPU).double().split([length for _, length in self.spans])
        parts = [
            _attend(query, start, *context, self, sliding_window)
            for query, (start, _), context in zip(chunks, self.spans, self.contexts, strict=True)
        ]
        expected, magnitudes, score_bounds = (torch.cat(part) for part in zip(*parts, strict=True))
        num_eps = 8 + self.meta.max_context_len**0.5 / 4
        return expected, magnitudes, num_eps * _EPS32 + score_bounds


def make_case(
    spans: Sequence[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 5,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    value_dim: int | None = None,
    seed: int = 0,
) -> AttentionCase:
    """A case of random KV in shuffled blocks, and sinks that weigh as much as several keys.

    With `value_dim`, the KV is of latent attention.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tables, num_blocks = shuffled_tables([sum(span) for span in spans], block_size, seed)
    num_parts = 2 if value_dim is None else 1
    shape = (num_blocks, 3, num_parts, num_kv_heads, block_size, head_dim)
    pool = torch.full(shape, torch.nan, dtype=dtype)
    contexts = []
    for (start, length), table in zip(spans, tables, strict=True):
        parts = [normal(start + length, num_kv_heads, head_dim) for _ in range(num_parts)]
        contexts.append((parts[0], parts[-1][..., :value_dim]))
        _, whole = step_metadata([(0, start + length)], [table], block_size)
        write_kv(parts, pool[:, _LAYER], whole.slot_mapping)
    _, meta = step_metadata(spans, tables, block_size)
    query = normal(sum(length for _, length in spans), num_heads, head_dim)
    sinks = normal(num_heads) + 2 if has_sinks else None
    return AttentionCase(
        query, pool, meta, contexts, spans, scale, soft_cap, sinks, value_dim=value_dim
    )


def _attend(
    query: torch.Tensor,
    start: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    case: AttentionCase,
    sliding_window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the attention of one sequence's tokens.

    Args:
        query: `[tokens, heads, dim]`.
        start: position of the first token.
        keys: `[context, kv heads, dim]`.
        values: `[context, kv heads, value dim]`.
        case: has the rule of the scores.
        sliding_window: how many tokens a query sees.

    Returns:
        The result and the same sums of magnitudes, each `[tokens, heads, value dim]`; the largest
        relative error of weights whose scores are summed in float32, `[tokens, heads, 1]`.
    """
    distances = torch.arange(start, start + len(query)).unsqueeze(1) - torch.arange(len(keys))
    seen = (distances >= 0) & (distances < (sliding_window or len(keys) + 1))
    group_size = query.shape[1] // keys.shape[1]
    keys, values = (kv.double().repeat_interleave(group_size, dim=1) for kv in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * case.scale
    if case.soft_cap is not None:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if case.sinks is not None:
        sinks = case.sinks.to(CPU).double()[:, None, None]
        scores = torch.cat([scores, sinks.expand(-1, len(query), 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    magnitudes = torch.einsum("qhd,khd->hqk", query.abs(), keys.abs()) * case.scale
    largest = magnitudes.masked_fill(~seen, 0).amax(-1).T.unsqueeze(-1)
    num_eps = 2 * (2 + query.shape[2] ** 0.5 / 4)
    return (
        torch.einsum("hqk,khd->qhd", weights, values),
        torch.einsum("hqk,khd->qhd", weights, values.abs()),
        num_eps * _EPS32 * (largest + 2 * (case.soft_cap or 0.0)),
    )
