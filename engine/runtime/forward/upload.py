"""`Upload`: memory on the device for the numbers of a step, which are sent in one copy."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.runtime.device import to_device

__all__ = ["Upload"]


class Upload:
    """Sends arrays of int64 to the same memory, through one pinned buffer.

    Args:
        num_words: size of the memory.
        device: where it is.

    Attributes:
        memory: `[num_words]` int64.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_words, dtype=torch.int64, device=device)

    def send(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Copies arrays one behind the other, the first to the start of the memory.

        Those that the memory has no room for get memory of their own. The step's launches must
        be submitted before the next call.

        Returns:
            The arrays on the device, in their shapes.
        """
        ends = np.cumsum([array.size for array in arrays])
        num_fitting = int(np.searchsorted(ends, len(self.memory), side="right"))
        if num_fitting:
            self._copy(arrays[:num_fitting])
        starts = ends - [array.size for array in arrays]
        return [
            self.memory[start:end].view(array.shape)
            if index < num_fitting
            else to_device(array, self.memory.device)
            for index, (array, start, end) in enumerate(zip(arrays, starts, ends, strict=True))
        ]

    def _copy(self, arrays: Sequence[np.ndarray]) -> None:
        words = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
        if self.memory.device.type == "cuda":
            words = words.pin_memory()  # torch keeps it until the copy is complete
        self.memory[: len(words)].copy_(words, non_blocking=True)
