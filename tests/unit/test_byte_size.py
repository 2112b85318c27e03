"""Byte sizes as written in flags and URLs."""

import pytest

from kvstore.url import parse_byte_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("1.5 gib", 3 * 2**29),
        ("1e9", 10**9),
        ("1E+3KB", 10**6),
        ("7B", 7),
        (" 3TB ", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_byte_sizes_are_parsed(text, num_bytes):
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e-9", "nan", "inf", "2 GiBs", "1,5GB", "1.GB", "2GB3", "1e999"]
)
def test_invalid_sizes_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_byte_size(text)
