"""`CodedRows`: rows of a quantized weight, in the numbers that a checkpoint of any kind stores.

They become rows of a storage format of Baton, or, where none has their groups, numbers.
"""

from dataclasses import dataclass
from enum import Enum

import torch

import kernels
from kernels.block_rows import BlockRows
from kernels.formats import FORMATS, WeightFormat

__all__ = ["CODES_PER_WORD", "CodeKind", "CodedRows", "block_format", "unpack_words"]

_MIDDLE = 128  # zero point of int8 codes that are stored as uint8


class CodeKind(Enum):
    """Numbers of a quantized weight. The values are names of formats, the widest block first."""

    INT4 = ("INT4_128", "INT4_32")
    INT8 = ("INT8", "INT8_128", "INT8_32")
    FP8 = ("FP8", "FP8_128")

    @property
    def middle(self) -> float:
        """The zero point of symmetric codes."""
        return {CodeKind.INT4: 8.0, CodeKind.INT8: float(_MIDDLE), CodeKind.FP8: 0.0}[self]


CODES_PER_WORD = {CodeKind.INT4: 8, CodeKind.INT8: 4}
"""Integers in an int32 word."""


def block_format(kind: CodeKind, num_columns: int, group: int) -> WeightFormat | None:
    """Returns the format with the fewest scales that has those of each group; None if none does.

    Args:
        kind: the kind of codes.
        num_columns: columns of the weight.
        group: consecutive columns that share a scale.
    """
    for name in kind.value:
        block = FORMATS[name].block or num_columns
        if num_columns % block == 0 and group % block == 0:
            return FORMATS[name]
    return None


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of a weight whose numbers are `scale * (code - zero)`.

    Attributes:
        kind: the kind of codes.
        codes: `[rows, columns]` uint8: unsigned integers, or the bytes of e4m3 floats.
        scales: `[rows, groups]` float32.
        zeros: `[rows, groups]` float32; None if all are `kind.middle`.
        groups: `[columns]` int64, the group of each column.
    """

    kind: CodeKind
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor

    def in_format(self, weight_format: WeightFormat) -> BlockRows:
        """Returns the rows in a format that `block_format` returned for them.

        Codes of 8-bit integers must have no zero points.
        """
        first_columns = self.groups[:: weight_format.block or len(self.groups)]
        scales, zeros, codes = self.scales[:, first_columns], None, self.codes
        if self.kind is CodeKind.INT4:
            stored = torch.full_like(self.scales, self.kind.middle)
            zeros = (stored if self.zeros is None else self.zeros)[:, first_columns]
        elif self.kind is CodeKind.INT8:
            assert self.zeros is None
            codes = codes ^ _MIDDLE  # int8 in two's complement
        return kernels.pack_rows(weight_format, codes, scales, zeros)

    def numbers(self) -> torch.Tensor:
        """Returns the numbers, `[rows, columns]` float32."""
        if self.kind is CodeKind.FP8:
            numbers = self.codes.view(torch.float8_e4m3fn).float()
        elif self.zeros is None:
            numbers = self.codes.float() - self.kind.middle
        else:
            numbers = self.codes - self.zeros[:, self.groups]
        return self.scales[:, self.groups] * numbers


def unpack_words(words: torch.Tensor, kind: CodeKind) -> torch.Tensor:
    """Returns the integers in int32 words, of which the first has the lowest bits.

    Args:
        words: `[rows, words]` int32.
        kind: INT4 or INT8.

    Returns:
        `[rows, integers]` uint8.
    """
    # A transposed tensor of one word a row counts as contiguous, but not for `view`.
    words = words.clone(memory_format=torch.contiguous_format)
    codes = words.view(torch.uint8)  # the machine is little-endian
    return kernels.unpack_nibbles(codes, run=1) if kind is CodeKind.INT4 else codes
