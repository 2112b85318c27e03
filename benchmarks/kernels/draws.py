"""Cases of rules and draws: float32 logits, whatever the model's type."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from baton.common.request.sampling_params import SamplingParams
from benchmarks.kernels.case import (
    Call,
    Case,
    Cost,
    DecoderShape,
    Numbers,
    Result,
    Sizes,
    rows_in_words,
)
from engine.draw_params import DrawParams
from engine.runtime.draws.sampler import draw_record, draw_table
from kernels import DRAW_RECORD, RuleTable

__all__ = ["draw_cases", "rule_cases"]

_NUM_TOKENS = 1000  # of each sequence; half of them are its prompt
_NUM_LISTED = 64  # entries of each list of a row's rules
_DRAWS = {
    "all tokens": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
}


def rule_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Sequences that all have rules of every kind."""
    del dtype
    for num_rows in sizes.ruled:
        yield Case(
            "apply_logit_rules",
            f"{shape.vocab_size} logits, {_NUM_TOKENS} tokens",
            rows_in_words(num_rows),
            Cost(num_rows * shape.vocab_size * torch.float32.itemsize),
            1,
            partial(_rule_calls, shape.vocab_size, num_rows),
            is_recordable=False,
        )


def draw_cases(shape: DecoderShape, dtype: torch.dtype, sizes: Sizes) -> Iterator[Case]:
    """Draws at random from normal logits, with a temperature of 1."""
    del dtype
    for name in _DRAWS:
        for num_rows in sizes.drawn:
            yield Case(
                "draw_tokens",
                f"{shape.vocab_size} logits, {name}",
                rows_in_words(num_rows),
                Cost(num_rows * shape.vocab_size * torch.float32.itemsize),
                1,
                partial(_draw_calls, shape.vocab_size, num_rows, name),
                is_recordable=False,
            )


def _logits(numbers: Numbers, num_rows: int, vocab_size: int) -> torch.Tensor:
    return numbers.in_float32().normal(num_rows, vocab_size, scale=3.0)


def _rule_calls(
    vocab_size: int, num_rows: int, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    logits = _logits(numbers, num_rows, vocab_size)
    table = _rule_table(vocab_size, num_rows, numbers.device)
    calls = []
    for _ in range(num_copies):
        scores = (logits.clone(), *numbers.module.row_maxima(logits))
        calls.append(partial(_apply, numbers, scores, table))
    return calls


def _apply(
    numbers: Numbers, scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor], rules: RuleTable
) -> Result:
    """Returns the maxima and the likeliest tokens; the logits may be infinite."""
    ids = torch.arange(len(rules.history), device=numbers.device)
    numbers.module.apply_logit_rules(
        *scores,
        rules,
        rule_ids=ids,
        tokens=torch.zeros_like(ids),
        positions=torch.full_like(ids, _NUM_TOKENS),
        logit_rows=ids,
    )
    return scores[1:]


def _rule_table(vocab_size: int, num_rows: int, device: torch.device) -> RuleTable:
    generator = torch.Generator().manual_seed(0)

    def tokens(*shape: int) -> torch.Tensor:
        return torch.randint(vocab_size, (num_rows, *shape), generator=generator).int().to(device)

    listed = torch.arange(_NUM_LISTED, dtype=torch.int32) * (vocab_size // _NUM_LISTED)
    num_words = -(-vocab_size // 32)
    ends = torch.tensor([_NUM_TOKENS // 2, _NUM_TOKENS + 1], device=device)
    penalties = torch.tensor([1.1, 0.5, 0.2], device=device)
    return RuleTable(
        history=tokens(_NUM_TOKENS),
        lengths=ends.repeat(num_rows, 1),
        penalties=penalties.repeat(num_rows, 1),
        bias_ids=listed.to(device).repeat(num_rows, 1),
        biases=torch.full((num_rows, _NUM_LISTED), 0.01, device=device),
        stop_ids=tokens(_NUM_LISTED),
        bad_words=tokens(_NUM_LISTED, 3),
        allowed=torch.full((num_rows, num_words), 0x7FFFFFFF, dtype=torch.int32, device=device),
    )


def _draw_calls(
    vocab_size: int, num_rows: int, name: str, numbers: Numbers, num_copies: int
) -> Sequence[Call]:
    logits = _logits(numbers, num_rows, vocab_size)
    ids = torch.arange(num_rows, device=numbers.device)
    draws = [draw_record(DrawParams(_DRAWS[name], seed)) for seed in range(num_rows)]
    table = draw_table(np.array(draws, DRAW_RECORD), numbers.device)
    calls = []
    for _ in range(num_copies):
        copy = logits.clone()
        call = partial(
            numbers.module.draw_tokens,
            copy,
            *numbers.module.row_maxima(copy),
            table,
            draw_ids=ids,
            positions=ids + _NUM_TOKENS,
            filtered=name != "all tokens",
        )
        calls.append(call)
    return calls
