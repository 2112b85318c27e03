"""Mixtures of experts: routing against torch, layers and sums against float64."""

import pytest
import torch

import kernels
from kernels import Activation, Cut, ExpertScores, RoutingRule, WeightUse, reference
from tests.support.expert_cases import (
    CUTS,
    RULES,
    check_combination,
    check_layer,
    check_slots,
    filled_experts,
    numbers_of,
)
from tests.support.kernel_checks import (
    CPU,
    DTYPES,
    IS_NATIVE,
    filled_weight,
    native_only,
    normal,
    on_threads,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPS = {"library": kernels, "reference": reference} if IS_NATIVE else {"reference": reference}
ROWS = [0, 1, 3, 40]
TIED = [(5, 2), (7, 7), (64, 1), (128, 2), (130, 1), (128, 8), (33, 4), (256, 4)]


@pytest.fixture(params=OPS)
def ops(request):
    return OPS[request.param]


def routing_of(rows, num_experts, top_k, cut=None, seed=0):
    logits = normal(rows, num_experts, seed=seed)
    return kernels.route_experts(logits, RoutingRule(top_k), cut or Cut.whole(num_experts))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", RULES)
def test_rows_choose_the_experts_with_the_highest_scores(shape, cut, dtype, ops):
    for rows in ROWS:
        check_slots(ops, shape[0], RULES[shape], rows, dtype, CPU, cut)


@pytest.mark.parametrize("scores", ExpertScores)
@pytest.mark.parametrize(("num_experts", "top_k"), TIED)
def test_equal_scores_rank_as_torch_ranks_them(num_experts, top_k, scores):
    """A changed order in torch would show here: the library has the algorithm of its CPU code."""
    logits = normal(50, num_experts).round()
    logits[::7] = 1.0
    routing = kernels.route_experts(logits, RoutingRule(top_k, scores), Cut.whole(num_experts))
    assert torch.equal(numbers_of(routing), logits.topk(top_k).indices)


@pytest.mark.parametrize(("num_experts", "num_groups"), [(12, 4), (64, 8), (256, 8), (30, 15)])
def test_groups_with_equal_scores_rank_as_torch_ranks_them(num_experts, num_groups):
    rule = RoutingRule(
        4,
        ExpertScores.SIGMOID,
        normalizes=True,
        num_groups=num_groups,
        top_groups=3,
        group_terms=2,
    )
    logits, bias = normal(50, num_experts).round(), normal(num_experts, seed=1).round()
    experts = Cut.whole(num_experts)
    routing = kernels.route_experts(logits, rule, experts, bias)
    expected = reference.route_experts(logits, rule, experts, bias)
    assert torch.equal(routing.slots, expected.slots)
    torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-6, atol=0)


def test_weights_of_experts_whose_scores_are_all_zero_are_zero(ops):
    rule = RoutingRule(2, ExpertScores.SIGMOID, normalizes=True, scale=2.5)
    routing = ops.route_experts(torch.full((3, 5), -200.0), rule, Cut.whole(5))
    assert torch.equal(routing.weights, torch.zeros(3, 2))


@pytest.mark.parametrize("scores", ExpertScores)
def test_rows_of_nan_and_infinity_choose_experts_and_do_not_affect_others(scores, ops):
    rule, logits = RoutingRule(3, scores), normal(6, 7)
    expected = ops.route_experts(logits, rule, Cut.whole(7))
    logits[1], logits[2, 4], logits[4, 2] = torch.nan, torch.nan, torch.inf
    routing = ops.route_experts(logits, rule, Cut.whole(7))
    numbers, others = numbers_of(routing), [0, 3, 5]
    assert all(len({*row}) == 3 and min(row) >= 0 for row in numbers.tolist())
    # The sigmoid of infinity is 1.
    nan_rows = [1, 2] if scores is ExpertScores.SIGMOID else [1, 2, 4]
    assert routing.weights[nan_rows].isnan().any(1).all()
    assert torch.equal(numbers[others], numbers_of(expected)[others])
    assert torch.equal(routing.weights[others], expected.weights[others])


