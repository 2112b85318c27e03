"""The Prometheus metrics of a cluster's workers after a prompt was handed over."""

import asyncio

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton import AsyncClient, SamplingParams
from baton.v1 import cluster_pb2, cluster_pb2_grpc
from rpc.channels import open_channel
from tests.support.checkpoints import prompt_of
from tests.support.cluster import WORKER_CALL, Cluster, ServerProcess, read_metrics

PROMPT_TOKENS = 100  # six full blocks of 16, and a tail


async def _scrape(worker: ServerProcess) -> dict[tuple[str, str], float]:
    """Returns samples of transfers and requests by name and their one label, if they have one."""
    text = await read_metrics(worker)
    return {
        (sample.name, sample.labels.get("direction") or sample.labels.get("outcome", "")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("backend", "file") == "file" and "le" not in sample.labels
    }


def _increase(
    before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """Returns the growth of each sample, since other tests use the same cluster."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


@pytest.mark.slow
async def test_workers_export_what_they_saved_and_loaded(shared_cluster: Cluster) -> None:
    prefill, decode = shared_cluster.workers
    saved_before, loaded_before = await _scrape(prefill), await _scrape(decode)
    async with AsyncClient(shared_cluster.router.address) as client:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        # No other test's prompt begins so: its blocks would be in the store.
        async for _ in client.stream(prompt_of(PROMPT_TOKENS, seed=101), params, timeout_s=60):
            pass
    await shared_cluster.wait_pools_full()
    saved = _increase(saved_before, await _scrape(prefill))
    loaded = _increase(loaded_before, await _scrape(decode))

    assert saved["baton_kv_objects_total", "save"] == 7
    assert saved["baton_kv_bytes_total", "save"] > 0
    assert saved["baton_kv_lookup_seconds_count", ""] == 1
    assert saved["baton_kv_prompt_save_seconds_total", ""] > 0
    assert loaded["baton_kv_objects_total", "load"] == 7
    assert loaded["baton_kv_bytes_total", "load"] == saved["baton_kv_bytes_total", "save"]
    assert loaded["baton_kv_open_breakers", "load"] == 0
    assert saved["baton_engine_requests_total", "handoff"] == 1
    assert saved["baton_engine_generated_tokens_total", ""] == 1
    assert loaded["baton_engine_generated_tokens_total", ""] == 3
    assert loaded["baton_engine_requests_total", "length"] == 1


@pytest.mark.slow
async def test_operators_see_the_state_of_the_cluster(shared_cluster: Cluster) -> None:
    async with AsyncClient(shared_cluster.router.address) as client:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        async with open_channel(shared_cluster.router.address) as channel:
            before = await _cluster(channel)
            async for _ in client.stream(prompt_of(PROMPT_TOKENS, seed=102), params, timeout_s=60):
                pass
            await shared_cluster.wait_pools_full()
            after = await _cluster(channel)
    assert after.activity.finished["length"] == before.activity.finished["length"] + 1
    (prefill_before, decode_before), (prefill, decode) = before.replicas, after.replicas
    assert prefill.address == shared_cluster.prefill[0].address
    assert decode.state == cluster_pb2.REPLICA_STATE_READY
    assert decode.load.num_free_blocks == decode.load.num_blocks > 0
    grown = {
        name: getattr(after_worker.counters, name) - getattr(before_worker.counters, name)
        for before_worker, after_worker, name in (
            (prefill_before, prefill, "saved_bytes"),
            (decode_before, decode, "loaded_bytes"),
            (decode_before, decode, "loaded_tokens"),
            (prefill_before, prefill, "prompt_tokens"),
            (decode_before, decode, "generated_tokens"),
        )
    }
    assert grown["saved_bytes"] == grown["loaded_bytes"] > 0
    # Blocks that were fetched before the prompt's end are found in the prefix cache.
    assert PROMPT_TOKENS % 16 <= grown["loaded_tokens"] <= PROMPT_TOKENS
    assert grown["prompt_tokens"] == PROMPT_TOKENS
    assert grown["generated_tokens"] == 7, "prefill has drawn the first token"


async def _cluster(channel: grpc.aio.Channel) -> cluster_pb2.GetClusterResponse:
    """Returns the state with the counters of both workers. Those of a worker that does not answer
    within a second, as on a busy machine, are left out.
    """
    stub = cluster_pb2_grpc.ClusterServiceStub(channel)
    request = cluster_pb2.GetClusterRequest()
    async with asyncio.timeout(60):
        while True:
            state = await stub.GetCluster(request, timeout=20, metadata=WORKER_CALL)
            if all(replica.HasField("counters") for replica in state.replicas):
                return state
