"""Routing of mixtures of experts, in Triton: the choice of experts, and their slots."""

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.experts import MIN_WEIGHT_SUM, Routing, RoutingRule
from kernels.ranks import Cut
from kernels.triton.pointwise import with_dense_columns

__all__ = ["route_experts"]

_PAIRS_PER_BLOCK = 1024


@TRITON.implements(reference.route_experts)
def route_experts(
    logits: torch.Tensor,
    rule: RoutingRule,
    experts: Cut,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    logits = with_dense_columns(logits)
    num_rows, num_experts = logits.shape
    num_pairs = num_rows * rule.top_k
    device = logits.device
    weights = torch.empty((num_rows, rule.top_k), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, rule.top_k), dtype=torch.int32, device=device)
    slots = torch.empty_like(ids)
    rows = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(experts.size + 1, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(num_experts)
    if num_rows:
        _choose_kernel[(num_rows,)](
            logits,
            bias,
            expert_scales,
            weights,
            ids,
            slots,
            logits.stride(0),
            num_experts,
            rule.top_k,
            num_experts // rule.num_groups,
            rule.scale,
            SCORES=rule.scores.value,
            NUM_GROUPS=rule.num_groups,
            TOP_GROUPS=rule.top_groups,
            GROUP_TERMS=rule.group_terms,
            MIN_SUM=MIN_WEIGHT_SUM,
            NORMALIZES=rule.normalizes,
            ROUNDS=rule.rounds,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(rule.top_k),
            num_warps=1 if block <= 128 else 4,
        )
    _sort_kernel[(experts.size + 1,)](
        ids,
        slots,
        rows,
        starts,
        num_pairs,
        rule.top_k,
        experts.start,
        experts.size,
        BLOCK=_PAIRS_PER_BLOCK,
        num_warps=4,
    )
    return Routing(weights, slots, rows, starts)


@triton.jit
def _choose_kernel(
    logits,
    bias,
    expert_scales,
    weights,
    ids,
    slots,
    row_stride,
    num_experts,
    top_k,
    group_size,
    scale,
    SCORES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TERMS: tl.constexpr,
    MIN_SUM: tl.constexpr,
    NORMALIZES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Chooses a row's experts and their weights; program i: row i. All slots become -1.

    SCORES is a value of ExpertScores.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < num_experts
    scores = tl.load(logits + row * row_stride + columns, mask=mask, other=0.0)
    scores = scores.to(tl.float32)
    if SCORES == "softmax":
        scores = _softmax(scores, mask)
    elif SCORES == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    keys = scores
    if bias is not None:
        keys += tl.load(bias + columns, mask=mask, other=0.0)
    keys = tl.where(keys != keys, float("inf"), keys)  # NaN ranks first
    if TOP_GROUPS < NUM_GROUPS:
        mask &= _is_in_top_groups(
            keys, mask, columns // group_size, NUM_GROUPS, TOP_GROUPS, GROUP_TERMS, BLOCK
        )
    ranks = tl.arange(0, BLOCK_K)
    chosen, chosen_ids = tl.full((BLOCK_K,), 0.0, tl.float32), tl.full((BLOCK_K,), 0, tl.int32)
    for rank in range(top_k):
        _, column = _highest(keys, mask, columns, BLOCK)
        score = tl.sum(tl.where(columns == column, scores, 0.0))
        chosen = tl.where(ranks == rank, score, chosen)
        chosen_ids = tl.where(ranks == rank, column, chosen_ids)
        mask &= columns != column
    if SCORES == "softmax of chosen":
        chosen = _softmax(chosen, ranks < top_k)
    if NORMALIZES:
        chosen /= tl.sum(tl.where(ranks < top_k, chosen, 0.0)) + MIN_SUM
    chosen *= scale
    if expert_scales is not None:
        chosen *= tl.load(expert_scales + chosen_ids)
    if ROUNDS:
        chosen = chosen.to(logits.dtype.element_ty).to(tl.float32)
    places = row * top_k + ranks
    tl.store(weights + places, chosen, mask=ranks < top_k)
    tl.store(ids + places, chosen_ids, mask=ranks < top_k)
    tl.store(slots + places, -1, mask=ranks < top_k)


@triton.jit
def _highest(keys, mask, columns, BLOCK: tl.constexpr):
    """Returns the highest key in `mask`, and the first of its columns."""
    highest = tl.max(tl.where(mask, keys, float("-inf")))
    return highest, tl.min(tl.where(mask & (keys == highest), columns, BLOCK - 1))


@triton.jit
def _is_in_top_groups(
    keys,
    mask,
    groups,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns, by column, whether its group is one of those with the highest sums of keys."""
    columns = tl.arange(0, BLOCK)
    sums = tl.full((BLOCK,), float("-inf"), tl.float32)  # by number of the group
    for group in range(NUM_GROUPS):
        candidates, total = mask & (groups == group), 0.0
        for _ in range(GROUP_TERMS):
            highest, column = _highest(keys, candidates, columns, BLOCK)
            candidates &= columns != column
            total += highest
        sums = tl.where(columns == group, total, sums)
    is_left, is_chosen = columns < NUM_GROUPS, groups < 0
    for _ in range(TOP_GROUPS):
        _, group = _highest(sums, is_left, columns, BLOCK)
        is_left &= columns != group
        is_chosen |= groups == group
    return is_chosen


@triton.jit
def _softmax(values, mask):
    """Returns the softmax of the values in `mask`; 0 for others, which must be finite."""
    highest = tl.max(tl.where(mask & (values == values), values, float("-inf")))
    powers = tl.where(mask, tl.exp(tl.where(mask, values - highest, 0.0)), 0.0)
    return powers / tl.sum(powers)


@triton.jit(do_not_specialize=["num_pairs"])  # or each number of rows might compile it again
def _sort_kernel(
    ids, slots, rows, starts, num_pairs, top_k, first, num_experts, BLOCK: tl.constexpr
):
    """Assigns slots to pairs, sorted by expert; program i: expert `first + i` of the rank.

    The last program only writes the end of the slots.
    """
    number = tl.program_id(0)
    expert = first + number
    start = 0
    for begin in range(0, num_pairs, BLOCK):
        pairs = begin + tl.arange(0, BLOCK)
        other = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
        start += tl.sum(((other >= first) & (other < expert)).to(tl.int32))
    tl.store(starts + number, start)
    if number < num_experts:
        for begin in range(0, num_pairs, BLOCK):
            pairs = begin + tl.arange(0, BLOCK)
            other = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
            is_here = (other == expert).to(tl.int32)
            slot = start + tl.cumsum(is_here) - is_here
            tl.store(slots + pairs, slot, mask=is_here > 0)
            tl.store(rows + slot, pairs // top_k, mask=is_here > 0)
            start += tl.sum(is_here)
