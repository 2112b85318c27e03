"""`plan_formats`: decides in which form each weight of a model is kept, before any is allocated.

A weight keeps the storage format of its tensors if kernels serve that format on its device. Layers
that are one weight may have parts in several formats. All others become dense, which takes more
memory and gives the same numbers; a line in the log says which and why.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from baton.common.container_limits import mebibytes
from engine.models.layers import CausalModel
from engine.models.linear import PackedModule
from engine.models.tensor_parts import TensorPart
from kernels import QuantizedForm, ServedFormats
from kernels.formats import WeightFormat

__all__ = ["FormatPlan", "plan_formats"]

_NO_KERNELS = "for which this device and --dtype have no kernels"
_CUT_BLOCKS = "whose blocks --tensor-parallel-size divides"
_OTHER_ORDER = "which the model stores in another order"
_MIXED = "beside parts of one weight in other formats"

_logger = logging.getLogger("baton.engine")


@dataclass(slots=True)
class FormatPlan:
    """The forms of a model's quantized weights.

    Attributes:
        kept: bytes of the tensors that are kept as they are, by the name of their format.
        dequantized: numbers of the tensors that become dense, by format and reason.
        is_fast: whether inputs of a layer are rounded to eight bits, which changes the KV.
    """

    kept: Counter[str] = field(default_factory=Counter)
    dequantized: Counter[tuple[str, str]] = field(default_factory=Counter)
    is_fast: bool = False

    def log(self, itemsize: int) -> None:
        """Logs the plan, if the model has quantized tensors.

        Args:
            itemsize: bytes of a dense weight.
        """
        if self.kept:
            texts = [f"{mebibytes(size)} {name}" for name, size in self.kept.most_common()]
            _logger.info("weights in the formats of the file: %s", ", ".join(texts))
        for (name, reason), count in self.dequantized.items():
            size = mebibytes(count * itemsize)
            _logger.info("weights in %s, %s, are dequantized: %s", name, reason, size)


def plan_formats(
    model: CausalModel,
    format_of: Callable[[str], WeightFormat | None],
    served: ServedFormats,
    *,
    is_fast: bool,
) -> FormatPlan:
    """Sets the forms of a model's weights.

    Args:
        model: the part of the model that this process computes; nothing of it is allocated.
        format_of: returns the storage format of a checkpoint's tensor by its name; None for
            numbers.
        served: the formats that kernels serve.
        is_fast: whether weights are computed fast where kernels can.
    """
    plan = FormatPlan()
    for module, parts in model.parts_by_module():
        formats = {part.name: format_of(part.name) for part in parts}
        if any(formats.values()):
            forms = [_form(formats[part.name], part, served, is_fast=is_fast) for part in parts]
            _plan_module(plan, module, parts, forms, formats)
    return plan


def _plan_module(
    plan: FormatPlan,
    module: nn.Module,
    parts: Sequence[TensorPart],
    forms: Sequence[QuantizedForm | str | None],
    formats: dict[str, WeightFormat | None],
) -> None:
    """Sets the forms of one module's weight, and adds its parts to the plan."""
    rows = [
        (part.target.shape[-2], form if isinstance(form, QuantizedForm) else None)
        for part, form in zip(parts, forms, strict=True)
        if part.takes_blocks
    ]
    has_forms = isinstance(module, PackedModule) and bool(rows) and module.take_forms(rows)
    for part, form in zip(parts, forms, strict=True):
        weight_format = formats[part.name]
        if weight_format is None:
            continue
        num_rows, num_columns = math.prod(part.target.shape[:-1]), part.target.shape[-1]
        if has_forms and isinstance(form, QuantizedForm):
            plan.kept[weight_format.name] += num_rows * weight_format.row_bytes(num_columns)
            plan.is_fast |= not form.is_exact
        else:
            reason = form if isinstance(form, str) else _MIXED
            plan.dequantized[weight_format.name, reason] += num_rows * num_columns


def _form(
    weight_format: WeightFormat | None, part: TensorPart, served: ServedFormats, *, is_fast: bool
) -> QuantizedForm | str | None:
    """Returns the form of a part, or the reason why it becomes dense; None if it is dense."""
    if weight_format is None:
        return None
    if not part.takes_blocks:
        return _OTHER_ORDER
    if weight_format not in served.exact | served.fast:
        return _NO_KERNELS
    columns, block = part.cuts[-1], weight_format.block or 1
    if columns.start % block or columns.end % block:
        return _CUT_BLOCKS
    is_exact = not (is_fast and weight_format in served.fast)
    return QuantizedForm(weight_format, is_exact)
