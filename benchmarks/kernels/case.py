"""`Case`: a primitive on inputs of one shape; `Numbers`: where its inputs come from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from benchmarks.kernels.cost import Cost
from kernels import Weight, WeightUse

__all__ = ["CPU", "Call", "Case", "Numbers", "Result", "rows_in_words"]

Result = torch.Tensor | tuple[torch.Tensor, ...]
Call = Callable[[], Result]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Numbers:
    """Which kernels compute on what: two that differ in nothing but the module, or in what
    numbers are kept in, meet equal inputs.

    Attributes:
        module: `kernels`, or `kernels.reference`.
        dtype: that inputs are rounded to.
        kept_as: the type of the tensors that hold them.
    """

    module: ModuleType
    dtype: torch.dtype
    kept_as: torch.dtype

    def normal(self, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of standard deviation `scale`, a function of shape and seed."""
        generator = torch.Generator().manual_seed(seed)
        numbers = scale * torch.randn(shape, generator=generator)
        return numbers.to(self.dtype).to(self.kept_as)

    def weights(
        self, num_rows: int, num_columns: int, use: WeightUse, num_copies: int
    ) -> list[Weight]:
        """Equal weights that keep the size of what they multiply."""
        matrix = self.normal(num_rows, num_columns, seed=1, scale=num_columns**-0.5)
        return [self._filled(matrix, use) for _ in range(num_copies)]

    def _filled(self, matrix: torch.Tensor, use: WeightUse) -> Weight:
        weight: Weight = self.module.make_weight(*matrix.shape, matrix.dtype, CPU, use)
        parts = matrix.chunk(2 if use is WeightUse.GATED_LINEAR else 1)
        for index, part in enumerate(parts):
            weight.rows(index * len(part), len(part)).copy_(part)
        return weight


@dataclass(frozen=True, slots=True)
class Case:
    """A primitive on inputs of one shape.

    Attributes:
        primitive: its name in `kernels`.
        what: which of a model's uses it is.
        size: rows, or sequences and their contexts, in words.
        cost: of a call.
        num_terms: of the longest sums, which errors grow with.
        make_calls: given kernels and numbers, and how many copies to make of what must come from
            memory: as many calls, each on a copy of its own.
        max_copies: more there cannot be; None for no limit.
        is_recordable: False where inputs are rewritten, which a recording would take for its own.
    """

    primitive: str
    what: str
    size: str
    cost: Cost
    num_terms: int
    make_calls: Callable[[Numbers, int], Sequence[Call]]
    max_copies: int | None = None
    is_recordable: bool = True


def rows_in_words(num_rows: int) -> str:
    """For `Case.size`."""
    return f"{num_rows} row{'s' if num_rows > 1 else ''}"
