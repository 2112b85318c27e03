"""The native CPU kernels of look-ups, maxima and recorded steps, and the weights of all others.

They take float32 and bfloat16 tensors of the CPU. For what the library does not implement (odd
head widths in bfloat16, 8-bit caches), they call the reference.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels import reference
from kernels.dispatch import NATIVE
from kernels.host import fresh_zeros
from kernels.library import commands
from kernels.library.commands import CommandType, NativeKernels
from kernels.native.packed_weight import ELEMENT_TYPES, PanelWeight, make_packed_weight
from kernels.native.quantized_weight import SERVED_FORMATS, BlockTable, make_quantized_weight
from kernels.native.recording import note_command, note_mark, record_commands
from kernels.paged_kv import Rotation
from kernels.recorded_step import Arena, RecordedStep
from kernels.weights import (
    QuantizedForm,
    ServedFormats,
    TensorWeight,
    Weight,
    WeightStack,
    WeightUse,
)

__all__ = [
    "embed",
    "embed_part",
    "is_vector",
    "make_weight",
    "make_weight_stack",
    "mark_step",
    "record_step",
    "residual_fields",
    "residual_rows",
    "rotary_angles",
    "row_maxima",
    "rows_of",
    "run_command",
    "served_formats",
    "take_rows",
]


@NATIVE.implements(reference.served_formats)
def served_formats(device: torch.device, dtype: torch.dtype) -> ServedFormats:
    return SERVED_FORMATS


@NATIVE.implements(reference.make_weight)
def make_weight(
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> TensorWeight:
    shape = num_rows, num_columns
    if form is not None:
        return make_quantized_weight(_library(), *shape, dtype, use, form)
    if use is WeightUse.LOOKUP:
        return reference.make_weight(*shape, dtype, device, use)
    return make_packed_weight(_library(), *shape, dtype, use)


@NATIVE.implements(reference.make_weight_stack)
def make_weight_stack(
    num_matrices: int,
    num_rows: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    use: WeightUse,
    form: QuantizedForm | None = None,
) -> WeightStack:
    template = make_weight(num_rows, num_columns, dtype, device, use, form)
    data = fresh_zeros((num_matrices, *template.data.shape), template.data.dtype)
    return WeightStack(num_matrices * num_rows, num_columns, use, data, num_matrices, template)


@NATIVE.implements(reference.embed)
def embed(
    token_ids: torch.Tensor,
    weight: Weight,
    *,
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """Takes zeros for an id that is no row of the weight, where the reference raises an error."""
    table = _table_of(weight)
    out = torch.empty((len(token_ids), weight.num_columns), dtype=table.dtype)
    if addend is not None:
        addend = residual_rows(addend, out.dtype, out.shape)
    _take_rows(table, token_ids, out, held=(0, weight.num_rows), scale=scale, addend=addend)
    return out


@NATIVE.implements(reference.embed_part)
def embed_part(token_ids: torch.Tensor, weight: Weight, first_id: int) -> torch.Tensor:
    out = torch.empty((len(token_ids), weight.num_columns))
    _take_rows(_table_of(weight), token_ids, out, held=(first_id, weight.num_rows))
    return out


@NATIVE.implements(reference.take_rows)
def take_rows(
    matrix: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gives zeros for a row that the matrix does not have, where the reference raises an error."""
    matrix, keeps_address = rows_of(matrix), out is not None
    if out is None:
        out = torch.empty((len(rows), matrix.shape[1]), dtype=matrix.dtype)
    assert out.shape == (len(rows), matrix.shape[1])
    assert out.dtype == matrix.dtype
    assert out.is_contiguous()
    table = _Table(matrix, matrix.dtype)
    _take_rows(table, rows, out, held=(0, len(matrix)), keeps_address=keeps_address)
    return out


@NATIVE.implements(reference.rotary_angles)
def rotary_angles(positions: torch.Tensor, frequencies: torch.Tensor, amplitude: float) -> Rotation:
    assert positions.dtype == torch.int64
    assert is_vector(frequencies, len(frequencies), torch.float32)
    positions = positions.contiguous()
    cos, sin = torch.empty((2, len(positions), len(frequencies))).unbind()
    run_command(
        commands.ROTARY_ANGLES,
        positions.data_ptr(),
        len(positions),
        frequencies.data_ptr(),
        len(frequencies),
        amplitude,
        cos.data_ptr(),
        sin.data_ptr(),
        keep=(cos, sin),
    )
    return Rotation(cos, sin)


