"""Rules that change logits, in Triton."""

from dataclasses import fields

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.dispatch import TRITON
from kernels.row_state import RuleTable
from kernels.triton.launch import launch_table

__all__ = ["apply_logit_rules"]

_HISTORY_SPLITS = 16  # programs that share a history
_HISTORY_BLOCK = 1024
_LIST_BLOCK = 128  # entries of a list of biases, stop tokens or bad words

# What a token's mark holds: how often it is in the output, and two flags.
_IN_PROMPT = tl.constexpr(1 << 29)
_BANNED = tl.constexpr(1 << 30)
_COUNT = tl.constexpr((1 << 29) - 1)
_NO_TOKEN = tl.constexpr(-2)


@TRITON.implements(reference.apply_logit_rules)
def apply_logit_rules(
    logits: torch.Tensor,
    maxima: torch.Tensor,
    likeliest: torch.Tensor,
    rules: RuleTable,
    *,
    rule_ids: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
) -> None:
    count, vocab_size, device = len(rule_ids), logits.shape[1], logits.device
    if not count:
        return
    vectors = (rule_ids, tokens, positions, logit_rows)
    table = [getattr(rules, field.name) for field in fields(rules)]
    assert all(tensor.is_contiguous() for tensor in (maxima, likeliest, *vectors, *table))
    assert logits.stride(1) == 1
    marks = torch.zeros((count, vocab_size), dtype=torch.int32, device=device)
    _mark_kernel[(count, _HISTORY_SPLITS)](
        logits,
        likeliest,
        *vectors,
        rules.history,
        rules.lengths,
        rules.bias_ids,
        rules.biases,
        rules.stop_ids,
        rules.bad_words,
        marks,
        logits.stride(0),
        vocab_size,
        rules.history.shape[1],
        rules.bias_ids.shape[1],
        rules.stop_ids.shape[1],
        *rules.bad_words.shape[1:],
        BLOCK=_HISTORY_BLOCK,
        LIST_BLOCK=_LIST_BLOCK,
        num_warps=4,
    )
    launch = launch_table(device).row_maxima.for_size(vocab_size)
    num_parts = triton.cdiv(vocab_size, launch.block_size)
    part_maxima = torch.empty((count, num_parts), dtype=torch.float32, device=device)
    part_indices = torch.empty((count, num_parts), dtype=torch.int32, device=device)
    _change_kernel[(count, num_parts)](
        logits,
        likeliest,
        rule_ids,
        logit_rows,
        rules.penalties,
        rules.allowed,
        marks,
        part_maxima,
        part_indices,
        logits.stride(0),
        vocab_size,
        rules.allowed.shape[1],
        BLOCK=launch.block_size,
        num_warps=launch.num_warps,
    )
    _find_kernel[(count,)](
        maxima,
        likeliest,
        logit_rows,
        part_maxima,
        part_indices,
        num_parts,
        BLOCK=triton.next_power_of_2(num_parts),
        num_warps=1,
    )


