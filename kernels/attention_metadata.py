"""`AttentionMetadata`: the one argument that tells attention which KV to read."""

from dataclasses import dataclass

import torch

__all__ = ["AttentionMetadata"]


# Known by identity: kernels keep what they derive from it for as long as it lives.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionMetadata:
    """One step's sequences, laid end to end in one row of query tokens.

    Attributes:
        block_tables: `[num_seqs, max_blocks]` int32; past a context, and before
            its window, any ids of the pool.
        query_starts: `[num_seqs + 1]` int32; sequence i's query tokens are rows
            `query_starts[i]` to `query_starts[i + 1]`.
        context_lens: `[num_seqs]` int32; tokens in the KV cache once this
            step's are written. Query j of sequence i stands at position
            `context_lens[i] - query_len[i] + j`.
        slot_mapping: `[num_tokens]` int64; where each query token's K and V go:
            `block_id * block_size + offset`.
        max_query_len: longest query of the step.
        max_context_len: longest context of the step.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_context_len: int
