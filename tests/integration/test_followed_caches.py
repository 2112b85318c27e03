"""The router's index of caches follows real workers: prompts, answers, evictions, restarts."""

import asyncio

import pytest

from baton.v1 import worker_pb2, worker_pb2_grpc
from kvstore.block_key import BlockKeyChain
from router.routing.event_reader import MAX_STALENESS_S
from rpc.channels import open_channel
from tests.support.checkpoints import prompt_of
from tests.support.running_router import request, token_ids_of
from tests.support.tiers_here import running_tiers

BLOCK = 16
PROMPT = prompt_of(100, seed=1)


class Followed:
    """The replicas of a router, and what its index says of them."""

    def __init__(self, router):
        self.router = router
        self.index = router.fleet._index

    def replica(self, tier):
        (replica,) = getattr(self.router.fleet, tier).candidates
        return replica

    def blocks(self, tier, tokens):
        """Blocks of a prompt by events alone: those that are expected have expired or come."""
        replica = self.replica(tier)
        served = self.router.fleet.model
        keys = tuple(BlockKeyChain(served.namespace, served.block_size).extend(tokens))
        return self.index.match(keys, len(tokens) + 1).blocks(replica.replica_id)

    def stored_blocks(self, tokens):
        served = self.router.fleet.model
        keys = tuple(BlockKeyChain(served.namespace, served.block_size).extend(tokens))
        store_ids = tuple(self.replica("prefill").load.kv_store_ids)
        return self.index.match(keys, len(tokens) + 1).stored_blocks(store_ids)

    def caches(self):
        return list(self.index.caches())

    async def until(self, condition):
        async with asyncio.timeout(MAX_STALENESS_S):
            while not condition():  # noqa: ASYNC110 - the index notifies nobody
                await asyncio.sleep(0.01)

    async def until_followed(self):
        await self.until(lambda: self.caches() and all(c.has_events for c in self.caches()))

    async def until_settled(self):
        """Waits until the events have come that the workers report, and nothing is expected."""
        replicas = [self.replica(tier) for tier in ("prefill", "decode")]
        await self.until(
            lambda: all(
                replica.kv_events.cache.num_stored == replica.load.num_cached_blocks > 0
                for replica in replicas
            )
        )
        for cache in self.caches():
            assert cache.num_expected == 0

    async def generate(self, tokens, num_tokens=40):
        message = request(tokens, max_tokens=num_tokens, ignore_eos=True)
        responses = await self.router.generate(message)
        return token_ids_of(responses), responses[-1].usage.cached_tokens


async def reset(address):
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.ResetPrefixCache(worker_pb2.ResetPrefixCacheRequest(), timeout=10)


async def test_prompts_answers_and_stores_are_known(tmp_path):
    async with running_tiers(tmp_path, "prefill", "decode") as router:
        followed = Followed(router)
        await followed.until_followed()
        answer, _ = await followed.generate(PROMPT)
        await followed.until_settled()
        whole = [*PROMPT, *answer]
        assert followed.blocks("prefill", whole) == len(PROMPT) // BLOCK
        assert followed.blocks("decode", whole) == (len(whole) - 1) // BLOCK
        # Prefill has saved the prompt, and decode the answer.
        await followed.until(lambda: followed.stored_blocks(whole) == len(whole) // BLOCK)
        await reset(router.workers[1].address)
        await followed.until(lambda: followed.blocks("decode", whole) == 0)
        assert followed.blocks("prefill", whole) == len(PROMPT) // BLOCK
        old = {cache.replica_id for cache in followed.caches()}
        await router.workers[0].restart()
        await followed.until(lambda: {c.replica_id for c in followed.caches()} != old)
        await router.until(lambda: router.fleet.prefill.candidates)
        await followed.until_followed()
        assert followed.blocks("prefill", whole) == 0
        assert len(followed.index) == 0


@pytest.mark.parametrize("variant", ["gemma3", "lfm2"])
async def test_windows_and_states_count_by_their_own_rules(tmp_path, variant):
    """A second request finds as many tokens in the cache as the index has said."""
    async with running_tiers(tmp_path, "decode", variant=variant, prefill=()) as router:
        followed = Followed(router)
        await followed.until_followed()
        answer, _ = await followed.generate(PROMPT)
        whole = [*PROMPT, *answer]
        for tokens in (PROMPT, PROMPT[:70], whole, whole[:-20]):
            cache = followed.replica("decode").kv_events.cache
            await followed.until(lambda c=cache: c.num_expected == 0)
            replica = followed.replica("decode")
            await followed.until(
                lambda r=replica, c=cache: c.num_stored == r.load.num_cached_blocks
            )
            keys_match = followed.blocks("decode", tokens[:-1])
            _, num_cached = await followed.generate(tokens, num_tokens=1)
            assert num_cached == keys_match * BLOCK


async def test_a_worker_of_both_tiers_has_one_cache_and_one_load(tmp_path):
    """What one tier forgets, the other one still follows; each sees the requests of the other."""
    async with running_tiers(tmp_path, "decode", prefill=()) as router:
        followed, fleet = Followed(router), router.fleet
        await followed.until_followed()
        await fleet.change_role(followed.replica("decode"), worker_pb2.WORKER_ROLE_BOTH)
        await router.until(lambda: fleet.prefill.candidates)
        prefill, decode = followed.replica("prefill"), followed.replica("decode")
        with prefill.reserve(num_tokens=1000, is_sent=False):
            assert decode.candidate().num_queued_tokens == 1000
            with decode.reserve(num_blocks=10, is_sent=False):
                assert prefill.candidate().num_free_blocks == decode.load.num_blocks - 10
        answer, _ = await followed.generate(PROMPT)
        whole = [*PROMPT, *answer]

        async def leave(tier):
            tier._followers[decode.address].cancel()
            await followed.until(lambda: not tier.connected)

        async def until_known_by(tier):
            num_blocks = (len(whole) - 1) // BLOCK
            await followed.until(lambda: followed.replica(tier).kv_events.cache.has_events)
            await followed.until(lambda: followed.blocks(tier, whole) == num_blocks)

        await leave(fleet.decode)  # whose replica has followed the events
        await until_known_by("prefill")
        fleet.decode._follow_all()
        await router.until(lambda: fleet.decode.candidates)
        await leave(fleet.prefill)
        await until_known_by("decode")
        await reset(decode.address)
        await followed.until(lambda: len(followed.index) == 0)
        await leave(fleet.decode)
        assert followed.caches() == []
