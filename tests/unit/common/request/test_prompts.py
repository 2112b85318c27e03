"""Prompts as users give them."""

import pytest

from baton.common.errors import InvalidArgumentError
from baton.common.request.prompts import ParsedPrompt, is_single, parse_prompts

TEXT, TOKENS = ParsedPrompt(text="a"), ParsedPrompt(token_ids=[1, 2])


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("a", [TEXT]),
        ([1, 2], [TOKENS]),
        ({"prompt": "a"}, [TEXT]),
        ({"prompt_token_ids": [1, 2]}, [TOKENS]),
        (["a", [1, 2], {"prompt": "a", "multi_modal_data": None}], [TEXT, TOKENS, TEXT]),
        ({"prompt": "a", "prompt_token_ids": [1]}, [ParsedPrompt("a", [1])]),
        ({"prompt": "a", "cache_salt": "s"}, [ParsedPrompt("a", cache_salt="s")]),
        ([], []),
        ([[]], [ParsedPrompt(token_ids=[])]),
    ],
)
def test_every_kind_of_prompt_is_read(prompts, parsed):
    assert parse_prompts(prompts) == parsed
    assert is_single(prompts) is not isinstance(prompts, list) or prompts == [1, 2]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "the key 'multi_modal_data'"),
        ({"cache_salt": "s"}, "neither 'prompt' nor 'prompt_token_ids'"),
        ([None], "prompt is None; it must be"),
        ([b"a"], "a text, a list of token ids or"),
        (5, "prompt is 5; it must be"),
        (iter("a"), "prompt is <"),
        ({"prompt": 5}, "prompt is 5; it must be a text"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt is 5; it must be a text"),
    ],
)
def test_other_prompts_are_refused(prompts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_prompts(prompts)
