"""Checks of kernels of mixtures of experts, for any implementation of them.

`ops` is a module or object with `make_weight_stack`, `route_experts`, `expert_linear` and
`combine_experts`.
"""

import torch

from kernels import Activation, Cut, ExpertScores, RoutingRule, WeightUse, reference
from tests.support.kernel_checks import (
    assert_within,
    eps_of,
    gated_values,
    normal,
    product_bound,
)

__all__ = [
    "CUTS",
    "RULES",
    "SCALED",
    "check_combination",
    "check_layer",
    "check_slots",
    "filled_experts",
    "numbers_of",
]

# Experts of the model, and how many each row chooses: odd numbers, one, and all.
RULES = {
    (5, 1): RoutingRule(1),
    (5, 5): RoutingRule(5, normalizes=True),
    (7, 2): RoutingRule(2, normalizes=True, rounds=False),
    (7, 3): RoutingRule(3, ExpertScores.SOFTMAX_OF_CHOSEN),
    (130, 2): RoutingRule(2),
    (9, 2): RoutingRule(2, scale=2.5, num_groups=3, top_groups=2, rounds=False),
    (35, 4): RoutingRule(
        4,
        ExpertScores.SIGMOID,
        normalizes=True,
        rounds=False,
        scale=1.7,
        num_groups=7,
        top_groups=3,
        group_terms=2,
    ),
    (33, 3): RoutingRule(3, ExpertScores.SIGMOID),
}
SCALED = [(7, 2), (7, 3), (35, 4)]
"""Those of `RULES` whose experts have factors on their weights."""
CUTS = [(0, 1), (0, 2), (1, 2), (2, 3)]
"""(rank, number of ranks); each rank has some of the experts."""


