"""Workers change their tier while streams run; the engines are real."""

import asyncio
import time

import grpc
import pytest

from baton.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.running_router import request, token_ids_of
from tests.support.tiers_here import running_tiers

PREFILL, DECODE, BOTH = (
    worker_pb2.WORKER_ROLE_PREFILL,
    worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_BOTH,
)
NUM_TOKENS = 60


class Operator:
    """Changes roles as `baton role` does."""

    def __init__(self, router):
        self._router = router
        self._stub = cluster_pb2_grpc.ClusterServiceStub(router.channel)

    def replica_with(self, role):
        fleet = self._router.fleet
        return next(
            r for r in (*fleet.prefill.candidates, *fleet.decode.candidates) if r.role == role
        )

    async def ask(self, replica, role):
        message = cluster_pb2.ChangeReplicaRoleRequest(replica=replica, role=role)
        await self._stub.ChangeReplicaRole(message, timeout=20)

    async def change(self, replica, role, *, prefill, decode):
        """Changes a role; waits until the tiers have so many replicas."""
        await self.ask(replica.address, role)
        fleet = self._router.fleet
        await self._router.until(
            lambda: (
                (len(fleet.prefill.candidates), len(fleet.decode.candidates)) == (prefill, decode)
            )
        )

    async def until_roles(self, *roles):
        """Waits until the cluster has these roles: each tier sees a change on its own."""
        deadline = time.monotonic() + 60
        while [replica.role for replica in (await self._replicas())] != list(roles):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)

    async def _replicas(self):
        answer = await self._stub.GetCluster(cluster_pb2.GetClusterRequest(), timeout=20)
        return answer.replicas


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("variant", "kv_connector"),
    [
        ("llama", ""),
        ("llama", "grpc://"),
        ("qwen3_5", "grpc://"),
    ],
    ids=["file", "grpc", "states"],
)
async def test_streams_go_on_while_workers_change_their_tier(tmp_path, variant, kv_connector):
    path, prompts = tiny_checkpoint(variant), [prompt_of(60, seed=seed) for seed in range(3)]
    expected = [reference_greedy(path, prompt, NUM_TOKENS) for prompt in prompts]
    tiers = running_tiers(
        tmp_path, "prefill", "decode", "decode", kv_connector=kv_connector, variant=variant
    )
    async with tiers as router:
        operator = Operator(router)
        is_over = asyncio.Event()

        async def stream(prompt, expected):
            count = 0
            while not is_over.is_set() or not count:
                message = request(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                assert token_ids_of(await router.generate(message)) == expected
                count += 1

        async with asyncio.timeout(100), asyncio.TaskGroup() as streams:
            for job in zip(prompts, expected, strict=True):
                streams.create_task(stream(*job))
            first = operator.replica_with(PREFILL)
            await operator.change(operator.replica_with(DECODE), PREFILL, prefill=2, decode=1)
            await operator.change(first, DECODE, prefill=1, decode=2)
            await operator.change(operator.replica_with(PREFILL), BOTH, prefill=1, decode=3)
            await operator.until_roles(DECODE, DECODE, BOTH)
            await operator.change(operator.replica_with(DECODE), PREFILL, prefill=2, decode=2)
            await operator.change(operator.replica_with(DECODE), PREFILL, prefill=3, decode=1)
            await operator.change(operator.replica_with(BOTH), DECODE, prefill=2, decode=1)
            await operator.until_roles(PREFILL, PREFILL, DECODE)
            is_over.set()


async def test_a_change_that_no_replica_could_make_up_for_is_refused(tmp_path):
    async with running_tiers(tmp_path, "decode") as router:
        operator = Operator(router)
        replica = operator.replica_with(DECODE)
        for name, role, code, text in (
            (replica.address, PREFILL, "FAILED_PRECONDITION", "no decode replica is ready besides"),
            (replica.replica_id, 0, "INVALID_ARGUMENT", "role is 0; it must be one of"),
            ("elsewhere:1", BOTH, "NOT_FOUND", "no replica 'elsewhere:1' is connected"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await operator.ask(name, role)
            assert refused.value.code() is grpc.StatusCode[code]
            assert text in refused.value.details()
        await operator.change(replica, BOTH, prefill=1, decode=1)
        await operator.until_roles(BOTH)
        prompt = prompt_of(60, seed=9)
        answer = await router.generate(request(prompt, max_tokens=5, ignore_eos=True))
        assert token_ids_of(answer) == reference_greedy(tiny_checkpoint("llama"), prompt, 5)
