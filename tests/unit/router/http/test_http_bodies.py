"""Types of bodies. A wrong body has few errors, however large it is: each would take time and
memory.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from router.http.anthropic_request import MessagesBody
from router.http.bodies import Body, SamplingBody
from router.http.openai_bodies import ChatBody, CompletionBody
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


REQUIRED: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": []},
    MessagesBody: {"messages": []},
    ResponsesBody: {"input": "a"},
    DetokenizeBody: {"tokens": []},
}


def integer_fields(kind: type[Body]) -> list[tuple[type[Body], str, bool]]:
    """The fields of a body that are integers, or (True) lists of them."""
    fields = []
    for name, schema in kind.model_json_schema()["properties"].items():
        forms = schema.get("anyOf", [schema])
        if any(form.get("type") == "integer" for form in forms):
            fields.append((kind, name, False))
        if any(form.get("items", {}).get("type") == "integer" for form in forms):
            fields.append((kind, name, True))
    return fields


@pytest.mark.parametrize(
    ("kind", "name", "is_list"), [each for kind in REQUIRED for each in integer_fields(kind)]
)
def test_an_integer_may_be_written_with_a_point(kind: type[Body], name: str, is_list: bool):
    def read(number: Any) -> Any:
        value = [1, number] if is_list else number
        return getattr(kind.model_validate({**REQUIRED[kind], name: value}), name)

    number = read(10.0)
    assert repr(number) == ("[1, 10]" if is_list else "10")
    for wrong in (10.5, float("inf"), float("nan"), "10", True):
        with pytest.raises(ValidationError):
            read(wrong)


def test_prompts_may_have_token_ids_with_a_point():
    body = CompletionBody.model_validate({"prompt": [[1.0, 2], [3]]})
    assert body.prompts() == [[1, 2], [3]]
    assert len(CompletionBody.model_validate({"prompt": [1.0] * MANY}).prompts()) == 1


def test_the_effort_none_turns_reasoning_off():
    user = {"role": "user", "content": "Hi"}

    def variables(**fields: Any) -> dict[str, Any]:
        body = ChatBody.model_validate({"messages": [user], "reasoning_effort": "none"} | fields)
        return dict(body.conversation().template_kwargs)

    assert variables() == {"reasoning_effort": "none", "enable_thinking": False}
    assert variables(reasoning_effort="low") == {"reasoning_effort": "low"}
    chosen = {"enable_thinking": True}
    assert variables(chat_template_kwargs=chosen) == {"reasoning_effort": "none", **chosen}


def test_each_of_several_equal_tools_has_its_own_schema_field():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = ChatBody.model_validate({"messages": [], "tools": [tool, dict(tool)]})
    assert body.schema_fields == [f"tools[{i}].function.parameters" for i in range(2)]
