"""The hand-over `shared-storage` of llm-d's sidecar: a request for one token at one endpoint, then
the request itself at another one, which share a store.
"""

from tests.support.checkpoints import prompt_of
from tests.support.running_router import request, token_ids_of
from tests.support.tiers_here import running_tiers

PROMPT = prompt_of(100, seed=1)
BLOCK = 16


async def test_an_endpoint_loads_what_another_one_computed(tmp_path):
    async with (
        running_tiers(tmp_path, "decode", prefill=()) as prefill,
        running_tiers(tmp_path, "decode", prefill=()) as decode,
    ):
        await prefill.generate(request(PROMPT, max_tokens=1))
        await prefill.workers[0].engine.questions.wait_for_saves()
        answers = [
            await endpoint.generate(request(PROMPT, max_tokens=8, ignore_eos=True))
            for endpoint in (decode, prefill)
        ]
        assert answers[0][-1].usage.cached_tokens == len(PROMPT) // BLOCK * BLOCK
        assert token_ids_of(answers[0]) == token_ids_of(answers[1])