# Inputs and outputs: one, primes, whole panels and more or less than that.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (31, 17), (64, 33), (97, 80)])
def test_layers_of_experts(shape, gathers, is_gated, dtype, ops):
    for rows, num_experts, top_k in ((1, 5, 1), (3, 7, 7), (40, 5, 2)):
        check_layer(
            ops,
            shape,
            routing_of(rows, num_experts, top_k),
            dtype,
            CPU,
            is_gated=is_gated,
            gathers=gathers,
            bias=rows != 3,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.CLAMPED_SILU, Activation.GELU_TANH])
def test_gates_of_experts_with_other_activations(activation, dtype, ops):
    for rows, bias in ((1, False), (40, True)):
        check_layer(
            ops,
            (31, 17),
            routing_of(rows, 5, 2),
            dtype,
            CPU,
            is_gated=True,
            gathers=True,
            bias=bias,
            activation=activation,
        )


def test_layers_of_experts_of_a_rank(ops):
    """A rank may have no expert, no chosen one, or one that all rows have chosen."""
    for cut in (Cut(7, 2, 2), Cut(7, 0, 3), Cut(7, 5, 7)):
        check_layer(
            ops,
            (31, 17),
            routing_of(9, 7, 2, cut),
            torch.float32,
            CPU,
            is_gated=True,
            gathers=True,
            bias=True,
        )
    logits = normal(30, 5)
    logits[:, 3] += 100.0
    routing = ops.route_experts(logits, RoutingRule(1), Cut.whole(5))
    assert routing.starts.tolist() == [0, 0, 0, 0, 30, 30]
    check_layer(ops, (31, 17), routing, torch.float32, CPU, is_gated=True, gathers=True, bias=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 2600])
@pytest.mark.parametrize("cut", [Cut.whole(7), Cut(7, 2, 4)])
def test_weighted_sums(cut, width, dtype, ops):
    for rows, parts in ((0, 0), (1, 1), (5, 2), (9, 3)):
        check_combination(
            ops,
            routing_of(rows, 7, 3, cut),
            width,
            dtype,
            CPU,
            shared=parts > 0,
            gate=parts > 1,
            residual=parts != 1,
            wide=parts == 1,
        )


def mixture(dtype):
    """Returns a function that computes a mixture of 5 experts, of which each row has 2."""
    matrices = normal(5, 66, 90, seed=1) / 9, normal(5, 90, 33, seed=2) / 6
    up = filled_experts(kernels, matrices[0].to(dtype), WeightUse.GATED_LINEAR, CPU)
    down = filled_experts(kernels, matrices[1].to(dtype), WeightUse.LINEAR, CPU)
    gate = filled_weight(normal(5, 90, dtype=dtype, seed=3))
    rule = RoutingRule(2, normalizes=True)

    def compute(hidden):
        routing = kernels.route_experts(kernels.linear(hidden, gate), rule, Cut.whole(5))
        wide = kernels.expert_linear(hidden, up, routing, gathers=True)
        outputs = kernels.expert_linear(wide, down, routing, gathers=False)
        return kernels.combine_experts(outputs, routing, residual=hidden)

    return compute


@native_only("torch's sums depend on the size of a batch")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_other_rows_or_threads(dtype):
    compute, hidden = mixture(dtype), normal(100, 90, dtype=dtype)
    whole = on_threads([1, 2, 5], lambda: compute(hidden))
    assert all(torch.equal(other, whole[0]) for other in whole)
    for first, end in ((0, 1), (7, 8), (99, 100), (3, 17), (40, 95)):
        assert torch.equal(compute(hidden[first:end]), whole[0][first:end])
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(compute(hidden[order]), whole[0][order])


@native_only("other kernels record nothing")
def test_a_recorded_mixture_follows_other_rows_to_other_experts():
    compute, hidden = mixture(torch.float32), normal(3, 90)
    _, recorded = kernels.record_step(CPU, kernels.Arena(), lambda: compute(hidden))
    assert recorded is not None
    for seed in range(4):
        hidden.copy_(normal(3, 90, seed=seed))
        assert torch.equal(recorded.run(), compute(hidden))
