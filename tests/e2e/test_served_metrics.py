"""What a cluster's workers tell Prometheus of a prompt that was handed over."""

import asyncio
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton import AsyncClient, SamplingParams
from tests.support.checkpoints import prompt_of, tiny_checkpoint
from tests.support.cluster import ServerProcess, running_cluster

PROMPT_TOKENS = 100  # six full blocks of 16, and a tail


async def _scrape(worker: ServerProcess) -> dict[tuple[str, str], float]:
    """Samples by their names and directions, which are empty where there are none."""
    (url,) = re.findall(r"serving metrics url=(\S+)", worker.log())
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=20).read().decode())
    return {
        (sample.name, sample.labels.get("direction", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["backend"] == "file" and "le" not in sample.labels
    }


@pytest.mark.slow
async def test_workers_tell_what_they_saved_and_loaded(tmp_path: Path) -> None:
    async with (
        running_cluster(
            tmp_path,
            model=tiny_checkpoint("llama"),
            kv_connector=f"file://{tmp_path}/kv",
            worker_flags=["--metrics-port=0"],
        ) as cluster,
        AsyncClient(cluster.router.address) as client,
    ):
        params = SamplingParams(temperature=0, max_tokens=4)
        async for _ in client.stream(prompt_of(PROMPT_TOKENS, seed=1), params, timeout_s=60):
            pass
        await cluster.wait_pools_full()
        saved, loaded = await _scrape(cluster.prefill[0]), await _scrape(cluster.decode[0])
        assert cluster.prefill[0].stop() == cluster.decode[0].stop() == 0

    assert saved["baton_kv_objects_total", "save"] == 7
    assert saved["baton_kv_bytes_total", "save"] > 0
    assert saved["baton_kv_lookup_seconds_count", ""] == 1
    assert saved["baton_kv_prompt_save_seconds_total", ""] > 0
    assert loaded["baton_kv_objects_total", "load"] == 7
    assert loaded["baton_kv_bytes_total", "load"] == saved["baton_kv_bytes_total", "save"]
    assert loaded["baton_kv_open_breakers", "load"] == 0
