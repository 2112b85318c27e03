"""Sizes as written in flags and URLs."""

import pytest

from baton.common.flags.values import format_byte_size, parse_byte_size, parse_count


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
        ("2G", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("1.5K", 1536),
        (" 3TB ", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_byte_sizes_are_parsed(text, num_bytes):
    assert parse_byte_size(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1e-9", "nan", "inf", "2 GiBs", "1,5GB", "2x", "1.GB", "2GB3", "1e999"],
)
def test_invalid_sizes_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match="512MiB"):
        parse_byte_size(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25600), (" 2M ", 2**21), ("-1", -1)],
)
def test_counts_are_parsed_as_in_vllm(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "4kB", "0.5", "1.3333K", "four", "4 q", "--4"])
def test_counts_that_are_not_whole_are_refused(text):
    with pytest.raises(ValueError, match="is not a whole number; write it like 4096, 4k"):
        parse_count(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0B"), (1000, "1000B"), (2**20, "1MiB"), (3 * 2**29, "1536MiB")]
)
def test_byte_sizes_are_formatted_exactly(num_bytes, text):
    assert format_byte_size(num_bytes) == text
    assert parse_byte_size(text) == num_bytes
