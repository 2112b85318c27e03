"""The instructions that widen 8-bit floats of KV, computed here for all bytes.

Triton's interpreter has no such instructions, and converts instead.
"""

import re

import pytest
import torch

from kernels.triton.attention_kernels import _BFLOAT16_OF_E4M3

_MASK_32 = (1 << 32) - 1


def _permute(source, selector):
    """Returns a word of bytes of `source`, or of copies of their signs; see PTX's `prmt`."""
    word = 0
    for place in range(4):
        choice = selector >> 4 * place & 0xF
        assert choice & 7 < 4, "bytes of the second operand are not chosen"
        byte = source >> 8 * (choice & 7) & 0xFF
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        word |= byte << 8 * place
    return word


def _halves(word):
    """Returns the two bfloat16 numbers of a word, as float64."""
    words = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
    return words.to(torch.uint16).view(torch.bfloat16).double()


def _multiply_add(left, right, addend):
    return (_halves(left) * _halves(right) + _halves(addend)).to(torch.bfloat16)


def _run(word):
    """Returns the four bfloat16 numbers that the instructions make of four bytes."""
    registers, results = {"$2": word}, {}
    for line in re.findall(r"^[a-z].*;$", _BFLOAT16_OF_E4M3.value, re.MULTILINE):
        name, *operands = line.rstrip(";").replace(",", "").split()
        target, *values = operands
        values = [registers[v] if v in registers else int(v, 0) for v in values]
        if name == "fma.rn.bf16x2":
            results[target] = _multiply_add(*values)
        else:
            compute = {
                "prmt.b32": lambda source, _, selector: _permute(source, selector),
                "shl.b32": lambda number, shift: number << shift & _MASK_32,
                "and.b32": lambda number, mask: number & mask,
                "mov.b32": lambda number: number,
            }[name]
            registers[target] = compute(*values)
    return torch.cat([results["$0"], results["$1"]])


@pytest.mark.parametrize("place", range(4))
def test_every_number_at_every_place(place):
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    expected = numbers.to(torch.bfloat16)
    for byte in range(256):
        if byte & 0x7F == 0x7F:  # NaN, which caches never have
            continue
        word = byte << 8 * place | 0xA5A5A5A5 & ~(0xFF << 8 * place)
        made = _run(word)
        assert made[place].view(torch.int16) == expected[byte].view(torch.int16), byte
        others = [other for other in range(4) if other != place]
        assert torch.equal(made[others], expected[0xA5].expand(3))
