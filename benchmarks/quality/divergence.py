"""`Divergence`: how far next-token distributions are from those of a base model."""

import math
from dataclasses import dataclass, field

import torch

__all__ = ["Divergence", "DivergenceFigures"]

_VALUES_AT_A_TIME = 2**19
"""Logits in memory at once in float64; the allocator keeps memory of that size for the next."""


@dataclass(frozen=True, slots=True)
class DivergenceFigures:
    """The figures of all positions.

    Attributes:
        mean: mean Kullback-Leibler divergence from the base to the other model, in nats.
        error: standard error of the mean.
        p99: the divergence that 99 of 100 positions do not exceed.
        agreement: share of the positions whose likeliest token is the base's.
        num_positions: number of positions.
    """

    mean: float
    error: float
    p99: float
    agreement: float
    num_positions: int


@dataclass(slots=True)
class Divergence:
    """Gathers the divergences of texts.

    The texts are what the standard error is of: positions of one text are not independent.
    """

    _by_text: list[torch.Tensor] = field(default_factory=list)
    _num_agreeing: int = 0

    def add(self, base: torch.Tensor, other: torch.Tensor) -> None:
        """Adds the positions of a text.

        Args:
            base: `[num_positions, vocab]`; the base model's logits.
            other: the same of the other model.
        """
        num_rows = max(1, _VALUES_AT_A_TIME // base.shape[1])
        pairs = (torch.split(logits, num_rows) for logits in (base, other))
        self._by_text.append(torch.cat([_divergences(*pair) for pair in zip(*pairs, strict=True)]))
        self._num_agreeing += int((base.argmax(-1) == other.argmax(-1)).sum())

    def figures(self) -> DivergenceFigures:
        """Returns the figures of all texts, of which there must be two."""
        values = torch.cat(self._by_text)
        means = torch.stack([text.mean() for text in self._by_text])
        return DivergenceFigures(
            mean=float(values.mean()),
            error=float(means.std()) / math.sqrt(len(means)),
            p99=float(values.quantile(0.99)),
            agreement=self._num_agreeing / len(values),
            num_positions=len(values),
        )


def _divergences(base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns the sums over the vocabulary of p (log p - log q), `[num_positions]` float64."""
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (base, other))
    return (log_p.exp() * (log_p - log_q)).sum(-1)
