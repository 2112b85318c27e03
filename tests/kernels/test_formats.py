"""Storage formats of quantized weights: their panels."""

import pytest

from kernels.formats import FORMATS
from kernels.library import commands

LIBRARY = commands.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no native kernels")
SCALES_OF_SUPER_BLOCKS = {"Q4_K": 4736 / 4608, "Q5_K": 5760 / 5632}
"""Bytes of panels by bytes of blocks, of formats whose panels have scales of 8 bits for 6."""


@pytest.mark.parametrize("name", FORMATS)
def test_panels_are_as_large_as_blocks(name):
    stored = FORMATS[name]
    in_file = 32 * stored.row_bytes(512)
    expected = in_file * SCALES_OF_SUPER_BLOCKS.get(name, 1)
    for rows, panels in [(1, 1), (32, 1), (33, 2), (70, 3)]:
        assert LIBRARY.quantized_bytes(stored.code, rows, 512) == panels * expected
    # Panels begin at whole cache lines, and have whole squares.
    if not stored.block:
        assert LIBRARY.quantized_bytes(stored.code, 1, 33) == 128 + 2 * 1024
    assert LIBRARY.quantized_bytes(FORMATS["MXFP4"].code, 64, 32) == 2 * (32 + 512 + 32)
