"""Cases of attention: KV is read from memory, or written there; queries are in cache."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.kernels.case import (
    CPU,
    ByteSpan,
    Call,
    Case,
    Cost,
    DecoderShape,
    Numbers,
    Result,
    Sizes,
    attention_cost,
)
from kernels import AttentionMetadata, Rotation

__all__ = ["BLOCK_SIZE", "attention_cases", "rotation_cases", "step_metadata"]

BLOCK_SIZE = 16
"""The engine's default."""
_WINDOW = 512
_ROTATED_CONTEXT = 512
_LATENT_HEADS, _LATENT_DIM, _LATENT_ROTARY_DIM = 16, 512, 64  # those of DeepSeek-V2-Lite


@dataclass(frozen=True, slots=True)
class _AttentionStep:
    """The sequences of a step, and how much of them it computes."""

    what: str
    size: str
    spans: tuple[ByteSpan, ...]
    sliding_window: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(span.num_queries for span in self.spans)


def attention_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Decoding, chunks of a prompt, both within a window, and decoding with latent attention."""
    for step in _steps(sizes):
        yield Case(
            "paged_attention",
            step.what,
            step.size,
            attention_cost(
                step.spans,
                num_query_features=shape.num_query_features,
                kv_bytes_per_token=2 * shape.num_kv_features * dtype.itemsize,
                sliding_window=step.sliding_window,
            ),
            max(span.context for span in step.spans),
            partial(_attention_calls, shape, step),
        )
    head_dim = _LATENT_DIM + _LATENT_ROTARY_DIM
    latent = replace(shape, num_heads=_LATENT_HEADS, num_kv_heads=1, head_dim=head_dim)
    step = _decode_step(4, 2048)
    yield Case(
        "paged_attention",
        f"{step.what}, latent",
        step.size,
        attention_cost(
            step.spans,
            num_query_features=_LATENT_HEADS * (head_dim + _LATENT_DIM) // 2,
            kv_bytes_per_token=head_dim * dtype.itemsize,
        ),
        2048,
        partial(_attention_calls, latent, step, value_dim=_LATENT_DIM),
    )


def rotation_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Cases of `rotate_and_write_kv` on similar steps: Q, K and V are read, K and V written."""
    num_moved = shape.num_query_features + 4 * shape.num_kv_features
    decodes = (_decode_step(number, _ROTATED_CONTEXT) for number in sizes.rotated)
    for step in (*decodes, _chunk(*sizes.chunks[0])):
        yield Case(
            "rotate_and_write_kv",
            step.what,
            step.size,
            Cost(step.num_tokens * num_moved * dtype.itemsize),
            2,
            partial(_rotation_calls, shape, step),
            is_recordable=False,
        )


def _steps(sizes: Sizes) -> Iterator[_AttentionStep]:
    for batch_size, context in sizes.decode:
        yield _decode_step(batch_size, context)
    for batch_size, context, longest in sizes.uneven:
        yield _uneven_step(batch_size, context, longest)
    for num_cached, num_queries in sizes.chunks:
        yield _chunk(num_cached, num_queries)
    yield _decode_step(16, 2048, _WINDOW)
    yield _chunk(*sizes.chunks[-1], _WINDOW)


def _decode_step(batch_size: int, context: int, window: int | None = None) -> _AttentionStep:
    spans = (ByteSpan(context - 1, 1),) * batch_size
    return _AttentionStep(_named("decode", window), f"{batch_size} x {context}", spans, window)


def _uneven_step(batch_size: int, context: int, longest: int) -> _AttentionStep:
    spans = (*(ByteSpan(context - 1, 1),) * batch_size, ByteSpan(longest - 1, 1))
    size = f"{batch_size} x {context}, 1 x {longest}"
    return _AttentionStep("decode, uneven", size, spans)


