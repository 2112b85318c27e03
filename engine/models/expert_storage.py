"""The forms in which checkpoints store the matrices of experts, and their targets in a model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum

import torch
from typing_extensions import override

from engine.models.tensor_parts import (
    OneOfStack,
    TensorPart,
    TransposedRows,
    WeightTarget,
    as_numbers,
    fill,
)
from kernels import Cut, RowsOfWeight
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS

__all__ = ["ExpertStorage", "expert_biases", "expert_matrices"]

_GATE_UP = "experts.gate_up_proj"
_FIRST_GATE = ".experts.0.gate_proj.weight"
_MXFP4 = FORMATS["MXFP4"]


class ExpertStorage(Enum):
    """The form in which a checkpoint stores the experts' matrices."""

    EACH = "each"
    """A tensor for each matrix of each expert, and for its biases."""
    JOINED = "joined"
    """A tensor for the gate and up projections of all experts, and one for the down projections."""
    INTERLEAVED = "interleaved"
    """As `JOINED`, but each matrix is transposed, and the outputs of gate and up take turns."""
    MXFP4 = "mxfp4"
    """As `INTERLEAVED`, in blocks of 4-bit numbers with a scale, and not transposed (Open Compute
    Project, Microscaling Formats 1.0)."""

    def stored_as(self, names: Iterable[str]) -> "ExpertStorage":
        """Returns the form that a checkpoint with tensors of these names has instead of this one.

        Names do not distinguish `JOINED` and `INTERLEAVED`: a family has one of them.
        """
        for name in names:
            if name.endswith(f"{_GATE_UP}_blocks"):
                return ExpertStorage.MXFP4
            if name.endswith(_FIRST_GATE):
                return ExpertStorage.EACH
            if name.endswith(_GATE_UP) and self is ExpertStorage.EACH:
                return ExpertStorage.JOINED
        return self


def expert_matrices(
    storage: ExpertStorage, path: str, experts: Cut, expert: int, parts: dict[str, WeightTarget]
) -> Iterator[TensorPart]:
    """Yields the parts of a checkpoint's tensors that are one expert's matrix.

    Args:
        storage: the form of the checkpoint.
        path: the name there of a tensor of all experts.
        experts: the experts of this rank; its `total` is the number of all.
        expert: the expert's number.
        parts: by the name of a layer, its rows of the matrix; two are gate and up.
    """
    if storage is ExpertStorage.EACH:
        for name, rows in parts.items():
            stored = f"{path.rpartition('.')[0]}.{expert}.{name}.weight"
            yield replace(TensorPart.whole(stored, rows), takes_blocks=True)
        return
    of_all = Cut(experts.total, expert, expert + 1)
    if storage is ExpertStorage.JOINED:
        total, first = sum(rows.shape[0] for rows in parts.values()), 0
        for rows in parts.values():
            of_expert = Cut(total, first, first + rows.shape[0])
            cuts = of_all, of_expert, Cut.whole(rows.shape[1])
            yield TensorPart(path, OneOfStack(rows), cuts, takes_blocks=True)
            first += rows.shape[0]
        return
    matrix = _RowsInTurn([*parts.values()])
    if storage is ExpertStorage.INTERLEAVED:
        yield _of_expert(path, TransposedRows(matrix), of_all)
        return
    quantized = _Mxfp4Matrix(matrix)
    takes_blocks = matrix.shape[1] % _MXFP4.block == 0
    # The scales are small, so they and not the blocks wait in memory.
    yield replace(_of_expert(f"{path}_scales", quantized.scales, of_all), is_quantized=True)
    yield replace(
        _of_expert(f"{path}_blocks", quantized.blocks, of_all),
        is_quantized=True,
        takes_blocks=takes_blocks,
    )


def expert_biases(
    storage: ExpertStorage, path: str, experts: Cut, expert: int, parts: dict[str, torch.Tensor]
) -> Iterator[TensorPart]:
    """Yields the parts of a checkpoint's tensors that are one expert's biases.

    Args:
        storage: the form of the checkpoint.
        path: the name there of the matrices of all experts.
        experts: the experts of this rank; its `total` is the number of all.
        expert: the expert's number.
        parts: by the name of a layer, its biases. Those of several layers take turns in a tensor
            of all experts.
    """
    if storage is ExpertStorage.EACH:
        for name, bias in parts.items():
            yield TensorPart.whole(f"{path.rpartition('.')[0]}.{expert}.{name}.bias", bias)
        return
    of_all = Cut(experts.total, expert, expert + 1)
    yield _of_expert(f"{path}_bias", _RowsInTurn([*parts.values()]), of_all)


def _of_expert(name: str, target: WeightTarget, of_all: Cut) -> TensorPart:
    cuts = of_all, *(Cut.whole(size) for size in target.shape)
    return TensorPart(name, OneOfStack(target), cuts)


class _RowsInTurn(RowsOfWeight):
    """Targets of one shape, whose rows take turns in the checkpoint.

    Args:
        targets: rows of matrices, or elements of biases.
    """

    def __init__(self, targets: Sequence[WeightTarget]) -> None:
        rows, *others = targets[0].shape
        self.shape = (len(targets) * rows, *others)
        self.nbytes = sum(target.nbytes for target in targets)
        self._targets = targets

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        for first, target in enumerate(self._targets):
            rows = slice(first, None, len(self._targets))
            fill(target, source.take(rows) if isinstance(source, BlockRows) else source[rows])


class _Mxfp4Matrix:
    """A matrix that the checkpoint has as blocks of 4-bit numbers and the blocks' scales.

    The matrix is filled once both have been copied.

    Args:
        target: the matrix, `[rows, columns]`.

    Attributes:
        scales: target of the exponents of the scales, `[rows, blocks]` uint8.
        blocks: target of the numbers, `[rows, blocks, 16]` uint8: two in each byte, of which the
            low four bits come first.
    """

    def __init__(self, target: WeightTarget) -> None:
        rows, columns = target.shape
        num_blocks = -(-columns // _MXFP4.block)
        self._target = target
        self.scales = _Kept((rows, num_blocks), 0, self._fill)
        self.blocks = _Kept((rows, num_blocks, _MXFP4.block // 2), target.nbytes, self._fill)

    def _fill(self) -> None:
        scales, pairs = self.scales.content, self.blocks.content
        if scales is None or pairs is None:
            return
        self.scales.content = self.blocks.content = None
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(2)
        first, second = codes.chunk(2, dim=-1)  # GGML has these columns in one byte
        data = torch.cat((scales.unsqueeze(-1), first | second << 4), dim=-1).flatten(1)
        rows = BlockRows(_MXFP4, data, scales.shape[1] * _MXFP4.block)
        num_columns = self._target.shape[1]
        is_whole = num_columns == rows.num_columns
        fill(self._target, rows if is_whole else as_numbers(rows)[:, :num_columns])


class _Kept(RowsOfWeight):
    """A target that keeps a copy of its elements.

    Args:
        shape: of the elements.
        nbytes: bytes of the model's memory that are filled with them.
        on_copied: called after each copy.

    Attributes:
        content: the elements; None before they are copied.
    """

    def __init__(
        self, shape: tuple[int, ...], nbytes: int, on_copied: Callable[[], object]
    ) -> None:
        self.shape, self.nbytes = shape, nbytes
        self.content: torch.Tensor | None = None
        self._on_copied = on_copied

    @override
    def copy_(self, source: torch.Tensor | BlockRows) -> None:
        self.content = as_numbers(source).clone()
        self._on_copied()
