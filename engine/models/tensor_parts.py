"""Parts of a checkpoint's tensors, and their targets in the memory of a model.

A target copies the elements that the loader reads. It may store them in another order than the
checkpoint: transposed, or with other rows.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from kernels import Cut, RowsOfWeight, dequantize
from kernels.block_rows import BlockRows

__all__ = [
    "OneOfStack",
    "OrderedRows",
    "StoredModule",
    "TensorPart",
    "TransposedRows",
    "WeightTarget",
    "as_numbers",
    "fill",
    "group_of",
    "grouped_order",
    "half_split_order",
    "part_of",
    "renamed_parts",
    "stored_name",
    "transposed_parts",
]

WeightTarget = torch.Tensor | RowsOfWeight
"""The target of a part of a tensor of the checkpoint: it has the part's shape, and `copy_`."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A part of a tensor of the checkpoint, and its target.

    Attributes:
        name: the tensor's.
        target: the place for the part.
        cuts: per axis of the tensor, the range that the part is.
        is_quantized: whether the tensor has bytes that the target makes blocks of.
        takes_blocks: whether the target is rows of a `PackedModule`, of whose weight these parts
            are all rows in their order, and which may be blocks.
    """

    name: str
    target: WeightTarget
    cuts: tuple[Cut, ...]
    is_quantized: bool = False
    takes_blocks: bool = False

    @classmethod
    def whole(cls, name: str, target: WeightTarget) -> "TensorPart":
        """The part that is the whole tensor."""
        return cls(name, target, tuple(Cut.whole(size) for size in target.shape))

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(cut.total for cut in self.cuts)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return all(cut.is_whole for cut in self.cuts)

    @property
    def is_of_whole_rows(self) -> bool:
        """Whether it is a range of the first axis, whose elements follow each other in a file."""
        return all(cut.is_whole for cut in self.cuts[1:])

    @property
    def index(self) -> tuple[slice, ...]:
        """The part as an index of the whole tensor."""
        return tuple(cut.slice for cut in self.cuts)

    def pieces(self, num_elements: int) -> Iterator["TensorPart"]:
        """Yields parts of it, whose whole rows have at most so many elements if its target can be
        divided.
        """
        group = group_of(self.target)
        if len(self.cuts) != 2 or not group:
            yield self
            return
        rows, columns = self.cuts
        # Whole rows are read, of which a rank may have some columns.
        step = max(1, num_elements // max(1, columns.total) // group) * group
        for first in range(0, rows.size, step):
            count = min(step, rows.size - first)
            cut = Cut(rows.total, rows.start + first, rows.start + first + count)
            target = part_of(self.target, first, count)
            yield replace(self, target=target, cuts=(cut, columns))


class StoredModule(nn.Module, ABC):
    """A module that says how the checkpoint stores its weights.

    Of other modules, each parameter is a whole tensor of the checkpoint.

    Attributes:
        parameter_dtype: type of its parameters; None for the type of the model's weights.
    """

    parameter_dtype: ClassVar[torch.dtype | None] = None

    @abstractmethod
    def checkpoint_tensors(self, path: str) -> Iterator[TensorPart]:
        """Yields the parts of the checkpoint's tensors; `path` is the module's name there."""


class OrderedRows(RowsOfWeight):
    """A target whose rows, or elements of a bias, have another order than the checkpoint's.

    Args:
        target: the rows in the model's order.
        order: `[n]` int64 on the CPU, where `n` divides the number of rows. Row i of each group of
            `n` rows is row `order[i]` of the same group in the checkpoint.
    """

    def __init__(self, target: WeightTarget, order: torch.Tensor) -> None:
        self.shape, self.nbytes = tuple(target.shape), target.nbytes
        self._target, self._order = target, order
        self.group = len(order) if group_of(target) == 1 else 0

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        if isinstance(source, BlockRows):
            groups = torch.arange(self.shape[0], device="cpu").view(-1, len(self._order))
            fill(self._target, source.take(groups[:, self._order].flatten()))
            return
        groups = source.view(-1, len(self._order), *source.shape[1:])
        ordered = groups.index_select(1, self._order.to(source.device))
        self._target.copy_(ordered.flatten(0, 1))

    @override
    def part(self, first: int, count: int) -> "OrderedRows":
        return OrderedRows(part_of(self._target, first, count), self._order)


class OneOfStack(RowsOfWeight):
    """A target of one matrix, or one vector, of a tensor that stacks several.

    Args:
        target: the matrix.
    """

    def __init__(self, target: WeightTarget) -> None:
        self.shape, self.nbytes = (1, *target.shape), target.nbytes
        self._target = target

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        fill(self._target, source if isinstance(source, BlockRows) else source[0])


class TransposedRows(RowsOfWeight):
    """A target that stores the transpose of a checkpoint tensor.

    Args:
        target: the matrix in the model's orientation.
    """

    def __init__(self, target: WeightTarget) -> None:
        self.shape = (target.shape[1], target.shape[0])
        self.nbytes = target.nbytes
        self._target = target

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        self._target.copy_(as_numbers(source).t())


def group_of(target: WeightTarget) -> int:
    """Returns the number of rows of a target that must be copied together; 0 for all."""
    return 1 if isinstance(target, torch.Tensor) else target.group


def part_of(target: WeightTarget, first: int, count: int) -> WeightTarget:
    """Returns rows `first` to `first + count` of a target, which are whole groups."""
    if isinstance(target, torch.Tensor):
        return target[first : first + count]
    return target.part(first, count)


def fill(target: WeightTarget, source: torch.Tensor | BlockRows) -> None:
    """Copies a part of a checkpoint's tensor to its target; dense targets get numbers."""
    if isinstance(target, torch.Tensor):
        target.copy_(as_numbers(source))
    else:
        target.copy_(source)


