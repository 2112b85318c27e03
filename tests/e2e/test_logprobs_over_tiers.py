"""Log-probabilities through router, prefill and decode processes equal those of `transformers`."""

from dataclasses import replace

import pytest

from baton import AsyncClient, SamplingParams
from baton.common.request.results import CompletionOutput
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.cluster import Cluster
from tests.support.logprob_checks import near, reference_logprobs

ASKING = SamplingParams(
    temperature=1.3, seed=4, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=2
)
PROMPT = prompt_of(40, seed=3)


def check(token_ids, logprobs, num_top):
    """Checks the log-probabilities of the last `len(logprobs)` tokens."""
    reference = reference_logprobs(tiny_checkpoint("llama"), token_ids)
    first = len(token_ids) - len(logprobs)
    for position, found in enumerate(logprobs, first):
        expected = reference[position - 1]
        assert next(iter(found)) == token_ids[position]
        assert num_top <= len(found) <= num_top + 1
        assert [each.logprob for each in found.values()] == near(expected[list(found)])


def check_completion(completion: CompletionOutput) -> None:
    assert len(completion.token_ids) == len(completion.logprobs) == ASKING.max_tokens
    check((*PROMPT, *completion.token_ids), completion.logprobs, 3)
    own = [
        found[t].logprob for found, t in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(own))


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("candidates", [{}, {"n": 3}, {"n": 2, "best_of": 4}])
async def test_answers_and_streams(shared_cluster: Cluster, candidates: dict[str, int]) -> None:
    params = replace(ASKING, **candidates)
    async with AsyncClient(shared_cluster.router.address) as client:
        for _ in range(2):  # the second time, caches of both tiers have the prompt
            whole = await client.generate(PROMPT, params, timeout_s=60)
            assert whole.prompt_logprobs[0] is None
            check(PROMPT, whole.prompt_logprobs[1:], 2)
            for completion in whole.outputs:
                check_completion(completion)
        chunks = [chunk async for chunk in client.stream(PROMPT, params, timeout_s=60)]
    assert chunks[0].prompt_logprobs == whole.prompt_logprobs
    for completion in whole.outputs:
        own = [chunk for chunk in chunks if chunk.index == completion.index]
        assert [token for chunk in own for token in chunk.token_ids] == completion.token_ids
        streamed = [found for chunk in own for found in chunk.logprobs or ()]
        assert [list(found) for found in streamed] == [list(f) for f in completion.logprobs]
