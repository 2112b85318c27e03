"""Tensor primitives behind one dispatch. `kernels.reference` is the oracle.

Each function here has the signature and meaning of its namesake in
`kernels.reference`, and runs the one of the module that serves the tensors'
device and type. To add kernels for a device, write
a module with the same names (it may import what it does not speed up from the
reference) and enter it below.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

import torch

import kernels.reference as reference  # `from kernels` would ask this module for it
from kernels.attention_metadata import AttentionMetadata
from kernels.cuda_graph import CudaGraphRecorder
from kernels.draws import INVALID_TOKEN, DrawTable
from kernels.memory import fresh_zeros
from kernels.native.library import TRITON, load, select
from kernels.paged_kv import AskingTokens, LayerKv, PagedKv
from kernels.recorded_step import Arena, RecordedStep
from kernels.rotary import QkNorms, Rotation
from kernels.row_state import DecodeInputs, RowState
from kernels.threads import default_num_threads, num_threads, set_num_threads
from kernels.weights import RowsOfWeight, Weight, WeightUse

__all__ = [
    "INVALID_TOKEN",
    "Arena",
    "AskingTokens",
    "AttentionMetadata",
    "CudaGraphRecorder",
    "DecodeInputs",
    "DrawTable",
    "LayerKv",
    "PagedKv",
    "QkNorms",
    "RecordedStep",
    "Rotation",
    "RowState",
    "RowsOfWeight",
    "Weight",
    "WeightUse",
    "copy_blocks",
    "default_num_threads",
    "draw_tokens",
    "embed",
    "fresh_zeros",
    "gather_blocks",
    "keep_drawn",
    "lay_out_decode",
    "linear",
    "linear_silu_and_mul",
    "make_weight",
    "mark_step",
    "num_threads",
    "paged_attention",
    "point_to",
    "record_step",
    "rms_norm",
    "rotary_angles",
    "rotate_and_write_kv",
    "row_maxima",
    "scatter_blocks",
    "set_num_threads",
    "swap_blocks",
    "take_rows",
    "token_logprobs",
    "write_table_entries",
]

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _modules() -> Mapping[tuple[str, torch.dtype], ModuleType]:
    """By device type and element type; what is not here is the reference's.

    Found at first use, so that what explains or mends a bad choice can import this module.
    """
    modules: dict[tuple[str, torch.dtype], ModuleType] = {}
    if select().variant == TRITON:
        modules.update(_of_types("cpu", import_module("kernels.triton.ops"), _FLOAT_TYPES))
    elif load() is not None:
        native = import_module("kernels.native.ops")
        modules.update(_of_types("cpu", native, (torch.float32, torch.bfloat16)))
    if torch.cuda.is_available() and find_spec("triton") is not None:
        modules.update(_of_types("cuda", import_module("kernels.triton.ops"), _FLOAT_TYPES))
    return MappingProxyType(modules)


def _of_types(
    device_type: str, module: ModuleType, dtypes: Sequence[torch.dtype]
) -> dict[tuple[str, torch.dtype], ModuleType]:
    return {(device_type, dtype): module for dtype in dtypes}


def _kernels_for(tensor: torch.Tensor) -> ModuleType:
    return _modules().get((tensor.device.type, tensor.dtype), reference)


def _kernels_on(device: torch.device) -> ModuleType:
    """Of what no element type decides."""
    return _modules().get((device.type, torch.float32), reference)


def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
) -> Weight:
    """Memory for a weight in its kernels' layout; see `reference.make_weight`."""
    make = _modules().get((device.type, dtype), reference).make_weight
    weight: Weight = make(num_rows, num_columns, dtype, device, use)
    return weight