def as_numbers(source: torch.Tensor | BlockRows) -> torch.Tensor:
    """Returns the numbers of rows; those of blocks are exact, in float32."""
    return dequantize(source, torch.float32) if isinstance(source, BlockRows) else source


def half_split_order(head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Returns the `OrderedRows` of heads whose checkpoint pairs neighbours in rotary embedding.

    Element i of the rotary part's first half is element 2i of the checkpoint's head, and element i
    of its second half is element 2i + 1. Attention scores do not change if Q and K have the same
    order, so the kernels need to know only pairs of one kind.

    Args:
        head_dim: width of a head.
        rotary_dim: number of its first elements that are rotated, even.
    """
    elements = torch.arange(head_dim, device="cpu")
    rotated = elements[:rotary_dim]
    return torch.cat((rotated[0::2], rotated[1::2], elements[rotary_dim:]))


def grouped_order(num_groups: int, widths: Sequence[int]) -> torch.Tensor:
    """Returns the `OrderedRows` of layers side by side that the checkpoint has group by group.

    Args:
        num_groups: number of groups, each of which has rows of every layer.
        widths: number of rows of each layer in all groups.
    """
    stored = torch.arange(sum(widths), device="cpu").view(num_groups, -1)
    parts = torch.split(stored, [width // num_groups for width in widths], dim=1)
    return torch.cat([part.flatten() for part in parts])


def transposed_parts(parts: Iterable[TensorPart]) -> Iterator[TensorPart]:
    """Yields the parts of tensors that the checkpoint stores transposed; biases are unchanged."""
    for part in parts:
        if len(part.cuts) == 1:
            yield part
        else:
            yield TensorPart(part.name, TransposedRows(part.target), part.cuts[::-1])


def renamed_parts(parts: Iterable[TensorPart], names: Mapping[str, str]) -> Iterator[TensorPart]:
    """Yields parts under a family's names, see `stored_name`."""
    for part in parts:
        yield replace(part, name=stored_name(part.name, names))


def stored_name(name: str, names: Mapping[str, str]) -> str:
    """Returns a family's name of a tensor or a module.

    Args:
        name: the name that the model has for it.
        names: the family's name of a module by the model's. Each is one component of a tensor's
            name, or several, as in `self_attn.o_proj`; of two that match, the longer one counts.
    """
    return _pattern_of(tuple(names)).sub(lambda match: names[match[1]], name) if names else name


@cache
def _pattern_of(names: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])")
