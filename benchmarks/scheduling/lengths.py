"""Prompt and output lengths like those that the PagedAttention paper measured with."""

import math
import random
from dataclasses import dataclass

__all__ = ["ALPACA", "SHAREGPT", "Lengths"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths, the means those of Kwon et al. 2023, section 6.1; the
    spreads are chosen by the look of figure 11.

    Attributes:
        name: the data set that they stand for.
        mean_prompt: tokens.
        mean_output: tokens.
        prompt_spread: standard deviation of the logarithm.
        output_spread: likewise.
    """

    name: str
    mean_prompt: float
    mean_output: float
    prompt_spread: float
    output_spread: float

    def draw(self, num_requests: int, seed: int) -> list[tuple[int, int]]:
        """(prompt, output) lengths, up to 2,048 tokens each."""
        draw = random.Random(seed)
        return [
            (
                _lognormal(draw, self.mean_prompt, self.prompt_spread),
                _lognormal(draw, self.mean_output, self.output_spread),
            )
            for _ in range(num_requests)
        ]


def _lognormal(draw: random.Random, mean: float, spread: float) -> int:
    value = draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return min(max(round(value), 1), 2048)


SHAREGPT = Lengths("ShareGPT", 161.31, 337.99, 1.1, 0.8)
ALPACA = Lengths("Alpaca", 19.31, 58.45, 0.5, 0.8)
