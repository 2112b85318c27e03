"""Mixtures of experts on a GPU: routing, layers and weighted sums, against float64."""

from types import SimpleNamespace

import pytest
import torch

from kernels import Activation, Cut, ExpertScores, RoutingRule, reference
from kernels.triton import experts, routing
from tests.support.devices import DEVICE
from tests.support.expert_cases import (
    CUTS,
    RULES,
    check_combination,
    check_layer,
    check_slots,
    numbers_of,
)
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = SimpleNamespace(
    make_weight_stack=reference.make_weight_stack,
    route_experts=routing.route_experts,
    expert_linear=experts.expert_linear,
    combine_experts=experts.combine_experts,
)


def routing_of(rows, num_experts, top_k, cut=None):
    logits = normal(rows, num_experts).to(DEVICE)
    return OPS.route_experts(logits, RoutingRule(top_k), cut or Cut.whole(num_experts))


@pytest.mark.parametrize(("shape", "cut"), [*zip(RULES, [*CUTS, *CUTS], strict=True)])
def test_rows_choose_the_experts_with_the_highest_scores(shape, cut):
    for rows, dtype in zip([0, 1, 9], DTYPES, strict=True):
        check_slots(OPS, shape[0], RULES[shape], rows, dtype, DEVICE, cut)


@pytest.mark.parametrize("scores", ExpertScores)
def test_equal_scores_rank_by_number_and_nan_ranks_first(scores):
    logits = normal(12, 33).round().to(DEVICE)
    logits[0], logits[3] = 1.0, torch.nan
    rule = RoutingRule(4, scores)
    numbers = numbers_of(OPS.route_experts(logits, rule, Cut.whole(33)))
    ranked = logits.nan_to_num(torch.inf).sort(stable=True, descending=True).indices
    assert torch.equal(numbers, ranked[:, :4])


def test_slots_of_more_pairs_than_a_block():
    check_slots(OPS, 5, RoutingRule(5), 450, torch.float32, DEVICE, (1, 2))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [*zip([(31, 17), (97, 80), (1, 1)], DTYPES, strict=True)]
)
def test_layers_of_experts(shape, dtype, is_gated):
    for rows, num_experts, top_k, cut in (
        (1, 5, 1, None),
        (3, 7, 7, None),
        (40, 5, 2, Cut(5, 1, 4)),
        (2, 3, 1, Cut(3, 1, 1)),
    ):
        check_layer(
            OPS,
            shape,
            routing_of(rows, num_experts, top_k, cut),
            dtype,
            DEVICE,
            is_gated=is_gated,
            gathers=is_gated,
            bias=rows != 3,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_gates_of_experts(dtype):
    check_layer(
        OPS,
        (31, 17),
        routing_of(9, 5, 2),
        dtype,
        DEVICE,
        is_gated=True,
        gathers=True,
        bias=True,
        activation=Activation.CLAMPED_SILU,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", [Cut.whole(7), Cut(7, 2, 4)])
def test_weighted_sums(cut, dtype):
    for rows, width, parts in ((0, 5, 0), (1, 33, 1), (5, 1030, 2), (9, 1, 3)):
        check_combination(
            OPS,
            routing_of(rows, 7, 3, cut),
            width,
            dtype,
            DEVICE,
            shared=parts > 0,
            gate=parts > 1,
            residual=parts != 1,
            wide=parts == 1,
        )
