"""Philox4x32-10, a counter-based random number generator, in plain torch.

A word is a function of (key, counter) alone: no state, no order, the same on
every device. Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011; Triton's `tl.philox` computes the same.
"""

import torch

__all__ = ["philox4x32"]

_NUM_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

Words2 = tuple[torch.Tensor, torch.Tensor]
Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words4, key: Words2) -> Words4:
    """Four random words for each counter under each key.

    Args:
        counter: four tensors of 32-bit words.
        key: two tensors of 32-bit words.

    All words are int64 tensors with values in [0, 2**32), whose shapes
    broadcast together; so are the words returned.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_NUM_ROUNDS):
        high0, low0 = _multiply(word0, _MULTIPLIERS[0])
        high1, low1 = _multiply(word2, _MULTIPLIERS[1])
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0 = (key0 + _KEY_INCREMENTS[0]) & _MASK
        key1 = (key1 + _KEY_INCREMENTS[1]) & _MASK
    return word0, word1, word2, word3


def _multiply(word: torch.Tensor, multiplier: int) -> Words2:
    """High and low half of a 32 x 32 bit product.

    An int64 product wraps, which keeps its 64 bits: the sign that the shift
    draws in is masked away.
    """
    product = word * multiplier
    return (product >> 32) & _MASK, product & _MASK
