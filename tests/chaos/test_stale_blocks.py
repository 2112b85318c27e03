"""A prefill process restarts with other KV in the same blocks: old handoffs never load it."""

import re
from pathlib import Path

import pytest

from baton.common.errors import AbortedError
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.redis_server import RedisServer
from tests.support.routed_cluster import running_routed_cluster
from tests.support.routes import open_route
from tests.support.tier_calls import decode_at, prefill_at

NUM_PROMPTS = 3
NUM_PROMPT_TOKENS = 100
NUM_TOKENS = 12


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("grpc", "fail"),
        ("nixl", "recompute"),
    ],
)
async def test_a_handoff_from_before_a_restart_does_not_load_the_new_kv(
    name: str, policy: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """The new KV belongs to other prompts, so loading it would give other tokens."""
    async with (
        open_route(name, redis_server) as route,
        running_routed_cluster(
            route, tmp_path, decode_flags=[f"--kv-load-failure-policy={policy}"]
        ) as routed,
    ):
        (prefill,), (decode,) = routed.cluster.prefill, routed.cluster.decode
        prompts = [prompt_of(NUM_PROMPT_TOKENS, seed) for seed in range(2 * NUM_PROMPTS)]
        expected = [reference_greedy(tiny_checkpoint("llama"), p, NUM_TOKENS) for p in prompts]
        first, *old = [
            await prefill_at(prefill, f"old {index}", prompt, NUM_TOKENS)
            for index, prompt in enumerate(prompts[:NUM_PROMPTS])
        ]
        # Decode now has the addresses of all blocks of the old process.
        assert await decode_at(decode, first) == expected[0]

        prefill.kill()
        await prefill.restart()
        new = [
            await prefill_at(prefill, f"new {index}", prompt, NUM_TOKENS)
            for index, prompt in enumerate(prompts[NUM_PROMPTS:])
        ]
        for index, prefilled in enumerate(old, start=1):
            if policy == "fail":
                with pytest.raises(AbortedError, match="missing"):
                    await decode_at(decode, prefilled)
            else:
                assert await decode_at(decode, prefilled) == expected[index]
        assert re.search(r"KV of handoff \S+ cannot be loaded: .*generation", decode.log())
        for prefilled, tokens in zip(new, expected[NUM_PROMPTS:], strict=True):
            assert await decode_at(decode, prefilled) == tokens
        await routed.check_recovered()
