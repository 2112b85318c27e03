"""`ModelPart`: the part of a model that one rank computes."""

from dataclasses import dataclass

from baton.common.errors import ConfigurationError
from kernels import Cut, RankGroup

__all__ = ["WHOLE_MODEL", "ModelPart"]


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The layers that a rank computes, and the ranks with which it divides each of them.

    A pipeline's stages have contiguous layers (GPipe, arXiv:1811.06965): the first has the
    embedding too, the last the final norm and the output head.

    Attributes:
        ranks: the ranks that divide each layer; None for one.
        stage: number of the stage, from 0.
        num_stages: number of stages.
    """

    ranks: RankGroup | None = None
    stage: int = 0
    num_stages: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it reads token ids; other stages read hidden states."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits; other stages return hidden states of all tokens."""
        return self.stage == self.num_stages - 1

    def layers(self, num_layers: int) -> Cut:
        """Returns the stage's range of a model's layers.

        Raises:
            ConfigurationError: the layers cannot be divided among that many stages.
        """
        if num_layers % self.num_stages:
            raise ConfigurationError(
                f"--pipeline-parallel-size is {self.num_stages}; it must divide the model's "
                f"{num_layers} layers"
            )
        return Cut(self.num_stages, self.stage, self.stage + 1).times(num_layers // self.num_stages)


WHOLE_MODEL = ModelPart()
