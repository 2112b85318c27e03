"""Two clients of a router over real tiers: none meets the other's cached prompt."""

from pathlib import Path

import openai
import pytest

from tests.support.http_cluster import MODEL, running_http_cluster
from tests.support.tenants import KEY, OTHER_KEY, entry_of, write_tenants

PROMPT = "Open the file and return a corresponding file object. If the file cannot be opened, " * 4


@pytest.mark.slow
async def test_tenants_share_no_cached_prompt(tmp_path: Path):
    path = write_tenants(tmp_path, entry_of("a", KEY), entry_of("b", OTHER_KEY))
    async with running_http_cluster(tmp_path, router_flags=[f"--tenants={path}"]) as served:
        cached = []
        for key in (KEY, OTHER_KEY, KEY, OTHER_KEY):
            client = served.openai.with_options(api_key=key)
            answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        with pytest.raises(openai.AuthenticationError):
            await served.openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0