def _chunk(num_cached: int, num_queries: int, window: int | None = None) -> _AttentionStep:
    size = f"{num_queries} after {num_cached}"
    return _AttentionStep(
        _named("chunk", window), size, (ByteSpan(num_cached, num_queries),), window
    )


def _named(what: str, window: int | None) -> str:
    return what if window is None else f"{what}, window {window}"


def _attention_calls(
    shape: DecoderShape,
    step: _AttentionStep,
    numbers: Numbers,
    num_copies: int,
    *,
    value_dim: int | None = None,
) -> Sequence[Call]:
    meta, num_blocks = step_metadata(step.spans, numbers.device)
    query = numbers.normal(step.num_tokens, shape.num_heads, shape.head_dim)
    num_parts = 2 if value_dim is None else 1
    return [
        partial(
            numbers.module.paged_attention,
            query,
            layer,
            meta,
            scale=shape.head_dim**-0.5,
            sliding_window=step.sliding_window,
            value_dim=value_dim,
        )
        for layer in _kv_layers(shape, numbers, num_blocks, num_copies, num_parts)
    ]


def _rotation_calls(
    shape: DecoderShape, step: _AttentionStep, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    meta, num_blocks = step_metadata(step.spans, numbers.device)
    angles = numbers.in_float32().normal(step.num_tokens, shape.head_dim // 2)
    rotation = Rotation(angles.cos(), angles.sin())
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv = numbers.normal(step.num_tokens, num_heads, shape.head_dim)
    return [
        partial(_rotate, numbers, shape, qkv.clone(), layer, meta, rotation)
        for layer in _kv_layers(shape, numbers, num_blocks, num_copies)
    ]


def _rotate(
    numbers: Numbers,
    shape: DecoderShape,
    qkv: torch.Tensor,
    layer: torch.Tensor,
    meta: AttentionMetadata,
    rotation: Rotation,
) -> Result:
    nums_heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    query, key, value = torch.split(qkv, nums_heads, dim=1)
    rotate = numbers.module.rotate_and_write_kv
    return rotate(query, key, value, layer, meta, rotation=rotation), layer


def _kv_layers(
    shape: DecoderShape, numbers: Numbers, num_blocks: int, num_copies: int, num_parts: int = 2
) -> list[torch.Tensor]:
    """Makes `num_copies` layers of equal KV, `[num_blocks, num_parts, num_kv_heads, BLOCK_SIZE,
    head_dim]`.

    As in the engine, a block of a pool holds all layers of the model; several pools are made if
    one has too few layers.
    """
    block = (num_parts, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    layer = numbers.normal(num_blocks, *block, seed=3)
    num_layers = min(num_copies, shape.num_layers)
    pools = [
        layer.unsqueeze(1).repeat(1, num_layers, 1, 1, 1, 1)
        for _ in range(-(-num_copies // num_layers))
    ]
    layers = [pool[:, index] for pool in pools for index in range(num_layers)]
    return layers[:num_copies]


def step_metadata(
    spans: Sequence[ByteSpan], device: torch.device = CPU
) -> tuple[AttentionMetadata, int]:
    """Returns metadata of a step with scattered blocks, and the number of blocks."""
    sizes = [-(-span.context // BLOCK_SIZE) for span in spans]
    block_ids = random.Random(0).sample(range(sum(sizes)), sum(sizes))
    tables = torch.zeros((len(spans), max(sizes)), dtype=torch.int32)
    starts, slots = [0], []
    for table, span, size in zip(tables, spans, sizes, strict=True):
        own = torch.tensor([block_ids.pop() for _ in range(size)])
        table[:size] = own
        positions = torch.arange(span.num_cached, span.context)
        slots.append(own[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
        starts.append(starts[-1] + span.num_queries)
    contexts = [span.context for span in spans]
    meta = AttentionMetadata(
        block_tables=tables.to(device),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(span.num_queries for span in spans),
        max_context_len=max(contexts),
    )
    return meta, sum(sizes)
