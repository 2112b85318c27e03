"""`RecordedStep`: a forward pass that ran once through Python and runs again without it.

What a model does to a step of a given size is the same every time; only the contents of
its inputs change.
"""

from abc import ABC, abstractmethod

import torch

__all__ = ["Arena", "RecordedStep"]


class Arena:
    """Memory on the CPU that recorded steps share, of which one runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Where it is; changes when it grows."""
        return self._memory.data_ptr()

    def reserve(self, num_bytes: int) -> None:
        """Grows to `num_bytes`, if smaller; what was there is gone."""
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor at `offset` that has the shape and type of `like`."""
        part = self._memory[offset : offset + like.nbytes]
        return part.view(like.dtype).view(like.shape)


class RecordedStep(ABC):
    """A step to be run again."""

    @abstractmethod
    def run(self) -> torch.Tensor:
        """Runs the step on what its inputs hold now.

        Returns:
            The result; the next recorded step of the same arena overwrites it.
        """
