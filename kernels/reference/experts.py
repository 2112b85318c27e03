"""Mixtures of experts, in plain torch: routing, the experts' layers, and the weighted sum."""

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from kernels.dispatch import kernel
from kernels.experts import MIN_WEIGHT_SUM, ExpertScores, Routing, RoutingRule
from kernels.layer_kinds import Activation
from kernels.ranks import Cut
from kernels.reference.pointwise import gate_rows
from kernels.weights import WeightStack, WeightUse

__all__ = ["combine_experts", "expert_linear", "route_experts"]


@kernel("logits.device", "logits.dtype")
def route_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    experts: Cut,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    """Chooses the experts of each row by their scores.

    NaN ranks above all numbers. Equal scores rank in the order of `torch.topk` on a CPU; with
    Triton, the lower number first.

    Args:
        logits: `[rows, num_experts]`, neighbouring columns adjacent.
        rule: how rows choose experts.
        experts: the experts of this rank.
        bias: `[num_experts]` float32; added to the scores that rank experts and groups, but not to
            the weights (arXiv:2408.15664).
        expert_scales: `[num_experts]` float32; factors on the weights of each expert, after
            `rule.scale`.
    """
    scores = _scores(logits, rule)
    ranking = scores if bias is None else scores + bias
    if rule.top_groups < rule.num_groups:
        ranking = _of_top_groups(ranking, rule)
    ids = torch.topk(ranking, rule.top_k).indices
    weights = scores.gather(1, ids)
    if rule.scores is ExpertScores.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1, dtype=torch.float32)
    if rule.normalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_WEIGHT_SUM)
    weights = weights * rule.scale
    if expert_scales is not None:
        weights = weights * expert_scales[ids]
    if rule.rounds:
        weights = weights.to(logits.dtype).float()
    numbers = ids.flatten() - experts.start
    is_local = (numbers >= 0) & (numbers < experts.size)
    numbers = numbers.where(is_local, experts.size)  # of other ranks: behind all others
    pairs = numbers.argsort(stable=True)
    slots = torch.empty_like(pairs)
    slots[pairs] = torch.arange(len(pairs), device=logits.device)
    starts = torch.zeros(experts.size + 2, dtype=torch.int32, device=logits.device)
    starts[1:] = numbers.bincount(minlength=experts.size + 1).cumsum(0)
    return Routing(
        weights,
        slots.where(is_local, -1).int().view(ids.shape),
        (pairs // rule.top_k).int(),
        starts[:-1],
    )


def _scores(logits: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Returns the scores of all experts, `[rows, num_experts]`."""
    if rule.scores is ExpertScores.SOFTMAX:
        return logits.softmax(-1, dtype=torch.float32)
    return logits.float().sigmoid() if rule.scores is ExpertScores.SIGMOID else logits


def _of_top_groups(scores: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """Returns the scores, with minus infinity for those outside of each row's highest groups."""
    num_rows, num_experts = scores.shape
    groups = scores.view(num_rows, rule.num_groups, num_experts // rule.num_groups)
    group_scores = groups.topk(rule.group_terms).values.sum(-1)
    ids = group_scores.topk(rule.top_groups).indices
    is_outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, ids, value=False)
    return groups.masked_fill(is_outside.unsqueeze(-1), -torch.inf).flatten(1)


@kernel("weight.device", "weight.dtype")
def expert_linear(
    hidden: torch.Tensor,
    weight: WeightStack,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    gathers: bool,
    activation: Activation = Activation.SILU,
) -> torch.Tensor:
    """Computes each expert's linear layer for the rows that chose it.

    Args:
        hidden: `[rows, num_columns]` if `gathers`, else by slot, `[rows * top_k, num_columns]`.
        weight: the experts' matrices. One made for `WeightUse.GATED_LINEAR` computes
            `activation(hidden @ gate.T) * (hidden @ up.T)`, as `gate_rows` does.
        routing: of `route_experts`.
        bias: `[num_experts, rows of a matrix]`.
        gathers: whether the slots' rows must be gathered first.
        activation: of the gates of a gated layer.

    Returns:
        `[rows * top_k, width]` by slot; slots that are not in use are undefined.
    """
    is_gated = weight.use is WeightUse.GATED_LINEAR
    width = weight.rows_per_matrix // 2 if is_gated else weight.rows_per_matrix
    out = hidden.new_empty(len(routing.rows), width)
    starts = routing.starts.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            inputs = hidden[routing.rows[start:end]] if gathers else hidden[start:end]
            matrix = weight.data[number]
            sums = F.linear(inputs, matrix, None if bias is None else bias[number])
            if is_gated:
                gate, up = sums.chunk(2, dim=-1)
                sums = gate_rows(up, gate, activation)
            out[start:end] = sums
    return out


@kernel("outputs.device", "outputs.dtype")
def combine_experts(
    outputs: torch.Tensor,
    routing: Routing,
    *,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Adds up the weighted outputs of each row's experts, in order of their scores.

    Sums are in float32, and rounded once.

    Args:
        outputs: `[rows * top_k, width]` by slot.
        routing: of `route_experts`.
        shared: `[rows, width]` float32; outputs of an expert that all rows have.
        shared_gate: `[rows, 1]`; `shared` is multiplied by its sigmoid.
        residual: `[rows, width]`, of the type of `outputs`; it is added.
        out_dtype: of the result; None for that of `outputs`. float32 is the only other one.

    Returns:
        `[rows, width]`.
    """
    is_local = (routing.slots >= 0).unsqueeze(-1)
    chosen = outputs[routing.slots.clamp(min=0)].float() * routing.weights.unsqueeze(-1)
    total = torch.where(is_local, chosen, 0.0).sum(1)
    if shared is not None:
        total += shared if shared_gate is None else shared * shared_gate.float().sigmoid()
    if residual is not None:
        total += residual
    return total.to(out_dtype or outputs.dtype)
