"""Reasoning apart from the answer, through the official clients, over real tiers."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.client_answers import both_chats
from tests.support.http_cluster import MODEL, HttpCluster, running_http_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

# The demo model does not reason on its own: the prompt ends in a reasoning part, which a budget
# ends. The constraint holds behind it.
CHAT = [
    {"role": "user", "content": "How do I open a file?"},
    {"role": "assistant", "content": "<think>\nThe file"},
]
BUDGET = 6
FORM = {"seed": 1, "structured_outputs": {"choice": ["yes", "no"]}}
ANSWERS = ("yes", "no")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http_cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("reasoning")
    async with running_http_cluster(folder, router_flags=["--reasoning-parser=qwen3"]) as cluster:
        yield cluster


async def test_openai_chats(http_cluster: HttpCluster) -> None:
    fields = {"continue_final_message": True, "thinking_token_budget": BUDGET, **FORM}
    whole, (only,) = await both_chats(
        http_cluster.openai, model=MODEL, messages=CHAT, max_tokens=40, extra_body=fields
    )
    assert only["reasoning"].strip()
    assert only["content"].strip() in ANSWERS
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens <= BUDGET


async def test_anthropic_messages(http_cluster: HttpCluster) -> None:
    fields = {
        "model": MODEL,
        "max_tokens": 40,
        "messages": CHAT,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET},
        "extra_body": FORM,
    }
    whole = await http_cluster.anthropic.messages.create(**fields)
    async with http_cluster.anthropic.messages.stream(**fields) as stream:
        final = await stream.get_final_message()
    for message in (whole, final):
        thinking, text = message.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert thinking.thinking.strip()
        assert text.text.strip() in ANSWERS
    assert final.content[0].thinking == whole.content[0].thinking