# These change from step to step, which must not cause another compilation.
_VECTORS = ["likeliest", "rule_ids", "tokens", "positions", "logit_rows"]
_SIZES = ["max_len", "num_biases", "num_stops", "num_words", "word_len"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_VECTORS)
def _mark_kernel(
    logits,
    likeliest,
    rule_ids,
    tokens,
    positions,
    logit_rows,
    history,
    lengths,
    bias_ids,
    biases,
    stop_ids,
    bad_words,
    marks,
    row_stride,
    vocab_size,
    max_len,
    num_biases,
    num_stops,
    num_words,
    word_len,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
):
    """Marks the tokens that sequence i's rules penalize or ban, and adds its biases to its logits.

    Program (i, j) marks blocks j, j + splits, ... of BLOCK tokens of the history; program (i, 0)
    does the rest. No program reads the history's last token, which program (i, 0) writes.
    """
    index, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(logit_rows + index)
    rule_id = tl.load(rule_ids + index)
    length = tl.load(positions + index).to(tl.int32)
    newest = tl.load(tokens + index).to(tl.int32)
    own_history = history + rule_id * max_len
    if split == 0:
        tl.store(own_history + length - 1, newest)
    if tl.load(likeliest + row) < 0:
        return
    own_marks = marks + index * vocab_size
    num_prompt = tl.load(lengths + rule_id * 2).to(tl.int32)
    for start in range(split * BLOCK, length, tl.num_programs(1) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = tl.load(own_history + places, mask=places < length - 1, other=0)
        seen = tl.where(places == length - 1, newest, seen)
        is_output = places >= num_prompt
        mask = places < length
        tl.atomic_add(own_marks + seen, 1, mask=mask & is_output, sem="relaxed")
        is_prompt = mask & (places < num_prompt)
        tl.atomic_or(own_marks + seen, _IN_PROMPT, mask=is_prompt, sem="relaxed")
    if split == 0:
        row_logits = logits + row * row_stride
        for start in range(0, num_biases, LIST_BLOCK):
            entries = start + tl.arange(0, LIST_BLOCK)
            mask = entries < num_biases
            biased = tl.load(bias_ids + rule_id * num_biases + entries, mask=mask, other=-1)
            mask = biased >= 0
            added = tl.load(biases + rule_id * num_biases + entries, mask=mask, other=0.0)
            values = tl.load(row_logits + biased, mask=mask, other=0.0)
            tl.store(row_logits + biased, values + added, mask=mask)
        if length < tl.load(lengths + rule_id * 2 + 1):
            for start in range(0, num_stops, LIST_BLOCK):
                entries = start + tl.arange(0, LIST_BLOCK)
                mask = entries < num_stops
                stops = tl.load(stop_ids + rule_id * num_stops + entries, mask=mask, other=-1)
                tl.atomic_or(own_marks + stops, _BANNED, mask=stops >= 0, sem="relaxed")
        own_words = bad_words + rule_id * num_words * word_len
        for start in range(0, num_words, LIST_BLOCK):
            entries = start + tl.arange(0, LIST_BLOCK)
            words = own_words + entries * word_len
            mask = entries < num_words
            last = tl.load(words + word_len - 1, mask=mask, other=-1)
            is_banned = last >= 0
            for back in range(1, word_len):
                place = length - back
                seen = tl.load(own_history + place, mask=(back > 1) & (place >= 0), other=-2)
                latest = tl.where(back == 1, newest, seen)
                before = tl.load(words + word_len - 1 - back, mask=is_banned, other=-1)
                is_banned &= (before < 0) | (before == latest)
            tl.atomic_or(own_marks + last, _BANNED, mask=is_banned, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def _change_kernel(
    logits,
    likeliest,
    rule_ids,
    logit_rows,
    penalties,
    allowed,
    marks,
    part_maxima,
    part_indices,
    row_stride,
    vocab_size,
    num_mask_words,
    BLOCK: tl.constexpr,
):
    """Penalizes and bans the tokens of part j of sequence i's logits, and finds their largest value
    and its first index; program (i, j).
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(logit_rows + index)
    if tl.load(likeliest + row) < 0:
        return
    rule_id = tl.load(rule_ids + index)
    repetition = tl.load(penalties + rule_id * 3)
    presence = tl.load(penalties + rule_id * 3 + 1).to(tl.float64)
    frequency = tl.load(penalties + rule_id * 3 + 2).to(tl.float64)
    token_ids = part * BLOCK + tl.arange(0, BLOCK)
    mask = token_ids < vocab_size
    places = logits + row * row_stride + token_ids
    values = tl.load(places, mask=mask, other=float("-inf"))
    token_marks = tl.load(marks + index * vocab_size + token_ids, mask=mask, other=0)
    repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where((token_marks & (_COUNT | _IN_PROMPT)) != 0, repeated, values)
    counts = token_marks & _COUNT
    # In float64 the product is exact, so that it makes no difference whether it is rounded.
    penalty = presence + frequency * counts.to(tl.float64)
    penalized = (values.to(tl.float64) - penalty).to(tl.float32)
    values = tl.where(counts > 0, penalized, values)
    words = tl.load(allowed + rule_id * num_mask_words + token_ids // 32, mask=mask, other=0)
    is_banned = ((token_marks & _BANNED) != 0) | (((words >> (token_ids % 32)) & 1) == 0)
    values = tl.where(is_banned, float("-inf"), values)
    tl.store(places, values, mask=mask)
    is_nan = values != values
    maximum = tl.max(tl.where(is_nan, float("-inf"), values))
    place = index * tl.num_programs(1) + part
    tl.store(part_indices + place, tl.min(tl.where(values == maximum, token_ids, 2147483647)))
    has_nan = tl.max(is_nan.to(tl.int32)) > 0
    tl.store(part_maxima + place, tl.where(has_nan, float("nan"), maximum))


@triton.jit(do_not_specialize_on_alignment=[*_VECTORS, "maxima"])
def _find_kernel(
    maxima, likeliest, logit_rows, part_maxima, part_indices, num_parts, BLOCK: tl.constexpr
):
    """Finds the largest value of sequence i and its first index from those of parts; program i."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(logit_rows + index)
    if tl.load(likeliest + row) < 0:
        return
    parts = tl.arange(0, BLOCK)
    mask = parts < num_parts
    values = tl.load(part_maxima + index * num_parts + parts, mask=mask, other=float("-inf"))
    token_ids = tl.load(part_indices + index * num_parts + parts, mask=mask, other=2147483647)
    is_nan = values != values
    maximum = tl.max(tl.where(is_nan, float("-inf"), values))
    maximum = tl.where(tl.max(is_nan.to(tl.int32)) > 0, float("nan"), maximum)
    token = tl.min(tl.where(values == maximum, token_ids, 2147483647))
    is_finite = tl.abs(maximum) < float("inf")  # NaN is not
    tl.store(maxima + row, maximum)
    tl.store(likeliest + row, tl.where(is_finite, token, _NO_TOKEN).to(tl.int64))
