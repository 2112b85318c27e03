"""Paged attention in Triton: launching the kernels."""

import functools
from dataclasses import dataclass, replace

import torch

from kernels import reference
from kernels.dispatch import TRITON
from kernels.paged_kv import AttentionMetadata
from kernels.triton.attention_kernels import LOG2_E, attend_kernel
from kernels.triton.attention_plan import AttentionSizes, Pass, padded_dim, plan_passes
from kernels.triton.attention_splits import Splits
from kernels.triton.attention_work import SharedWork, attend_shares_kernel
from kernels.triton.launch import AttentionLaunch, DecodeAttentionLaunch, launch_table

__all__ = ["paged_attention"]

_MAX_WIDENING_PROGRAMS = 2  # of 4 warps, with some 208 registers
_NO_WINDOW = (1 << 31) - 1
# The interpreter runs programs one after another, but should see several splits.
_INTERPRETED_PROCESSORS = 8


@TRITON.implements(reference.paged_attention)
def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Expects the elements of a head to be adjacent."""
    step = _Step(
        query, kv_layer, meta, scale, sliding_window, soft_cap, sinks, kv_scales, value_dim
    )
    step.check()
    shape = (*query.shape[:2], step.num_value_elements)
    output = torch.empty(shape, dtype=query.dtype, device=query.device)
    if len(query) == 0:
        return output
    for part in plan_passes(step.sizes(), *_launches(query, kv_scales is not None)):
        if part.num_programs:
            _attend_shares(step, part, output)
        else:
            _attend_splits(step, part, output)
    return output


def _launches(
    query: torch.Tensor, is_narrow: bool
) -> tuple[DecodeAttentionLaunch, AttentionLaunch]:
    """Returns launch parameters for few rows, and for many.

    Args:
        query: the queries.
        is_narrow: whether K and V have 8 bits.
    """
    table = launch_table(query.device)
    num_bytes = query.shape[2] * query.element_size()
    decode = table.decode_attention.for_size(num_bytes)
    if is_narrow:
        decode = _with_registers_to_widen(decode)
    if query.dtype == torch.float32:
        # No tensor core multiplies it exactly: large tiles would not fit the registers.
        return decode, decode
    return decode, table.prefill_attention.for_size(num_bytes)


@functools.cache
def _with_registers_to_widen(decode: DecodeAttentionLaunch) -> DecodeAttentionLaunch:
    """Returns parameters for K and V of 8 bits, whose widening takes more registers."""
    return replace(decode, programs_per_sm=min(decode.programs_per_sm, _MAX_WIDENING_PROGRAMS))


@dataclass(frozen=True, slots=True)
class _Step:
    """The arguments of `paged_attention`."""

    query: torch.Tensor
    kv_layer: torch.Tensor
    meta: AttentionMetadata
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    kv_scales: torch.Tensor | None
    value_dim: int | None

    def check(self) -> None:
        """Asserts what the kernels assume."""
        query, kv_layer, meta = self.query, self.kv_layer, self.meta
        assert query.shape[2] == kv_layer.shape[4]
        assert query.shape[1] % kv_layer.shape[2] == 0
        assert query.stride(2) == 1 or query.shape[2] == 1
        assert kv_layer.stride(4) == 1 or kv_layer.shape[4] == 1
        assert meta.block_tables.stride(1) == 1 or meta.block_tables.shape[1] == 1
        assert meta.query_starts.is_contiguous()
        assert meta.context_lens.is_contiguous()
        if self.value_dim is not None:
            assert kv_layer.shape[1] == 1
            assert self.value_dim <= query.shape[2]
        if self.sinks is not None:
            assert self.sinks.shape == (query.shape[1],)
            assert self.sinks.is_contiguous()
        if self.kv_scales is None:
            assert kv_layer.dtype == query.dtype
        else:
            assert kv_layer.dtype in (torch.float8_e4m3fn, torch.int8)
            assert self.kv_scales.dtype == torch.float32
            assert self.kv_scales.shape == kv_layer.shape[:4]

    @property
    def num_value_elements(self) -> int:
        """The number of elements of a value."""
        return self.value_dim or self.query.shape[2]

    @property
    def window(self) -> int:
        """The number of tokens a query attends to."""
        return _NO_WINDOW if self.sliding_window is None else self.sliding_window

    @property
    def group_size(self) -> int:
        """The number of query heads per KV head."""
        return self.query.shape[1] // self.kv_layer.shape[2]

    def sizes(self) -> AttentionSizes:
        """Returns the sizes that decide how the work is divided into programs."""
        meta = self.meta
        reach = _NO_WINDOW
        if self.sliding_window is not None:
            reach = self.sliding_window + meta.max_query_len - 1
        return AttentionSizes(
            num_tokens=len(self.query),
            num_seqs=len(meta.context_lens),
            max_query_len=meta.max_query_len,
            max_context_len=min(meta.max_context_len, reach),
            num_kv_heads=self.kv_layer.shape[2],
            group_size=self.group_size,
            value_dim=self.num_value_elements,
            num_processors=_num_processors(self.query.device),
        )

    def factors(self) -> tuple[float, float]:
        """Returns the factors of scores and of their cap that make weights powers of 2."""
        if self.soft_cap is None:
            return self.scale * LOG2_E.value, 0.0
        return 2.0 * LOG2_E.value * self.scale / self.soft_cap, self.soft_cap * LOG2_E.value

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Returns what kernels read, in their order."""
        meta = self.meta
        of_step = (meta.block_tables, meta.query_starts, meta.context_lens)
        return (self.query, self.kv_layer, self.kv_scales, self.sinks, *of_step)

    def strides(self) -> tuple[int, ...]:
        """Returns the strides of these tensors, as kernels expect them."""
        scales = (0, 0, 0, 0)
        if self.kv_scales is not None:
            block, kind, head, slot = self.kv_scales.stride()
            scales = (block, kind if self.value_dim is None else 0, head, slot)
        of_query, of_tables = self.query.stride()[:2], self.meta.block_tables.stride(0)
        return (*of_query, of_tables, *self.kv_layer.stride()[:4], *scales)

    def constants(self, part: Pass) -> dict[str, int]:
        """Returns what both kernels are compiled for."""
        value_dim = self.num_value_elements
        rest_dim = self.query.shape[2] - value_dim
        return {
            "HEAD_DIM": value_dim,
            "PADDED_DIM": padded_dim(value_dim),
            "REST_DIM": rest_dim,
            "PADDED_REST": padded_dim(rest_dim),
            "IS_LATENT": self.value_dim is not None,
            "BLOCK_SIZE": self.kv_layer.shape[3],
            "BLOCK_M": part.block_m,
            "BLOCK_N": part.block_n,
            "HAS_SOFT_CAP": self.soft_cap is not None,
        }


