"""`encode_marks`: the operator's texts of the marks as tokens."""

import pytest

from baton.common.errors import ConfigurationError
from router.requests.reasoning import encode_marks
from router.requests.tokenizer import Tokenizer
from tests.support.tokenizer_folders import (
    write_byte_fallback_folder,
    write_byte_level_folder,
    write_word_level_folder,
)


@pytest.mark.parametrize("write", [write_byte_level_folder, write_byte_fallback_folder])
@pytest.mark.parametrize(("start", "end"), [("<think>", "</think>"), ("<s>", "\nSo, in short:\n")])
def test_marks_have_no_special_tokens_added(write, start, end, tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    marks = encode_marks(tokenizer, start, end)
    assert marks.start_token_ids == tuple(tokenizer.encode(start, add_special_tokens=False))
    assert marks.end_token_ids == tuple(tokenizer.encode(end, add_special_tokens=False))


def test_without_texts_there_are_no_marks(tmp_path):
    assert encode_marks(Tokenizer.load(write_byte_level_folder(tmp_path)), None, None) is None


@pytest.mark.parametrize(
    ("write", "start", "end", "message"),
    [
        (write_byte_level_folder, "<think>", None, "one of --reasoning-start-str and .* set both"),
        (write_byte_level_folder, None, "</think>", "one of --reasoning-start-str and .* set both"),
        (write_byte_level_folder, "", "a", "--reasoning-start-str is ''; it must be a text that"),
        (write_word_level_folder, "dog", "</think>", "--reasoning-end-str is '</think>'"),
    ],
)
def test_bad_marks_are_refused_by_their_flag(write, start, end, message, tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(ConfigurationError, match=message):
        encode_marks(tokenizer, start, end)
