"""The native CPU kernels of mixtures of experts, in float32 and bfloat16."""

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.experts import ExpertScores, Routing, RoutingRule
from kernels.layer_kinds import Activation
from kernels.library import commands
from kernels.native.ops import is_vector, residual_rows, run_command
from kernels.native.packed_weight import ELEMENT_TYPES, PanelWeight
from kernels.ranks import Cut
from kernels.weights import WeightStack, WeightUse

__all__ = ["combine_experts", "expert_linear", "route_experts"]

_SCORES = {ExpertScores.SOFTMAX: 0, ExpertScores.SOFTMAX_OF_CHOSEN: 1, ExpertScores.SIGMOID: 2}


@NATIVE.implements(reference.route_experts)
def route_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    experts: Cut,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    num_rows, num_experts = logits.shape
    assert logits.stride(1) == 1 or num_experts == 1
    assert rule.top_k <= num_experts == experts.total
    assert num_experts % rule.num_groups == 0
    assert rule.group_terms <= num_experts // rule.num_groups
    for vector in (bias, expert_scales):
        assert vector is None or is_vector(vector, num_experts, torch.float32)
    weights = torch.empty((num_rows, rule.top_k))
    slots = torch.empty((num_rows, rule.top_k), dtype=torch.int32)
    rows = torch.empty(num_rows * rule.top_k, dtype=torch.int32)
    starts = torch.empty(experts.size + 1, dtype=torch.int32)
    run_command(
        commands.ROUTE_EXPERTS,
        ELEMENT_TYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        num_rows,
        num_experts,
        rule.top_k,
        _SCORES[rule.scores],
        _address(bias),
        _address(expert_scales),
        rule.num_groups,
        rule.top_groups,
        rule.group_terms,
        rule.normalizes,
        rule.scale,
        rule.rounds,
        experts.start,
        experts.end,
        weights.data_ptr(),
        slots.data_ptr(),
        rows.data_ptr(),
        starts.data_ptr(),
        keep=(logits, weights, slots, rows, starts),
    )
    return Routing(weights, slots, rows, starts)


@NATIVE.implements(reference.expert_linear)
def expert_linear(
    hidden: torch.Tensor,
    weight: WeightStack,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    gathers: bool,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    assert isinstance(weight.template, PanelWeight)
    assert hidden.dtype == weight.dtype
    assert hidden.shape[1] == weight.num_columns
    assert hidden.stride(1) == 1 or weight.num_columns == 1
    num_slots = len(routing.rows)
    assert gathers or len(hidden) == num_slots
    assert len(routing.starts) == weight.num_matrices + 1
    if bias is not None:
        assert is_vector(bias.flatten(), weight.num_rows, hidden.dtype)
    is_gated = weight.use is WeightUse.GATED_LINEAR
    width = weight.rows_per_matrix // 2 if is_gated else weight.rows_per_matrix
    out = torch.empty((num_slots, width), dtype=hidden.dtype)
    run_command(
        commands.EXPERT_LINEAR,
        ELEMENT_TYPES[hidden.dtype],
        hidden.data_ptr(),
        hidden.stride(0),
        num_slots,
        weight.num_columns,
        weight.data.data_ptr(),
        weight.num_matrices,
        weight.data.stride(0) * weight.data.itemsize // 4,
        width,
        0 if bias is None else bias.data_ptr(),
        is_gated,
        activation.value if is_gated else 0,
        routing.rows.data_ptr() if gathers else 0,
        routing.starts.data_ptr(),
        out.data_ptr(),
        *weight.template.form,
        keep=(hidden, routing.rows, routing.starts, out),
    )
    return out


@NATIVE.implements(reference.combine_experts)
def combine_experts(
    outputs: torch.Tensor,
    routing: Routing,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    out_dtype = out_dtype or outputs.dtype
    (num_rows, top_k), width = routing.slots.shape, outputs.shape[1]
    assert outputs.is_contiguous()
    assert len(outputs) == num_rows * top_k
    assert out_dtype in (torch.float32, outputs.dtype)
    keep = [outputs, routing.weights, routing.slots]
    if shared is not None:
        assert shared.dtype == torch.float32
        assert shared.shape == (num_rows, width)
        assert shared.is_contiguous()
        keep.append(shared)
    if shared_gate is not None:
        assert shared_gate.dtype == outputs.dtype
        assert shared_gate.shape == (num_rows, 1)
        keep.append(shared_gate)
    if residual is not None:
        residual = residual_rows(residual, outputs.dtype, (num_rows, width))
        keep.append(residual)
    out = torch.empty((num_rows, width), dtype=out_dtype)
    run_command(
        commands.COMBINE_EXPERTS,
        ELEMENT_TYPES[outputs.dtype],
        outputs.data_ptr(),
        num_rows,
        width,
        top_k,
        routing.weights.data_ptr(),
        routing.slots.data_ptr(),
        _address(shared),
        _address(shared_gate),
        0 if shared_gate is None else shared_gate.stride(0),
        _address(residual),
        0 if residual is None else residual.stride(0),
        out.data_ptr(),
        out_dtype == torch.float32,
        keep=(*keep, out),
    )
    return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
