"""Workers that hang in a step: their streams go on elsewhere, and their processes end."""

import asyncio
import time

import pytest

from baton.client import AsyncClient
from baton.common.request.sampling_params import SamplingParams
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import running_cluster

NUM_TOKENS = 60
HANG_AFTER = 20
"""Tokens before the step that hangs, which a client that is late cannot miss."""
MAX_GAP_S = 15.0
"""The time limit of a step, 2 s, and time on a busy machine. A stream that stays never ends."""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["step", "lock"])
async def test_a_stream_leaves_a_decode_replica_whose_step_hangs(tmp_path, what):
    model, prompt, path = tiny_checkpoint("llama"), prompt_of(40), tmp_path / "hang"
    path.write_text(what)
    flags = ["--logits-processors=tests.support.logits_processors:Hang", "--step-timeout-s=2"]
    async with running_cluster(
        tmp_path,
        model=model,
        kv_connector=f"file://{tmp_path}/kv",
        num_decode=2,
        worker_flags=flags,
    ) as cluster:
        async with AsyncClient(cluster.router.address) as client:
            extra_args = {"hang": str(path), "after": HANG_AFTER}
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, extra_args=extra_args)
            tokens, gaps, last = [], [], time.monotonic()
            async for output in client.stream(prompt, params):
                tokens += output.token_ids
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        assert tokens == reference_greedy(model, tuple(prompt), NUM_TOKENS)
        assert not path.exists()
        assert max(gaps[1:]) < MAX_GAP_S
        if what == "step":
            # The stuck process ends, so that its supervisor can start it again.
            assert await first_status(cluster) == 1


async def first_status(cluster):
    """Waits until a decode process has ended; returns its exit status."""
    deadline = time.monotonic() + 60
    while not (ended := [w for w in cluster.decode if w.process.poll() is not None]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return ended[0].process.returncode
