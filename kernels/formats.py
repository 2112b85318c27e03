"""Storage formats of quantized weights: blocks of small integers with scales.

A format says how a file holds a row of a weight. Formats with a GGML name are the file's own
bytes; the others are the blocks into which checkpoints of other kinds are converted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FORMATS", "GGML_FORMATS", "WeightFormat"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One storage format.

    Attributes:
        code: its number in the commands of compiled kernels; they use 0 for dense weights.
        name: as GGML and docs/models.md write it.
        block: columns that share a block; 0 for a whole row.
        block_bytes: bytes of a block; for a whole row those of its scale alone.
        bytes_per_column: further bytes per column of a format whose block is a whole row.
    """

    code: int
    name: str
    block: int
    block_bytes: int
    bytes_per_column: int = 0

    def row_bytes(self, num_columns: int) -> int:
        """Returns the bytes of a row of `num_columns` columns, a multiple of `block`."""
        if not self.block:
            return self.block_bytes + num_columns * self.bytes_per_column
        return num_columns // self.block * self.block_bytes


_ALL = (
    WeightFormat(1, "Q8_0", 32, 34),
    WeightFormat(2, "Q4_0", 32, 18),
    WeightFormat(3, "Q4_1", 32, 20),
    WeightFormat(4, "Q5_0", 32, 22),
    WeightFormat(5, "Q5_1", 32, 24),
    WeightFormat(6, "Q4_K", 256, 144),
    WeightFormat(7, "Q5_K", 256, 176),
    WeightFormat(8, "Q6_K", 256, 210),
    WeightFormat(9, "MXFP4", 32, 17),
    # float32 scale, then int8 codes: value = scale * code.
    WeightFormat(10, "INT8", 0, 4, bytes_per_column=1),
    WeightFormat(11, "INT8_32", 32, 4 + 32),
    WeightFormat(12, "INT8_128", 128, 4 + 128),
    # float32 scale, float32 zero point, then nibbles, the low ones of a run of 32 columns its
    # first 16: value = scale * (code - zero).
    WeightFormat(13, "INT4_32", 32, 8 + 16),
    WeightFormat(14, "INT4_128", 128, 8 + 64),
    # float32 scale, then e4m3 codes: value = scale * code.
    WeightFormat(15, "FP8", 0, 4, bytes_per_column=1),
    WeightFormat(16, "FP8_128", 128, 4 + 128),
)
FORMATS: Mapping[str, WeightFormat] = {kind.name: kind for kind in _ALL}
"""By name."""
GGML_FORMATS: Mapping[int, WeightFormat] = {
    8: FORMATS["Q8_0"],
    2: FORMATS["Q4_0"],
    3: FORMATS["Q4_1"],
    6: FORMATS["Q5_0"],
    7: FORMATS["Q5_1"],
    12: FORMATS["Q4_K"],
    13: FORMATS["Q5_K"],
    14: FORMATS["Q6_K"],
    39: FORMATS["MXFP4"],
}
"""By `gguf.GGMLQuantizationType`."""
