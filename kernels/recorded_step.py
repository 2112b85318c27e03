"""`RecordedStep`: a forward pass that ran once through Python and runs again without it.

What a model does to a step of a given size is the same every time; only the contents of
its inputs change.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

__all__ = ["Arena", "ArenaPlace", "RecordedStep"]


# Known by identity: the arena keeps what it made of it for as long as it lives.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ArenaPlace:
    """Where in an arena a tensor lies.

    Attributes:
        offset: in bytes.
        like: of the tensor's shape and type, without memory.
    """

    offset: int
    like: torch.Tensor


class Arena:
    """Memory on the CPU that recorded steps share, of which one runs at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._tensors: WeakKeyDictionary[ArenaPlace, torch.Tensor] = WeakKeyDictionary()

    @property
    def address(self) -> int:
        """Where it is; changes when it grows."""
        return self._memory.data_ptr()

    def reserve(self, num_bytes: int) -> None:
        """Grows to `num_bytes`, if smaller; what was there is gone."""
        if self._memory.nbytes < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            self._tensors.clear()

    def tensor(self, place: ArenaPlace) -> torch.Tensor:
        """What lies there."""
        tensor = self._tensors.get(place)
        if tensor is None:
            like = place.like
            part = self._memory[place.offset : place.offset + like.nbytes]
            tensor = self._tensors[place] = part.view(like.dtype).view(like.shape)
        return tensor


class RecordedStep(ABC):
    """A step to be run again."""

    @abstractmethod
    def run(self, on_mark: Callable[[int], None] | None = None) -> torch.Tensor:
        """Runs the step on what its inputs hold now.

        Args:
            on_mark: called with the number of each `kernels.mark_step` of the recorded run, when
                all before it is computed. Steps on a GPU, which return earlier, have no marks.

        Returns:
            The result; the next recorded step of the same arena overwrites it.
        """
