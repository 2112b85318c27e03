"""Mixtures of experts, in Triton: the experts' layers, and the weighted sum."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.experts import Routing
from kernels.layer_kinds import Activation
from kernels.triton.attention_kernels import product
from kernels.triton.launch import launch_table
from kernels.triton.pointwise import gated, with_dense_columns
from kernels.triton.quantized import layout_arguments
from kernels.triton.quantized_kernels import quantized_sums
from kernels.triton.scaled_weight import ScaledWeight
from kernels.weights import DenseWeight, WeightStack, WeightUse

__all__ = ["combine_experts", "expert_linear"]


@TRITON.implements(reference.expert_linear)
def expert_linear(
    hidden: torch.Tensor,
    weight: WeightStack,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    gathers: bool,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    hidden = with_dense_columns(hidden)
    is_gated = weight.use is WeightUse.GATED_LINEAR
    width = weight.rows_per_matrix // 2 if is_gated else weight.rows_per_matrix
    num_slots = len(routing.rows)
    out = torch.empty((num_slots, width), dtype=hidden.dtype, device=hidden.device)
    if not num_slots or not weight.num_matrices:
        return out
    launch = launch_table(hidden.device).expert_linear.for_size(
        triton.cdiv(num_slots, weight.num_matrices)
    )
    # As many tiles as there can be: every expert may have one that is not full.
    num_tiles = min(num_slots, triton.cdiv(num_slots, launch.block_m) + weight.num_matrices)
    _expert_linear_kernel[(num_tiles, triton.cdiv(width, launch.block_n))](
        hidden,
        weight.data,
        bias,
        routing.rows,
        routing.starts,
        out,
        hidden.stride(0),
        weight.num_columns,
        width,
        weight.num_matrices,
        **_layout_arguments(weight),
        ACTIVATION=activation.value if is_gated else 0,
        GATHERS=gathers,
        BLOCK_E=triton.next_power_of_2(weight.num_matrices),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def _layout_arguments(weight: WeightStack) -> dict[str, int | bool]:
    """Returns what kernels know of the rows of the experts' matrices; KIND is -1 for dense ones."""
    if isinstance(weight.template, ScaledWeight):
        return layout_arguments(weight.template)
    assert isinstance(weight.template, DenseWeight)
    places = dict.fromkeys(("scales_at", "zeros_at", "offsets_at", "RUN"), 0)
    flags = {"HAS_ZEROS": False, "HAS_OFFSETS": False}
    return {"row_bytes": weight.num_columns, "KIND": -1, **places, **flags}


