"""Logits and ways of drawing from them, for tests of `draw_tokens` and `token_logprobs`."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.runtime.draws.sampler import draw_record
from engine.runtime.draws.sampler import draw_table as device_table
from kernels import DRAW_RECORD, DrawTable, reference
from tests.support.draw_params import draw_params

__all__ = ["LOGIT_KINDS", "DrawCase", "draw_table", "make_draws", "make_logits", "table_on"]

LOGIT_KINDS = ("normal", "ties", "equal", "masked", "huge", "peaked", "negative", "near")

_TEMPERATURES = (0.0, 1e-3, 0.3, 1.0, 1.0, 2.5, 100.0)
_MIN_PS = (0.0, 0.0, 1e-9, 0.05, 0.7, 1.0)
_TOP_PS = (1.0, 1.0, 1e-12, 0.2, 0.5, 0.9, 0.999999, math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class DrawCase:
    """Arguments of `draw_tokens`, on the CPU."""

    logits: torch.Tensor
    draws: DrawTable
    draw_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor | None = None

    def expected(self):
        """Returns the tokens that the reference draws."""
        return self.draw(reference, torch.device("cpu"))

    def draw(self, module, device, out=None):
        """Draws with `module` on `device`; returns the tokens on the CPU."""
        maxima, likeliest = reference.row_maxima(self.logits)
        rows = None if self.logit_rows is None else self.logit_rows.to(device)
        tokens = module.draw_tokens(
            _to_device(self.logits, device),
            maxima.to(device),
            likeliest.to(device),
            table_on(device, self.draws),
            draw_ids=self.draw_ids.to(device),
            positions=self.positions.to(device),
            logit_rows=rows,
            out=out,
        )
        return tokens.cpu()

    def replace(self, **changes):
        """Returns the case with some arguments replaced."""
        return replace(self, **changes)


def _to_device(logits, device):
    """Copies a tensor to `device`; keeps its strides."""
    copy = torch.empty_strided(logits.shape, logits.stride(), device=device)
    return copy.copy_(logits)


def table_on(device, draws):
    """Returns a table's copy on `device`."""
    return DrawTable(*(column.to(device) for column in draws.columns))


def draw_table(*records):
    """Returns a table of (temperature, top_k, top_p, seed, and min_p unless it is 0)."""
    draws = [draw_record(draw_params(*record)) for record in records]
    return device_table(np.array(draws, DRAW_RECORD), torch.device("cpu"))


def make_draws(count, vocab_size, seed=0):
    """Returns a table of `count` random draws of all kinds."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    top_ks = (0, 0, 1, 2, 7, vocab_size - 1, vocab_size, vocab_size + 9)
    bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).tolist()
    return draw_table(
        *(
            (pick(_TEMPERATURES), pick(top_ks), pick(_TOP_PS), seed % 2**64, pick(_MIN_PS))
            for seed in bits
        )
    )


def make_logits(kind, rows, vocab_size, seed=0):
    """Returns `[rows, vocab_size]` float32 logits of one of `LOGIT_KINDS`."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        return (logits / 2).round()  # includes zeros of both signs
    if kind == "equal":
        return torch.full_like(logits, -7.25)
    if kind == "masked":
        return logits.masked_fill(logits < logits.median(dim=-1, keepdim=True).values, -math.inf)
    if kind == "huge":
        return (logits * 1e38).clamp(-3.4e38, 3.4e38)
    if kind == "peaked":
        return logits.scatter(-1, logits.argmin(dim=-1, keepdim=True), 40.0)
    if kind == "negative":
        return -logits.abs() - 1e-3
    if kind == "near":  # in float64, many have the same distance from the largest
        return (logits * 1e-20).scatter(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return logits
