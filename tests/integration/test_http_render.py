"""The prompts that `/render` returns are those that workers get."""

import pytest

from router.http import render
from tests.integration.test_http_chat import MODEL, TOOL, USER, answering, prompt_text, running_chat

CHAT = {"model": MODEL, "messages": USER}
COMPLETION = {"model": MODEL}


async def token_ids_of_worker(api, decode, path: str, body: dict) -> list[list[int]]:
    """The prompts with which a request for an answer reaches the worker."""
    before = len(decode.starts)
    answer = await api.http.post(path, json={**body, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return [list(start.spec.prompt_token_ids) for start in decode.starts[before:]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 3},
        {"chat_template_kwargs": {"mood": "calm"}, "reasoning_effort": "low"},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ],
)
async def test_the_prompt_of_a_chat(fields):
    decode, body = answering("abc"), {**CHAT, **fields}
    async with running_chat(decode, tool_call_parser="hermes") as api:
        rendered = (await api.http.post("/v1/chat/completions/render", json=body)).json()
        assert not decode.starts
        expected = await token_ids_of_worker(api, decode, "/v1/chat/completions", body)
    assert [rendered["token_ids"]] == expected
    assert rendered["model"] == MODEL
    assert rendered["request_id"].startswith("chatcmpl-")
    if "add_special_tokens" not in fields:
        assert rendered["prompt"] == prompt_text(decode)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("Hi there", ["Hi there"]),
        (["Hi", "there"], ["Hi", "there"]),
        ([72, 105], None),
        ([[72, 105], [66]], None),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"add_special_tokens": False}])
async def test_the_prompts_of_completions(prompt, texts, fields):
    decode, body = answering("abc"), {**COMPLETION, "prompt": prompt, **fields}
    async with running_chat(decode) as api:
        rendered = (await api.http.post("/v1/completions/render", json=body)).json()
        expected = await token_ids_of_worker(api, decode, "/v1/completions", body)
        ids = [each["token_ids"] for each in rendered]
        decoded = [api.router.model.tokenizer.decode(token_ids) for token_ids in ids]
    assert sorted(ids) == sorted(expected)
    assert [each["prompt"] for each in rendered] == (texts or decoded)


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": USER, "tool_choice": "maybe"}, "tool_choice"),
        ("chat/completions", {"messages": USER, "audio": {}}, "audio"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": [2**31]}, "token_ids"),
        ("completions", {"prompt": "a", "model": "other"}, "model"),
    ],
)
async def test_what_no_answer_would_take_is_refused(path, fields, field):
    async with running_chat(answering("abc")) as api:
        answer = await api.http.post(f"/v1/{path}/render", json=fields)
        refused = await api.http.post(f"/v1/{path}", json=fields)
    assert (answer.status_code, answer.json()) == (refused.status_code, refused.json())
    assert field in answer.json()["error"]["message"]


async def test_prompts_of_too_many_tokens_together_are_refused(monkeypatch):
    monkeypatch.setattr(render, "MAX_RETURNED_TOKENS", 3)
    async with running_chat(answering("abc")) as api:
        for prompts, status in (([[72, 105], [66]], 200), ([[72, 105], [66, 67]], 400)):
            body = {**COMPLETION, "prompt": prompts}
            answer = await api.http.post("/v1/completions/render", json=body)
            assert answer.status_code == status
    assert answer.json()["error"]["param"] == "prompt"