@triton.jit
def _expert_linear_kernel(
    hidden,
    weight,
    bias,
    rows,
    starts,
    out,
    row_stride,
    num_columns,
    width,
    num_experts,
    row_bytes,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATHERS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`out = activation(hidden @ weight[e].T + bias[e])` by slot.

    The layer is gated unless ACTIVATION is 0. Dense matrices have KIND -1, and `row_bytes` counts
    their elements. Program (i, j) computes tile i, of up to BLOCK_M
    slots of one expert, and block j of the width. Tiles are numbered by expert; programs beyond
    the last one return.
    """
    experts = tl.arange(0, BLOCK_E)
    has_expert = experts < num_experts
    firsts = tl.load(starts + experts, mask=has_expert, other=0)
    ends = tl.load(starts + experts + 1, mask=has_expert, other=0)
    num_tiles = (ends - firsts + BLOCK_M - 1) // BLOCK_M
    last_tiles = tl.cumsum(num_tiles)
    tile = tl.program_id(0)
    expert = tl.sum((last_tiles <= tile).to(tl.int32))
    if expert >= num_experts:
        return
    is_expert = experts == expert
    tile -= tl.sum(tl.where(is_expert, last_tiles - num_tiles, 0))
    slots = tl.sum(tl.where(is_expert, firsts, 0)) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    has_slot = slots < tl.sum(tl.where(is_expert, ends, 0))
    sources = tl.load(rows + slots, mask=has_slot, other=0) if GATHERS else slots
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_output = outputs < width
    inputs = hidden + sources.to(tl.int64)[:, None] * row_stride
    num_rows = width * 2 if ACTIVATION != 0 else width
    matrix = weight + (expert.to(tl.int64) * num_rows + outputs) * row_bytes
    sums = _products(
        inputs,
        matrix,
        has_slot,
        has_output,
        num_columns,
        scales_at,
        zeros_at,
        offsets_at,
        KIND,
        RUN,
        HAS_ZEROS,
        HAS_OFFSETS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if bias is not None:
        biases = bias + expert * num_rows + outputs
        sums += tl.load(biases, mask=has_output, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != 0:
        up = _products(
            inputs,
            weight + (expert.to(tl.int64) * num_rows + width + outputs) * row_bytes,
            has_slot,
            has_output,
            num_columns,
            scales_at,
            zeros_at,
            offsets_at,
            KIND,
            RUN,
            HAS_ZEROS,
            HAS_OFFSETS,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if bias is not None:
            up += tl.load(biases + width, mask=has_output, other=0.0).to(tl.float32)[None, :]
        gates = sums.to(out.dtype.element_ty).to(tl.float32)
        values = up.to(out.dtype.element_ty).to(tl.float32)
        sums = gated(values, gates, ACTIVATION, out.dtype.element_ty)
    places = out + slots.to(tl.int64)[:, None] * width + outputs[None, :]
    mask = has_slot[:, None] & has_output[None, :]
    tl.store(places, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _products(
    inputs,
    matrix,
    has_slot,
    has_output,
    num_columns,
    scales_at,
    zeros_at,
    offsets_at,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Returns the sums of a tile's products, [BLOCK_M, BLOCK_N] float32.

    inputs: [BLOCK_M, 1] pointers to rows of inputs. matrix: [BLOCK_N] pointers to rows of weights.
    """
    if KIND >= 0:
        sums = quantized_sums(
            inputs,
            matrix,
            has_slot,
            has_output,
            num_columns,
            scales_at,
            zeros_at,
            offsets_at,
            KIND,
            RUN,
            HAS_ZEROS,
            HAS_OFFSETS,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, num_columns, BLOCK_K):
            columns = begin + tl.arange(0, BLOCK_K)
            has_column = columns < num_columns
            left = tl.load(
                inputs + columns[None, :], mask=has_slot[:, None] & has_column[None, :], other=0.0
            )
            right = tl.load(
                matrix[None, :] + columns[:, None],
                mask=has_column[:, None] & has_output[None, :],
                other=0.0,
            )
            sums = product(left, right, sums)
    return sums


@TRITON.implements(reference.combine_experts)
def combine_experts(
    outputs: torch.Tensor,
    routing: Routing,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    (num_rows, top_k), width = routing.slots.shape, outputs.shape[1]
    out = torch.empty((num_rows, width), dtype=out_dtype or outputs.dtype, device=outputs.device)
    if not num_rows:
        return out
    residual = None if residual is None else with_dense_columns(residual)
    launch = launch_table(outputs.device).pointwise.for_size(width)
    _combine_kernel[(num_rows, triton.cdiv(width, launch.block_size))](
        outputs,
        routing.weights,
        routing.slots,
        shared,
        shared_gate,
        residual,
        out,
        0 if shared_gate is None else shared_gate.stride(0),
        0 if residual is None else residual.stride(0),
        width,
        top_k,
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def _combine_kernel(
    outputs,
    weights,
    slots,
    shared,
    shared_gate,
    residual,
    out,
    gate_stride,
    residual_stride,
    width,
    top_k,
    BLOCK: tl.constexpr,
):
    """Adds up a row's weighted outputs; program (i, j) computes block j of row i."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(top_k):
        slot = tl.load(slots + row * top_k + rank).to(tl.int64)
        weight = tl.load(weights + row * top_k + rank)
        if slot >= 0:  # -1 for an expert of another rank
            chosen = tl.load(outputs + slot * width + columns, mask=mask, other=0.0)
            total += chosen.to(tl.float32) * weight
    if shared is not None:
        states = tl.load(shared + row * width + columns, mask=mask, other=0.0)
        if shared_gate is not None:
            gate = tl.load(shared_gate + row * gate_stride).to(tl.float32)
            states *= 1.0 / (1.0 + tl.exp(-gate))
        total += states
    if residual is not None:
        added = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0)
        total += added.to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=mask)
