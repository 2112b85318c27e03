"""Types of mixtures of experts (arXiv:1701.06538): routing rules and routings.

A layer routes each row to the `top_k` experts with the highest scores. A *pair* is a row together
with one of its experts. Pairs are numbered by row and then by rank of the score. The layers of an
expert read its pairs as neighbouring rows, in *slots*: slots are sorted by expert, and those of
one expert by pair.
"""

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["MIN_WEIGHT_SUM", "ExpertScores", "Routing", "RoutingRule"]

MIN_WEIGHT_SUM = 1e-20
"""Added to the sum by which weights are divided: sigmoids may all be 0."""


class ExpertScores(Enum):
    """The scores that rank experts, and weigh their outputs."""

    SOFTMAX = "softmax"
    """Softmax over all experts' logits."""
    SOFTMAX_OF_CHOSEN = "softmax of chosen"
    """Experts are ranked by logits; the weights are the softmax over those of the chosen ones."""
    SIGMOID = "sigmoid"
    """The sigmoid of each expert's logit."""


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How rows choose experts.

    Attributes:
        top_k: number of experts that each row chooses.
        scores: the scores that rank experts.
        normalizes: whether a row's weights are divided by their sum.
        rounds: whether weights are rounded to the logits' type.
        scale: factor on the weights, after they are normalized.
        num_groups: number of groups of neighbouring experts, equally large.
        top_groups: number of groups whose experts a row may choose: those with the highest scores.
            Together they have at least `top_k` experts.
        group_terms: number of a group's highest scores that are added up to its score.
    """

    top_k: int
    scores: ExpertScores = ExpertScores.SOFTMAX
    normalizes: bool = False
    rounds: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_terms: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that rows have chosen, among those of this rank.

    Attributes:
        weights: `[rows, top_k]` float32, for the outputs of each row's experts, which are in
            descending order of their scores.
        slots: `[rows, top_k]` int32; the slot of each pair, -1 if another rank has its expert.
        rows: `[rows * top_k]` int32; the row of the pair in each slot. Entries beyond the slots
            that are in use are undefined.
        starts: `[num_experts + 1]` int32; expert i of this rank has slots `starts[i]` to
            `starts[i + 1]`.
    """

    weights: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
