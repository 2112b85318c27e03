"""Rules that change logits, and draws from them, on the CPU."""

from dataclasses import fields

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.library import commands
from kernels.native.ops import is_vector, run_command
from kernels.row_state import DrawTable, RuleTable

__all__ = ["apply_logit_rules", "draw_tokens"]


@NATIVE.implements(reference.apply_logit_rules)
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
    """Does not check that tokens are in the vocabulary."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert is_vector(maxima, len(logits), torch.float32)
    assert is_vector(likeliest, len(logits), torch.int64)
    vectors = (rule_ids, tokens, positions, logit_rows)
    assert all(is_vector(vector, len(rule_ids), torch.int64) for vector in vectors)
    assert all(getattr(rules, field.name).is_contiguous() for field in fields(rules))
    run_command(
        commands.APPLY_LOGIT_RULES,
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        maxima.data_ptr(),
        likeliest.data_ptr(),
        *(vector.data_ptr() for vector in vectors),
        len(rule_ids),
        rules.history.data_ptr(),
        rules.history.shape[1],
        rules.lengths.data_ptr(),
        rules.penalties.data_ptr(),
        rules.bias_ids.data_ptr(),
        rules.biases.data_ptr(),
        rules.bias_ids.shape[1],
        rules.stop_ids.data_ptr(),
        rules.stop_ids.shape[1],
        rules.bad_words.data_ptr(),
        *rules.bad_words.shape[1:],
        rules.allowed.data_ptr(),
        keep=(),
    )


@NATIVE.implements(reference.draw_tokens)
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
    count = len(draw_ids)
    tokens = torch.empty(count, dtype=torch.int64) if out is None else out
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert maxima.dtype == torch.float32
    vectors = (likeliest, draw_ids, positions, tokens)
    assert all(vector.dtype == torch.int64 for vector in vectors)
    assert all(tensor.is_contiguous() for tensor in (maxima, *vectors, *draws.columns))
    assert len(positions) == len(tokens) == count
    if logit_rows is None:
        assert len(logits) >= count
    else:
        assert is_vector(logit_rows, count, torch.int64)
    run_command(
        commands.DRAW_TOKENS,
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        maxima.data_ptr(),
        likeliest.data_ptr(),
        *(column.data_ptr() for column in draws.columns),
        draw_ids.data_ptr(),
        positions.data_ptr(),
        0 if logit_rows is None else logit_rows.data_ptr(),
        count,
        filtered,
        tokens.data_ptr(),
        keep=(),
    )
    return tokens