@functools.cache
def _num_processors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _attend_splits(step: _Step, part: Pass, output: torch.Tensor) -> None:
    """Launches attention of the sequences of one pass, each context in as many splits."""
    splits = Splits.for_pass(part, output)
    attend_kernel[(part.num_blocks, part.num_kv_heads, part.num_splits)](
        *step.tensors(),
        output,
        splits.partials,
        splits.log_sums,
        *step.factors(),
        step.window,
        step.group_size,
        len(step.meta.context_lens),
        part.min_rows,
        part.max_rows,
        part.rows_per_block,
        part.min_tokens_per_split,
        *step.strides(),
        **step.constants(part),
        HAS_MANY_BLOCKS=part.has_many_blocks,
        HAS_FULL_TILES=part.has_many_blocks and step.sliding_window is None,
        num_warps=part.num_warps,
        num_stages=part.num_stages,
    )
    splits.combine(part, step.meta, step.window, output)


def _attend_shares(step: _Step, part: Pass, output: torch.Tensor) -> None:
    """Launches attention of the sequences of one pass by programs that share all contexts."""
    work = SharedWork.for_pass(part, step.meta, step.window, step.group_size, output)
    attend_shares_kernel[(part.num_programs,)](
        *step.tensors(),
        output,
        work.partials,
        work.log_sums,
        *step.factors(),
        step.window,
        step.group_size,
        len(step.meta.context_lens),
        work.words,
        part.num_kv_heads,
        part.rows_per_block,
        *step.strides(),
        **step.constants(part),
        num_warps=part.num_warps,
        num_stages=part.num_stages,
        maxnreg=part.max_registers,
    )
    work.combine(part, step.meta, output)
