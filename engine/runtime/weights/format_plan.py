"""`plan_formats`: decides in which form each weight of a model is kept, before any is allocated.

A weight keeps the storage format of its tensors if kernels serve that format on its device. Layers
that are one weight may have parts in several formats. All others become dense, which takes more
memory and gives the same numbers; a line in the log says which and why.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from torch import nn

from baton.common.container_limits import mebibytes
from engine.models.layers import CausalModel
from engine.models.linear import PackedModule
from engine.models.tensor_parts import TensorPart
from kernels import QuantizedForm, ServedFormats
from kernels.formats import FORMATS, WeightFormat

__all__ = ["FormatOf", "FormatPlan", "divides_blocks", "plan_formats"]

_NO_KERNELS = "for which this device and --dtype have no kernels"
_CUT_BLOCKS = "whose blocks --tensor-parallel-size divides"
_STORED_DENSELY = "which the model stores densely"
_MIXED = "beside parts of one weight in other formats"
_INPUTS_OF_SCALE = 32  # consecutive inputs that fast products round with one scale, or two of 16
_WITH_SCALE_OF_ROW = frozenset([FORMATS["FP8"]])  # fast products round a whole row with one scale

FormatOf = Callable[[str], WeightFormat | None]
"""Returns the storage format of a checkpoint's tensor by its name; None for numbers."""

_logger = logging.getLogger("baton.engine")


@dataclass(slots=True)
class FormatPlan:
    """The forms of a model's quantized weights.

    Attributes:
        kept: bytes of the tensors that are kept as they are, by the name of their format.
        dequantized: numbers of the tensors that become dense, by format and reason.
    """

    kept: Counter[str] = field(default_factory=Counter)
    dequantized: Counter[tuple[str, str]] = field(default_factory=Counter)

    def log(self, itemsize: int) -> None:
        """Logs the plan, if the model has quantized tensors.

        Args:
            itemsize: bytes of a dense weight.
        """
        if self.kept:
            texts = [f"{mebibytes(size)} {name}" for name, size in self.kept.most_common()]
            _logger.info("quantized weights: %s", ", ".join(texts))
        for (name, reason), count in self.dequantized.items():
            size = mebibytes(count * itemsize)
            _logger.info("weights in %s, %s, are dequantized: %s", name, reason, size)


def plan_formats(
    model: CausalModel,
    format_of: FormatOf,
    served: ServedFormats,
    *,
    is_fast: bool,
) -> FormatPlan:
    """Sets the forms of a model's weights.

    Args:
        model: the part of the model that this process computes; nothing of it is allocated.
        format_of: returns the storage format of a checkpoint's tensor.
        served: the formats that kernels serve.
        is_fast: whether weights are computed fast where kernels can.
    """
    plan = FormatPlan()
    for module, parts in model.parts_by_module():
        tensors = [_Stored.of(part, format_of(part.name)) for part in parts]
        if any(tensor.format for tensor in tensors):
            forms = [tensor.form(served, is_fast=is_fast) for tensor in tensors]
            _plan_module(plan, module, tensors, forms)
    return plan


def divides_blocks(model: CausalModel, format_of: FormatOf, fast: Set[WeightFormat]) -> bool:
    """Whether ranks divide a weight that is computed fast inside of a block, or of inputs that are
    rounded with one scale. The numbers of such ranks are those of no other number of ranks.

    Args:
        model: all layers of one of the ranks, whose ranges of columns have one width.
        format_of: as for `plan_formats`.
        fast: the formats that kernels compute fast.
    """
    for part in chain.from_iterable(model.checkpoint_tensors().values()):
        weight_format = format_of(part.name)
        if weight_format in fast and part.takes_blocks and not part.is_quantized:
            assert weight_format is not None
            columns, unit = part.cuts[-1], max(weight_format.block, _INPUTS_OF_SCALE)
            is_cut = weight_format in _WITH_SCALE_OF_ROW or columns.size % unit
            if is_cut and not columns.is_whole:
                return True
    return False


def _plan_module(
    plan: FormatPlan,
    module: nn.Module,
    tensors: Sequence["_Stored"],
    forms: Sequence[QuantizedForm | str | None],
) -> None:
    """Sets the forms of one module's weight, and adds its parts to the plan."""
    rows = [
        (tensor.num_rows, form if isinstance(form, QuantizedForm) else None)
        for tensor, form in zip(tensors, forms, strict=True)
        if tensor.part.takes_blocks
    ]
    has_forms = isinstance(module, PackedModule) and bool(rows) and module.take_forms(rows)
    for tensor, form in zip(tensors, forms, strict=True):
        if tensor.format is None:
            continue
        if has_forms and isinstance(form, QuantizedForm):
            row_bytes = tensor.format.row_bytes(tensor.num_columns)
            plan.kept[tensor.format.name] += tensor.num_rows * row_bytes
        else:
            reason = form if isinstance(form, str) else _MIXED
            plan.dequantized[tensor.format.name, reason] += tensor.num_rows * tensor.num_columns


@dataclass(frozen=True, slots=True)
class _Stored:
    """A part of a checkpoint's tensor.

    Attributes:
        part: the part.
        format: its storage format; None for numbers.
        num_rows: number of rows.
        num_columns: numbers in a row.
    """

    part: TensorPart
    format: WeightFormat | None
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, part: TensorPart, weight_format: WeightFormat | None) -> "_Stored":
        shape = tuple(part.target.shape)
        if part.is_quantized and part.takes_blocks:  # [1, rows, blocks, bytes of a block]
            weight_format, shape = FORMATS["MXFP4"], (*shape[:-2], shape[-2] * 32)
        return cls(part, weight_format, math.prod(shape[:-1]), shape[-1])

    def form(self, served: ServedFormats, *, is_fast: bool) -> QuantizedForm | str | None:
        """Returns its form, or the reason why it becomes dense; None if the file has numbers."""
        if self.format is None:
            return None
        if not self.part.takes_blocks:
            return _STORED_DENSELY
        if self.format not in served.exact | served.fast:
            return _NO_KERNELS
        columns, block = self.part.cuts[-1], self.format.block or 1
        if not self.part.is_quantized and (columns.start % block or columns.end % block):
            return _CUT_BLOCKS
        is_exact = not (is_fast and self.format in served.fast)
        return QuantizedForm(self.format, is_exact)