def embed(token_ids: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Rows of an embedding; see `reference.embed`."""
    rows: torch.Tensor = _kernels_for(weight.data).embed(token_ids, weight)
    return rows


def take_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a matrix; see `reference.take_rows`."""
    taken: torch.Tensor = _kernels_for(matrix).take_rows(matrix, rows)
    return taken


def linear(
    hidden: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Linear layer, plus what skips it; see `reference.linear`."""
    multiply = _kernels_for(weight.data).linear
    out: torch.Tensor = multiply(hidden, weight, bias, residual, out_dtype=out_dtype)
    return out


def linear_silu_and_mul(
    hidden: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Gated linear layer; see `reference.linear_silu_and_mul`."""
    out: torch.Tensor = _kernels_for(weight.data).linear_silu_and_mul(hidden, weight, bias)
    return out


def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    """Angles of rotary positions; see `reference.rotary_angles`."""
    angles = _kernels_for(frequencies).rotary_angles
    rotation: Rotation = angles(positions, frequencies, amplitude)
    return rotation


def rotate_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    rotation: Rotation | None = None,
    norms: QkNorms | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prepares a step for attention; see `reference.rotate_and_write_kv`."""
    prepare = _kernels_for(query).rotate_and_write_kv
    prepared: torch.Tensor = prepare(
        query, key, value, kv_layer, meta, rotation=rotation, norms=norms, kv_scales=kv_scales
    )
    return prepared


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention over paged KV; see `reference.paged_attention`."""
    attend = _kernels_for(query).paged_attention
    output: torch.Tensor = attend(
        query,
        kv_layer,
        meta,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        kv_scales=kv_scales,
    )
    return output


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm; see `reference.rms_norm`."""
    normed: torch.Tensor = _kernels_for(hidden).rms_norm(hidden, weight, eps)
    return normed


def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    """Runs a step and records it where it can be; see `reference.record_step`."""
    record = _kernels_on(device).record_step
    recorded: tuple[torch.Tensor, RecordedStep | None] = record(device, arena, run)
    return recorded


def mark_step(device: torch.device, number: int) -> None:
    """Notes a place in the step that is recorded; see `reference.mark_step`."""
    _kernels_on(device).mark_step(device, number)


def point_to(recorded: AttentionMetadata, current: AttentionMetadata) -> None:
    """Gives recorded steps another step's metadata; see `reference.point_to`."""
    _kernels_on(current.slot_mapping.device).point_to(recorded, current)


def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest value and where it is; see `reference.row_maxima`."""
    found: tuple[torch.Tensor, torch.Tensor] = _kernels_for(logits).row_maxima(logits, out)
    return found


def draw_tokens(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    draws: DrawTable,
    *,
    draw_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor | None = None,
    filtered: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws tokens from logits; see `reference.draw_tokens`."""
    draw = _kernels_for(logits).draw_tokens
    tokens: torch.Tensor = draw(
        logits,
        maxima,
        likeliest,
        draws,
        draw_ids=draw_ids,
        positions=positions,
        logit_rows=logit_rows,
        filtered=filtered,
        out=out,
    )
    return tokens


def token_logprobs(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    tokens: torch.Tensor,
    logit_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-softmax at one token per row; see `reference.token_logprobs`."""
    find = _kernels_for(logits).token_logprobs
    logprobs: torch.Tensor = find(logits, maxima, tokens, logit_rows)
    return logprobs


def lay_out_decode(
    rows: RowState, row_ids: torch.Tensor, block_size: int, inputs: DecodeInputs
) -> None:
    """Writes a decode step's inputs; see `reference.lay_out_decode`."""
    _kernels_on(rows.positions.device).lay_out_decode(rows, row_ids, block_size, inputs)


def keep_drawn(rows: RowState, row_ids: torch.Tensor, tokens: torch.Tensor) -> None:
    """Moves rows on by a token each; see `reference.keep_drawn`."""
    _kernels_on(rows.positions.device).keep_drawn(rows, row_ids, tokens)


def write_table_entries(
    tables: torch.Tensor, indices: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Enters block ids in rows' tables; see `reference.write_table_entries`."""
    _kernels_on(tables.device).write_table_entries(tables, indices, block_ids)


def gather_blocks(
    pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    """Copies blocks out of the pool; see `reference.gather_blocks`."""
    _kernels_on(pool.device).gather_blocks(pool, block_ids, out)


def scatter_blocks(
    source: torch.Tensor, pool: torch.Tensor, block_ids: Sequence[int] | torch.Tensor
) -> None:
    """Copies blocks into the pool; see `reference.scatter_blocks`."""
    _kernels_on(pool.device).scatter_blocks(source, pool, block_ids)


def copy_blocks(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies whole blocks within the pool; see `reference.copy_blocks`."""
    _kernels_on(pool.device).copy_blocks(pool, pairs)


def swap_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copies blocks from one pool to another; see `reference.swap_blocks`."""
    device = target.device if source.device.type == "cpu" else source.device
    _kernels_on(device).swap_blocks(source, target, pairs)
