"""The text of a custom call is the same, however its JSON is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.custom_input import CustomInput, input_of

TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\n🗾'))


def pieces_of(draw_cuts, text):
    cuts = sorted(min(cut, len(text)) for cut in draw_cuts)
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@given(
    text=TEXTS,
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    length=st.integers(0, 400) | st.none(),
    cuts=st.lists(st.integers(0, 400)),
)
def test_pieces_add_up_to_the_text(text, ensure_ascii, indent, length, cuts):
    whole = json.dumps({"input": text}, ensure_ascii=ensure_ascii, indent=indent)
    arguments = whole if length is None else whole[:length]
    reader = CustomInput()
    given_pieces = [reader.push(piece) for piece in pieces_of(cuts, arguments)]
    found = input_of(arguments)
    assert "".join(given_pieces) + reader.rest(found) == found
    if len(arguments) >= len(whole) - 1:
        assert found == text
    elif reader.is_open:
        assert text.startswith(found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a"}', "a"),
        ('{"input": ""}', ""),
        ('{"patch": "a"}', "a"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("[1]", "[1]"),
        ("", ""),
        ('{"input": "two\nlines\tand a tab"}', "two\nlines\tand a tab"),
        (r'{"input": "\ud83dx\ud83dA\ud83d\ude00"}', "\ud83dx\ud83dA\U0001f600"),
        ('{"input": "a" and more', "a"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_what_models_write_is_read(arguments, text):
    assert input_of(arguments) == text
    reader = CustomInput()
    read = "".join(map(reader.push, arguments))
    assert read + reader.rest(text) == text


def test_a_long_text_costs_what_it_is_long():
    piece = "x" * 8
    reader = CustomInput()
    reader.push('{"input": "')
    for _ in range(20_000):
        assert reader.push(piece) == piece
        assert not reader._held