@NATIVE.implements(reference.row_maxima)
def row_maxima(
    logits: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.dtype == torch.float32
    rows = rows_of(logits)
    if out is None:
        maxima = torch.empty(len(rows))
        indices = torch.empty(len(rows), dtype=torch.int64)
        keep: tuple[torch.Tensor, ...] = (rows, maxima, indices)
    else:
        maxima, indices = out
        assert is_vector(maxima, len(rows), torch.float32)
        assert is_vector(indices, len(rows), torch.int64)
        keep = (rows,)  # the caller's tensors keep their addresses
    run_command(
        commands.ARGMAX,
        rows.data_ptr(),
        rows.stride(0),
        *rows.shape,
        maxima.data_ptr(),
        indices.data_ptr(),
        keep=keep,
    )
    return maxima, indices


@NATIVE.implements(reference.record_step)
def record_step(
    device: torch.device, arena: Arena, run: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, RecordedStep | None]:
    return record_commands(_library(), arena, run)


@NATIVE.implements(reference.mark_step)
def mark_step(device: torch.device, number: int) -> None:
    note_mark(number)


class _Table(NamedTuple):
    """A matrix of which rows are looked up.

    Attributes:
        data: its memory.
        dtype: type of its rows.
        is_packed: whether it is in panels.
        format: the code of its storage format in commands.
    """

    data: torch.Tensor
    dtype: torch.dtype
    is_packed: bool = False
    format: int = 0


def _table_of(weight: Weight) -> _Table:
    assert isinstance(weight, TensorWeight)
    if isinstance(weight, PanelWeight):
        return _Table(weight.data, weight.dtype, is_packed=True, format=weight.form[0])
    stored = weight.format.code if isinstance(weight, BlockTable) else 0
    return _Table(weight.data, weight.dtype, format=stored)


def _take_rows(
    table: _Table,
    rows: torch.Tensor,
    out: torch.Tensor,
    *,
    held: tuple[int, int],
    scale: float = 1.0,
    addend: torch.Tensor | None = None,
    keeps_address: bool = False,
) -> None:
    """Looks up rows.

    Args:
        table: the matrix.
        rows: numbers of the rows.
        out: memory for them.
        held: number of the matrix's first row, and how many rows it has.
        scale: factor on the rows.
        addend: added to the rows; `out` then has the matrix's type, as with a scale.
        keeps_address: whether `out` is the caller's, so that a recording writes there.
    """
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    assert rows.dim() == 1
    matrix = table.data
    run_command(
        commands.TAKE_ROWS,
        ELEMENT_TYPES[table.dtype],
        matrix.data_ptr(),
        table.is_packed,
        matrix.stride(0),
        out.shape[1],
        *held,
        rows.data_ptr(),
        len(rows),
        scale,
        *residual_fields(addend),
        out.data_ptr(),
        out.dtype == torch.float32,
        table.format,
        keep=(matrix,) if keeps_address else (matrix, out),
    )


def run_command(kind: CommandType, *fields: float, keep: tuple[torch.Tensor, ...]) -> None:
    """Runs a command, or records it if this thread records a step.

    Args:
        kind: the command's type.
        fields: in the order of `kind`.
        keep: the tensors that the command reads or writes; a recording keeps them alive.
    """
    packed = kind.pack(*fields)
    if not note_command(kind, packed, keep):
        _library().run(packed)


def is_vector(values: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    """Returns whether `values` is a contiguous vector of that size and type."""
    return values.dtype == dtype and values.shape == (size,) and values.is_contiguous()


def _library() -> NativeKernels:
    library = commands.library()
    if library is None:
        raise RuntimeError("no native library is loaded")
    return library


def residual_rows(
    residual: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Returns a residual as the library reads it, `[rows, columns]`."""
    assert residual.dtype == dtype
    assert residual.shape == shape
    return rows_of(residual)


def residual_fields(residual: torch.Tensor | None) -> tuple[int, int]:
    """Returns the address and the stride of a residual's rows; zeros if there is none."""
    return (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))


def rows_of(matrix: torch.Tensor) -> torch.Tensor:
    """Returns `[rows, columns]`, copied if neighbouring columns are not adjacent."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
