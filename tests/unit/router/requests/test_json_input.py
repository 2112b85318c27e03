"""JSON of clients is counted exactly before it is parsed; errors name the field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import InvalidArgumentError
from router.requests import json_input
from router.requests.json_input import InvalidJsonError, JsonBudget, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text('\\"[{,'),
    lambda child: st.lists(child) | st.dictionaries(st.text('a\\"[,'), child),
    max_leaves=30,
)


def num_parts(value: Any) -> int:
    """Objects, arrays and texts of a value, keys included."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(num_parts, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(num_parts, value))
    return int(isinstance(value, str))


@given(VALUES, st.booleans(), st.integers(4, 20))
def test_the_count_is_exact_wherever_the_text_is_divided(value: Any, is_ascii: bool, size: int):
    text = json.dumps(value, ensure_ascii=is_ascii)
    parts = num_parts(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_input, "_PIECE_BYTES", size)
        budget = JsonBudget(parts=parts)
        assert parse_json("the body", text.encode(), budget) == value
        assert budget.parts == 0
        if parts:
            with pytest.raises(InvalidArgumentError, match="the body has more than"):
                parse_json("the body", text, JsonBudget(parts=parts - 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": [1], "b": {"c": [%s]}}' % ("[]," * 2**18 + "[]"), "b is too large: the body"),
        ('{"messages": [%s]}' % ("1," * 2**21 + "1"), "messages is too large: the body has more"),
        ("[%s]" % ("{}," * 2**18 + "{}"), "the body has more than 131072 objects"),
        ('["' + "\\" * 2**17 + '", ' + "[]," * 2**18, "the body has more than 131072"),
    ],
)
def test_the_field_with_too_many_values_is_named(text: str, message: str):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_json("the body", text)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "the body is not JSON: Expecting property name"),
        (b"\xff", "the body is not JSON: 'utf-8'"),
        ("{}".encode("utf-16"), "the body is not JSON: 'utf-8'"),
        (b"[" * 10_000, "the body is not JSON: it nests too deeply"),
        (b"[" + b"7" * 401 + b"]", "the body is not JSON: a number has more than 400"),
        (b"[1." + b"7" * 401 + b"]", "the body is not JSON: a number has more than 400"),
    ],
)
def test_what_is_not_json_is_refused(text: bytes, message: str):
    with pytest.raises(InvalidJsonError) as caught:
        parse_json("the body", text)
    assert caught.value.message.startswith(message)


def test_a_prompt_of_a_million_token_ids_fits():
    assert len(parse_json("the body", json.dumps({"prompt": [7] * 2**20}))["prompt"]) == 2**20


def test_a_byte_order_mark_and_lone_surrogates_pass():
    assert parse_json("the body", b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_json("the body", '"\ud800"') == "\ud800"
    assert parse_json("the body", b'"\\ud800"') == "\ud800"
