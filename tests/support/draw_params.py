"""`DrawParams` by their numbers, as most tests of draws state them."""

from baton.common.request.sampling_params import SamplingParams
from engine.draw_params import DrawParams

__all__ = ["GREEDY", "draw_params"]


def draw_params(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, min_p: float = 0.0
) -> DrawParams:
    """Returns the parameters of a draw without rules."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return DrawParams(params, seed)


GREEDY = draw_params(temperature=0.0)