def cut_of(num_experts, rank, size):
    """Returns a rank's experts."""
    return Cut(num_experts, rank * num_experts // size, (rank + 1) * num_experts // size)


def numbers_of(routing):
    """Returns the number of each pair's expert on this rank; -1 for those of other ranks."""
    ends = routing.starts[1:].long()
    numbers = torch.searchsorted(ends, routing.slots.flatten().long(), right=True)
    return numbers.where(routing.slots.flatten() >= 0, -1).view(routing.slots.shape)


def check_slots(ops, num_experts, rule, rows, dtype, device, cut=(0, 1)):
    """Checks that slots are the pairs of the chosen experts, by expert and then by pair."""
    logits = normal(rows, num_experts, dtype=dtype).to(device)
    experts = cut_of(num_experts, *cut)
    is_sigmoid = rule.scores is ExpertScores.SIGMOID
    bias = normal(num_experts, seed=1).to(device) if is_sigmoid else None
    scales = None
    if (num_experts, rule.top_k) in SCALED:
        scales = 1 + 0.3 * normal(num_experts, seed=2).to(device)
    routing = ops.route_experts(logits, rule, experts, bias, scales)
    weights, ids = expected_choices(logits, rule, bias)
    weights = weights if scales is None else weights * scales.double()[ids]
    eps = eps_of(dtype) if rule.rounds else 0.0
    chosen = logits.gather(1, ids)
    if dtype == torch.float32 or len({*logits.flatten().tolist()}) == logits.numel():
        is_local = (ids >= experts.start) & (ids < experts.end)
        assert torch.equal(numbers_of(routing), (ids - experts.start).where(is_local, -1))
    else:  # of equal logits either may be chosen
        assert chosen.shape == routing.slots.shape
    assert_within(routing.weights, weights, eps * weights.abs() + 1e-6)
    flat, num_used = routing.slots.flatten(), int(routing.starts[-1])
    used = flat[flat >= 0]
    assert sorted(used.tolist()) == list(range(num_used))
    pairs = (flat >= 0).nonzero().flatten()
    assert torch.equal(routing.rows[used.long()].long(), pairs // rule.top_k)
    for start, end in zip(routing.starts[:-1], routing.starts[1:], strict=True):
        of_expert = pairs[(used >= start) & (used < end)]
        assert torch.equal(of_expert, of_expert.sort().values)
    assert routing.starts[0] == 0
    assert len(routing.starts) == experts.size + 1


def expected_choices(logits, rule, bias):
    """Returns the weights and numbers of each row's experts, computed in float64."""
    scores = logits.double()
    if rule.scores is ExpertScores.SOFTMAX:
        scores = scores.softmax(-1)
    elif rule.scores is ExpertScores.SIGMOID:
        scores = scores.sigmoid()
    ranking = scores if bias is None else scores + bias
    groups = ranking.unflatten(1, (rule.num_groups, -1))
    sums = groups.sort(-1, descending=True).values[..., : rule.group_terms].sum(-1)
    outside = sums.sort(-1, descending=True).indices[:, rule.top_groups :]
    groups = groups.clone()
    for row, numbers in enumerate(outside.tolist()):
        groups[row, numbers] = -torch.inf
    ids = groups.flatten(1).topk(rule.top_k).indices
    weights = scores.gather(1, ids)
    if rule.scores is ExpertScores.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if rule.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * rule.scale, ids


def filled_experts(ops, matrices, use, device):
    """Returns a weight that holds `[num_experts, rows, columns]`, filled in parts."""
    num_experts, num_rows, _ = matrices.shape
    weight = ops.make_weight_stack(*matrices.shape, matrices.dtype, device, use)
    count = num_rows // 2 if use is WeightUse.GATED_LINEAR else num_rows
    for number in range(num_experts):
        for first in range(0, num_rows, count):
            rows = weight.rows(number * num_rows + first, count)
            rows.copy_(matrices[number, first : first + count])
    return weight


def check_layer(
    ops, shape, routing, dtype, device, *, is_gated, gathers, bias, activation=Activation.SILU
):
    """Checks an experts' layer against products in float64.

    Args:
        ops: the kernels.
        shape: inputs and outputs.
        routing: the rows of the experts.
        dtype: of inputs and weights.
        device: of all tensors.
        is_gated: whether the layer is gated.
        gathers: whether the input is by row, not by slot.
        bias: whether the layer has a bias.
        activation: of the gates, if it is gated.
    """
    columns, width = shape
    num_experts, num_used = len(routing.starts) - 1, int(routing.starts[-1])
    num_rows = 2 * width if is_gated else width
    hidden = normal(len(routing.slots if gathers else routing.rows), columns, dtype=dtype, seed=1)
    matrices = normal(num_experts, num_rows, columns, seed=2) * 2 / columns**0.5
    hidden, matrices = hidden.to(device), matrices.to(device, dtype)
    biases = normal(num_experts, num_rows, dtype=dtype, seed=3).to(device) if bias else None
    if activation is Activation.CLAMPED_SILU and bias:
        biases *= 5  # some sums are beyond the limits
    use = WeightUse.GATED_LINEAR if is_gated else WeightUse.LINEAR
    weight = filled_experts(ops, matrices, use, device)
    out = ops.expert_linear(hidden, weight, routing, biases, gathers=gathers, activation=activation)
    assert out.shape == (len(routing.rows), width)
    assert out.dtype == dtype
    for number in range(num_experts):
        start, end = routing.starts[number : number + 2].tolist()
        assert end <= num_used
        inputs = hidden[routing.rows[start:end].long()] if gathers else hidden[start:end]
        sums = inputs.double() @ matrices[number].double().T
        bound = product_bound(inputs, matrices[number])
        if biases is not None:
            sums = sums + biases[number].double()
            bound = bound + 1e-7 * sums.abs()
        _assert_outputs(out[start:end], sums, bound, dtype, activation if is_gated else None)


def _assert_outputs(out, sums, bound, dtype, activation):
    bound = bound + eps_of(dtype) * sums.abs()
    if activation is None:
        assert_within(out, sums, bound)
        return
    gate, up = sums.chunk(2, dim=1)
    off_gate, off_up = bound.chunk(2, dim=1)
    activated = reference.activate(gate, activation)
    up = gated_values(up, activation)
    off_up = off_up + eps_of(dtype) * up.abs()
    off = 1.2 * off_gate * (up.abs() + off_up) + activated.abs() * off_up
    off = off + 4 * eps_of(dtype) * activated.abs() * up.abs()
    off = off + 2 * eps_of(torch.float32) * (gate * up).abs()
    assert_within(out, activated * up, off)


def check_combination(ops, routing, width, dtype, device, *, shared, gate, residual, wide):
    """Checks weighted sums in float64. Slots that are not in use hold NaN."""
    num_rows = len(routing.slots)
    outputs = normal(len(routing.rows), width, dtype=dtype, seed=4).to(device)
    outputs[int(routing.starts[-1]) :] = torch.nan
    states = normal(num_rows, width, seed=5).to(device) if shared else None
    gates = normal(num_rows, 3, dtype=dtype, seed=6).to(device)[:, 1:2] if gate else None
    added = normal(num_rows, width + 2, dtype=dtype, seed=7).to(device)[:, 2:] if residual else None
    out = ops.combine_experts(
        outputs,
        routing,
        shared=states,
        shared_gate=gates,
        residual=added,
        out_dtype=torch.float32 if wide else None,
    )
    expected = torch.zeros(num_rows, width, dtype=torch.float64, device=device)
    for row, slots in enumerate(routing.slots.tolist()):
        for rank, slot in enumerate(slots):
            if slot >= 0:
                expected[row] += outputs[slot].double() * routing.weights[row, rank].double()
    if states is not None:
        expected += states.double() * (1.0 if gates is None else gates.double().sigmoid())
    if added is not None:
        expected += added.double()
    assert out.dtype == (torch.float32 if wide else dtype)
    assert_within(out, expected, eps_of(out.dtype) * expected.abs() + 3e-6)
