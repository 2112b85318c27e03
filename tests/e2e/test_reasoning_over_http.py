"""Reasoning apart from the answer, through the official clients, over real tiers."""

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.client_answers import both_chats
from tests.support.http_cluster import MODEL, HttpCluster, running_http_cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "How do I open a file?"
USER = [{"role": "user", "content": TEXT}]
WORD = "[a-z]{3,8}"
# The demo model does not reason on its own, so a constraint makes it. `<think>` is no prefix of
# the constraint's text: a reasoning part in front of it would be free of the constraint.
FORM = {"seed": 1, "structured_outputs": {"regex": rf"\n?<think>\n{WORD}\n</think>\n\n(yes|no)"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("reasoning")
    async with running_http_cluster(folder, router_flags=["--reasoning-parser=qwen3"]) as cluster:
        yield cluster


async def test_openai_chats(door: HttpCluster) -> None:
    whole, (only,) = await both_chats(door.openai, model=MODEL, messages=USER, extra_body=FORM)
    assert re.fullmatch(WORD, only["reasoning"].strip())
    assert only["content"].strip() in ("yes", "no")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0


async def test_responses(door: HttpCluster) -> None:
    answer = await door.openai.responses.create(model=MODEL, input=TEXT, extra_body=FORM)
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert re.fullmatch(WORD, reasoning.content[0].text.strip())
    assert message.content[0].text.strip() in ("yes", "no")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_anthropic_messages(door: HttpCluster) -> None:
    fields = {"model": MODEL, "max_tokens": 60, "messages": USER, "extra_body": FORM}
    whole = await door.anthropic.messages.create(**fields)
    async with door.anthropic.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        thinking, text = message.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert re.fullmatch(WORD, thinking.thinking.strip())
        assert text.text.strip() in ("yes", "no")
    assert final.usage == whole.usage or final.usage.output_tokens == whole.usage.output_tokens
