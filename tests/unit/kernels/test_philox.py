"""Philox4x32-10, compared with known answers of Random123 (kat_vectors) and plain Python."""

import pytest
import torch

from kernels.reference.sampling import philox4x32

_ONES = 0xFFFFFFFF
# counter, key, output
_KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_ONES,) * 4, (_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


# Torch computes single elements and long arrays with different code.
@pytest.mark.parametrize("size", [1, 7, 4099])
@pytest.mark.parametrize(("counter", "key", "answer"), _KNOWN_ANSWERS)
def test_words_equal_the_known_answers(counter, key, answer, size):
    words = philox4x32(
        tuple(torch.full((size,), word) for word in counter),
        tuple(torch.full((size,), word) for word in key),
    )
    for word, expected in zip(words, answer, strict=True):
        assert word.dtype is torch.int64
        assert (word == expected).all()


def test_broadcast_words_equal_those_of_plain_python():
    keys = torch.tensor([[3, 0xDEADBEEF, 2**31]]).T
    counters = torch.arange(0, 2**32, 2**28 + 12345)
    zero = torch.zeros(3, 1, dtype=torch.int64)
    words = philox4x32((counters, keys, zero, zero), (keys, keys))
    for row, key in enumerate(keys.flatten().tolist()):
        for column, counter in enumerate(counters.tolist()):
            expected = _plain_philox((counter, key, 0, 0), (key, key))
            assert tuple(int(word[row, column]) for word in words) == expected


def _plain_philox(counter, key):
    """Implements the figure of the paper with Python's unbounded integers."""
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(10):
        high0, low0 = divmod(word0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(word2 * 0xCD9E8D57, 2**32)
        word0, word1, word2, word3 = high1 ^ word1 ^ key0, low1, high0 ^ word3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return word0, word1, word2, word3
