"""Contexts that several programs share: what they leave, and how it is combined."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.attention_plan import Pass, padded_dim

__all__ = ["Splits"]


@dataclass(frozen=True, slots=True)
class Splits:
    """What programs leave of a step's rows, `[num_tokens * num_heads]`, to be combined.

    Attributes:
        max_splits: how many share a context at most. If only 1, the tensors have no rows.
        partials: `[rows, max_splits, head_dim]` float32, each split's result.
        log_sums: `[rows, max_splits]` float32, log2 of the sum of its weights.
        split_counts: `[rows]` int32; a row with 1 has its result in the output already.
    """

    max_splits: int
    partials: torch.Tensor
    log_sums: torch.Tensor
    split_counts: torch.Tensor

    @classmethod
    def for_passes(cls, query: torch.Tensor, passes: Sequence[Pass]) -> "Splits":
        """Memory for a step's passes, none of it written."""
        max_splits = max(part.num_splits for part in passes)
        num_rows = query.shape[0] * query.shape[1] if max_splits > 1 else 0
        shape = num_rows, max_splits
        return cls(
            max_splits,
            torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device),
            torch.empty(shape, dtype=torch.float32, device=query.device),
            torch.empty(num_rows, dtype=torch.int32, device=query.device),
        )

    def combine(self, output: torch.Tensor) -> None:
        """Completes `output`, `[num_tokens, num_heads, head_dim]` contiguous."""
        if self.max_splits == 1:
            return
        head_dim = output.shape[2]
        _combine_kernel[(len(self.split_counts),)](
            self.partials,
            self.log_sums,
            self.split_counts,
            output,
            self.max_splits,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim(head_dim),
            PADDED_SPLITS=triton.next_power_of_2(self.max_splits),
        )


@triton.jit(do_not_specialize=["max_splits"])
def _combine_kernel(
    partials,
    log_sums,
    split_counts,
    output,
    max_splits,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
):
    """`output = sum(2^log_sums * partials) / sum(2^log_sums)` over a row's splits.

    Program i combines row i of `[num_tokens * num_heads]`, unless it had a single split. What a
    row without a sequence has for a count is not trusted.
    """
    row = tl.program_id(0).to(tl.int64)
    num_used_splits = tl.minimum(tl.load(split_counts + row), max_splits)
    if num_used_splits <= 1:
        return
    splits = tl.arange(0, PADDED_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    is_used = splits < num_used_splits
    parts = row * max_splits + splits
    logs = tl.load(log_sums + parts, mask=is_used, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    is_element = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = partials + parts[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(pointers, mask=is_element, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    out = output + row * HEAD_DIM + dims
    tl.store(out, result.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
