"""A wrong body has few errors, however large it is: each error would take time and memory."""

from typing import Any

import pytest
from pydantic import ValidationError

from router.http.anthropic_request import MessagesBody
from router.http.bodies import SamplingBody
from router.http.chat_body import ChatBody
from router.http.completion_body import CompletionBody
from router.http.responses_request import ResponsesBody
from router.http.tokens import DetokenizeBody

MANY = 5000
SURROGATES = {f"\ud800{i}": 1 for i in range(MANY)}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"prompt": [True] * MANY}),
        (CompletionBody, {"prompt": [""] * MANY}),
        (CompletionBody, {"prompt": [[1]] * MANY}),
        (CompletionBody, {"prompt": [[True] * MANY]}),
        (CompletionBody, {"prompt": ["a"] * 9 + [True] * 9}),
        (CompletionBody, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        (CompletionBody, {"prompt": "a"} | SURROGATES),
        (CompletionBody, {"prompt": "a", "stream_options": SURROGATES}),
        (ChatBody, {"messages": [1] * MANY}),
        (MessagesBody, {"messages": [1] * MANY}),
        (MessagesBody, {"messages": [], "system": [1] * MANY}),
        (ResponsesBody, {"input": [1] * MANY}),
        (ResponsesBody, {"input": "a", "metadata": dict.fromkeys(map(str, range(MANY)), 1)}),
        (ResponsesBody, {"input": "a", "include": ["a"] * MANY}),
        (DetokenizeBody, {"tokens": [-1] * MANY}),
    ],
)
def test_large_wrong_bodies_have_few_errors(kind: type[SamplingBody], fields: dict[str, Any]):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() < 10


def test_keys_of_objects_are_not_checked_one_by_one():
    body = ChatBody.model_validate({"messages": [], "chat_template_kwargs": SURROGATES})
    assert len(body.chat_template_kwargs or ()) == MANY


def test_many_token_ids_and_prompts_are_right():
    assert len(CompletionBody.model_validate({"prompt": [1] * MANY}).prompts()) == 1
    assert len(CompletionBody.model_validate({"prompt": [[1, 2]] * 256}).prompts()) == 256
