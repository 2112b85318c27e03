"""`Capacity`: the largest request that a replica can run."""

from dataclasses import dataclass

__all__ = ["Capacity"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest request that a replica can ever run. Most replicas of a tier have the same.

    Attributes:
        max_tokens: the most tokens: on decode of a prompt and its completion, on prefill of a
            prompt.
        max_candidates: the most candidates.
    """

    max_tokens: int
    max_candidates: int

    def holds(self, num_tokens: int, num_candidates: int = 1) -> bool:
        """Whether a request fits."""
        return num_tokens <= self.max_tokens and num_candidates <= self.max_candidates
