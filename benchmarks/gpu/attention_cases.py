"""Cases of the attention kernels and of the kernels that write KV."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

import kernels
from benchmarks.gpu.kernel_case import KernelCase, Prepared, normal
from benchmarks.gpu.plan import Plan
from benchmarks.kernels.attention import BLOCK_SIZE, step_metadata
from benchmarks.kernels.case import DecoderShape, Result
from benchmarks.kernels.cost import Cost, Span, attention_cost
from kernels import AttentionMetadata, Rotation, reference
from kvstore.layout import DTYPE_BYTES

__all__ = ["attention_cases", "rotation_cases"]

_NUM_COMPARED_QUERIES = 64
_NUM_COMPARED_SEQUENCES = 3


@dataclass(frozen=True, slots=True)
class _Step:
    """A step over sequences of one length, and the KV of one layer per copy of the inputs."""

    shape: DecoderShape
    plan: Plan
    span: Span
    num_seqs: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.span.num_queries

    @property
    def scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def metadata(self) -> tuple[AttentionMetadata, int]:
        """Returns the attention metadata on the device, and the number of blocks."""
        meta, num_blocks = step_metadata([self.span] * self.num_seqs)
        return _moved(meta, self.plan.device), num_blocks

    def layers(self, num_blocks: int, num_copies: int) -> list[torch.Tensor]:
        """Returns the KV of the layers, as in the engine: each block has all layers."""
        shape = self.shape
        block = (2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        pool = normal(self.plan, num_blocks, num_copies, *block, seed=3)
        return [pool[:, layer] for layer in range(num_copies)]


def attention_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of decode steps, then of prompts and chunks of prompts."""
    for context in plan.contexts:
        for num_seqs in plan.batch_sizes:
            step = _Step(shape, plan, Span(context - 1, 1), num_seqs)
            yield _attention_case("decode attention", f"{num_seqs} x {context}", step)
    for num_cached, num_queries in plan.kernel_prompts:
        step = _Step(shape, plan, Span(num_cached, num_queries), 1)
        yield _attention_case("prefill attention", f"{num_queries} after {num_cached}", step)


def rotation_cases(shape: DecoderShape, plan: Plan) -> Iterator[KernelCase]:
    """Returns the cases of rotating tokens and writing their KV, for a decode step and a prompt."""
    num_moved = 2 * shape.num_query_features + 4 * shape.num_kv_features
    for num_seqs, span in (
        # Each sequence has one block: earlier KV does not matter here.
        *((num_seqs, Span(BLOCK_SIZE - 1, 1)) for num_seqs in plan.batch_sizes),
        (1, Span(0, plan.prompts[0][1])),
    ):
        step = _Step(shape, plan, span, num_seqs)
        yield KernelCase(
            "rotate and write KV",
            f"{step.num_tokens} tokens",
            Cost(step.num_tokens * num_moved * DTYPE_BYTES[plan.dtype]),
            2,
            partial(_prepare_rotation, step),
        )


def _attention_case(name: str, size: str, step: _Step) -> KernelCase:
    cost = attention_cost(
        [step.span] * step.num_seqs,
        num_query_features=step.shape.num_query_features,
        kv_bytes_per_token=2 * step.shape.num_kv_features * DTYPE_BYTES[step.plan.dtype],
    )
    return KernelCase(name, size, cost, step.span.context, partial(_prepare_attention, step))


def _prepare_attention(step: _Step, num_copies: int) -> Prepared:
    meta, num_blocks = step.metadata()
    layers = step.layers(num_blocks, num_copies)
    query = normal(step.plan, step.num_tokens, step.shape.num_heads, step.shape.head_dim)
    calls = [
        partial(kernels.paged_attention, query, layer, meta, scale=step.scale) for layer in layers
    ]
    return Prepared(calls, lambda: _compare_attention(step, calls[0](), query, layers[0], meta))


def _compare_attention(
    step: _Step,
    output: torch.Tensor,
    query: torch.Tensor,
    layer: torch.Tensor,
    meta: AttentionMetadata,
) -> tuple[Result, Result]:
    """Compares the last queries of some sequences; the reference lacks memory for all."""
    per_seq = step.span.num_queries
    num_queries = min(per_seq, _NUM_COMPARED_QUERIES)
    chosen = sorted({0, step.num_seqs // 2, step.num_seqs - 1})[:_NUM_COMPARED_SEQUENCES]
    rows = [
        row
        for seq in chosen
        for row in range((seq + 1) * per_seq - num_queries, (seq + 1) * per_seq)
    ]
    num_blocks = -(-step.span.context // BLOCK_SIZE)
    used = meta.block_tables[chosen, :num_blocks].flatten()
    expected = reference.paged_attention(
        query[rows].float(),
        layer[used.long()].float(),
        _uniform_metadata(len(chosen), num_queries, step.span.context, query.device),
        scale=step.scale,
    )
    return output[rows], expected


def _uniform_metadata(
    num_seqs: int, num_queries: int, context: int, device: torch.device
) -> AttentionMetadata:
    """Returns metadata of sequences of one length, whose blocks are contiguous."""
    num_blocks = -(-context // BLOCK_SIZE)
    tables = torch.arange(num_seqs * num_blocks, dtype=torch.int32, device=device)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_queries
    return AttentionMetadata(
        block_tables=tables.view(num_seqs, num_blocks),
        query_starts=starts,
        context_lens=torch.full((num_seqs,), context, dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
        max_query_len=num_queries,
        max_context_len=context,
    )


def _prepare_rotation(step: _Step, num_copies: int) -> Prepared:
    meta, num_blocks = step.metadata()
    layers = step.layers(num_blocks, num_copies)
    shape, plan = step.shape, step.plan
    angles = normal(plan, step.num_tokens, shape.head_dim // 2, seed=5).float()
    rotation = Rotation(angles.cos(), angles.sin())
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    states = normal(plan, step.num_tokens, num_heads, shape.head_dim)
    calls = [
        partial(_rotate, kernels.rotate_and_write_kv, shape, states.clone(), layer, meta, rotation)
        for layer in layers
    ]

    def compare() -> tuple[Result, Result]:
        layer = layers[0].clone()
        known = layer.float(), meta, rotation
        expected = _rotate(reference.rotate_and_write_kv, shape, states.float(), *known)
        return _rotate(
            kernels.rotate_and_write_kv, shape, states.clone(), layer, meta, rotation
        ), expected

    return Prepared(calls, compare)


def _rotate(
    rotate_and_write: Callable[..., torch.Tensor],
    shape: DecoderShape,
    states: torch.Tensor,
    layer: torch.Tensor,
    meta: AttentionMetadata,
    rotation: Rotation,
) -> Result:
    nums_heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    query, key, value = torch.split(states, nums_heads, dim=1)
    return rotate_and_write(query, key, value, layer, meta, rotation=rotation), layer


def _moved(meta: AttentionMetadata, device: str) -> AttentionMetadata:
    return replace(
        meta,
        block_tables=meta.block_tables.to(device),
        query_starts=meta.query_starts.to(device),
        context_lens=meta.context_lens.to(device),
        slot_mapping=meta.slot_mapping.to(device),
    )
