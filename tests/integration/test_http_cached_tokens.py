"""Cached tokens of prompts in `usage`, over HTTP, of a model with sliding windows."""

from router.config.http import HttpConfig
from tests.support.checkpoints import SLIDING_WINDOW, prompt_of
from tests.support.running_http import RunningHttp
from tests.support.tiers_here import running_tiers

BLOCK = 16
PROMPT, OTHER = prompt_of(100, seed=1), prompt_of(100, seed=2)


async def test_prefixes_of_gemma_3_are_found(tmp_path) -> None:
    """A hit ends where its windows are cached, so only ends of prompts are found again."""
    prompts = {
        0: PROMPT,
        96: PROMPT,
        # The windows before the place where the prompts part are those of the first.
        64: [*PROMPT[:70], *OTHER[70:]],
    }
    assert SLIDING_WINDOW < BLOCK
    async with running_tiers(
        tmp_path, "prefill", "decode", variant="gemma3", http=HttpConfig()
    ) as router:
        running = RunningHttp(router)
        try:
            for num_cached, prompt in prompts.items():
                answer = await running.openai.completions.create(
                    model="tiny", prompt=prompt, max_tokens=3, temperature=0
                )
                assert answer.usage.prompt_tokens == 100
                assert answer.usage.prompt_tokens_details.cached_tokens == num_cached
        finally:
            await running.close()
