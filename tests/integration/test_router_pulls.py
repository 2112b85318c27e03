"""The router lets a replica pull a prompt's beginning from another one that holds it."""

import asyncio
import time
from contextlib import ExitStack, asynccontextmanager

import pytest

from baton.common.errors import FailedPreconditionError
from baton.v1 import prefill_pb2, worker_pb2
from kvstore.block_key import BlockKeyChain
from router.fleet.decode_connection import ReplicaLostError
from router.routing.pulls import PullCosts
from router.stages import pulling
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.fake_workers import NAMESPACE, FakeDecode, FakePrefill, running_workers
from tests.support.running_router import PROMPT_IDS, request, running_router, token_ids_of
from tests.support.tiers_here import WorkerHere, running_tiers

SCRIPT = [50, 51, 52, 53]
PEER = {"kv_connector": "grpc", "lends_prefixes": True}
NUM_BLOCKS = len(PROMPT_IDS) // 4
TURN = (*PROMPT_IDS, *range(300, 330))
LENT = prefill_pb2.KvHandoff(
    format_version=1, handoff_id="lent", namespace=NAMESPACE, num_tokens=36, connector="grpc"
)


@pytest.fixture(autouse=True)
def pulls_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are too short for pulls, and their engines too fast."""
    costs = PullCosts(compute_s=0.1, load_s=1e-6, ask_s=1e-3)
    monkeypatch.setattr(pulling, "PullCosts", lambda *measures: costs)


@asynccontextmanager
async def second_turn(*workers: FakePrefill | FakeDecode, **options: object):
    """A router that has sent a prompt to the first prefill replica, which is busy now."""
    async with running_workers(*workers), running_router(*workers, **options) as router:
        await router.generate(request(max_tokens=2))
        prefills = [worker for worker in workers if isinstance(worker, FakePrefill)]
        first = next(worker for worker in prefills if worker.requests)
        with ExitStack() as busy:
            for replica in router.fleet.prefill.candidates:
                if replica.replica_id == first.info.worker_id:
                    busy.enter_context(replica.reserve(num_tokens=10**6, is_sent=False))
            others = [worker for worker in prefills if worker is not first]
            yield router, first, *others


def prefills() -> list[FakePrefill]:
    return [FakePrefill(SCRIPT, **PEER) for _ in range(2)]


async def test_the_second_replica_gets_what_the_first_one_lends():
    decode = FakeDecode(SCRIPT, kv_connector="grpc")
    async with second_turn(*prefills(), decode) as (router, first, second):
        first.lent_prefix = LENT
        assert token_ids_of(await router.generate(request(TURN, max_tokens=2))) == SCRIPT[:2]
        (keys,) = first.asked_keys
        assert len(keys) == NUM_BLOCKS
        assert second.prefixes == [LENT]
        await first.changes.until(lambda: "lent" in first.released)
        snapshot = router.service._metrics.snapshot()
        assert snapshot.values["baton_router_prefix_pulls", "prefill", "lent"] == 1


async def test_a_prompt_counts_while_its_beginning_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """No report of the replica includes it: it is sent when the other one has answered."""
    monkeypatch.setattr("router.fleet.replica_load._TRANSIT_S", -1.0)
    monkeypatch.setattr("router.routing.pulls._MAX_WAIT_S", 0.5)
    decode = FakeDecode(SCRIPT, kv_connector="grpc")
    async with second_turn(*prefills(), decode) as (router, first, second):
        first.holds_prefix = True
        answer = asyncio.create_task(router.generate(request(TURN, max_tokens=2)))
        await first.changes.until(lambda: first.asked_keys)
        replica = router.fleet.find(second.info.worker_id)
        replica._load.take(worker_pb2.WorkerLoad())
        assert replica.candidate().num_queued_tokens > 0
        assert token_ids_of(await answer) == SCRIPT[:2]


async def test_a_replica_that_lends_nothing_costs_only_the_question():
    decode = FakeDecode(SCRIPT, kv_connector="grpc")
    async with second_turn(*prefills(), decode) as (router, first, second):
        assert token_ids_of(await router.generate(request(TURN, max_tokens=2))) == SCRIPT[:2]
        assert len(first.asked_keys) == 1
        assert second.prefixes == []
        assert len(second.requests) == 1


@pytest.mark.parametrize("mishap", ["refuses", "does not answer"])
async def test_a_replica_that_fails_is_not_asked_again_for_a_while(
    mishap: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.routing.pulls._MAX_WAIT_S", 0.2)
    decode = FakeDecode(SCRIPT, kv_connector="grpc")
    async with second_turn(*prefills(), decode) as (router, first, second):
        first.lend_refusal = FailedPreconditionError("not now")
        first.holds_prefix = mishap == "does not answer"
        for num_shared in (20, 28):  # each time more than the other replica has
            prompt = request([*PROMPT_IDS[:num_shared], *range(300, 330)], max_tokens=2)
            assert token_ids_of(await router.generate(prompt)) == SCRIPT[:2]
        assert len(first.asked_keys) == 1
        assert second.prefixes == []
        answers = router.service.models.only._pipeline._prefill._pulls._answers
        assert answers._mean_s > 0.01 or mishap == "refuses"


async def test_a_replica_that_is_lost_while_it_is_asked_ends_no_request():
    """Its channel is closed, which cancels the question and not the request."""
    decode = FakeDecode(SCRIPT, kv_connector="grpc")
    async with second_turn(*prefills(), decode) as (router, first, second):
        first.holds_prefix = True
        answer = asyncio.create_task(router.generate(request(TURN, max_tokens=2)))
        await first.changes.until(lambda: first.asked_keys)
        router.fleet.find(first.info.worker_id).drop(ReplicaLostError("it is silent"))
        assert token_ids_of(await answer) == SCRIPT[:2]
        assert len(second.requests) == 1


async def test_workers_without_a_peer_connector_are_never_asked():
    workers = [FakePrefill(SCRIPT, kv_connector="redis") for _ in range(2)]
    async with second_turn(*workers, FakeDecode(SCRIPT, kv_connector="redis")) as (router, *both):
        await router.generate(request(TURN, max_tokens=2))
        assert all(worker.asked_keys == [] for worker in both)


async def test_decode_pulls_what_it_must_compute_itself():
    first, second = FakeDecode(SCRIPT, **PEER), FakeDecode(SCRIPT, **PEER)
    async with (
        running_workers(first, second),
        running_router(first, second, max_local_prefill_tokens=10**6) as router,
    ):
        await router.generate(request(max_tokens=2))
        holder = first if first.starts else second
        other = second if first.starts else first
        holder.lent_prefix = LENT
        with ExitStack() as busy:
            for replica in router.fleet.decode.candidates:
                if replica.replica_id == holder.info.worker_id:
                    busy.enter_context(replica.reserve(num_blocks=4096, is_sent=False))
            await router.generate(request(TURN, max_tokens=2))
        (start,) = other.starts
        assert start.prefix == LENT
        await holder.changes.until(lambda: holder.released == ["lent"])


def count(worker: WorkerHere, name: str, *labels: str) -> int:
    """Returns a metric of a worker's engine."""
    return int(worker.engine.metrics.snapshot().values[f"baton_engine_{name}", *labels])


@pytest.mark.usefixtures("loads_are_worth_it")
async def test_the_next_turn_is_pulled_and_counts_as_cached(tmp_path):
    """Two prefill engines and a decode engine: the second turn goes to the other prefill engine."""
    prompt = prompt_of(100, seed=1)
    roles = ("prefill", "prefill", "decode")
    async with running_tiers(tmp_path, *roles, kv_connector="grpc://") as router:
        first = token_ids_of(await router.generate(request(prompt, max_tokens=8)))
        turn = [*prompt, *first, *prompt_of(20, seed=2)]
        holders = {each.address for each in router.workers if count(each, "prompt_tokens")}
        with ExitStack() as busy:
            for replica in router.fleet.prefill.candidates:
                if replica.address in holders:
                    busy.enter_context(replica.reserve(num_tokens=10**6, is_sent=False))
            messages = await router.generate(request(turn, max_tokens=8))
        assert token_ids_of(messages) == reference_greedy(tiny_checkpoint("llama"), turn, 8)
        assert messages[-1].usage.cached_tokens >= 96
        pulled = [count(each, "cached_prompt_tokens", "pulled") for each in router.workers]
        assert sorted(pulled) == [0, 0, messages[-1].usage.cached_tokens]
        await _until_all_is_free(router)


async def test_a_worker_that_drains_lends_nothing_more(tmp_path):
    prompt = prompt_of(40, seed=1)
    async with running_tiers(tmp_path, "prefill", "decode", kv_connector="grpc://") as router:
        await router.generate(request(prompt, max_tokens=2))
        engine = router.workers[0].engine
        keys = tuple(BlockKeyChain(engine.namespace, engine.form.block_size).extend(prompt))
        handoff = await engine.lend_prefix(keys)
        assert handoff is not None
        engine.release_handoff(handoff.handoff_id)
        assert await engine.drain(timeout_s=20) == 0
        assert await engine.lend_prefix(keys) is None


async def _until_all_is_free(router) -> None:
    """Waits until no engine lends a block any more, for less than a lease lasts."""
    started_at = time.monotonic()
    replicas = (*router.fleet.prefill.candidates, *router.fleet.decode.candidates)
    for replica in replicas:
        while (load := (await replica.worker.get_load(5)).load).num_free_blocks < load.num_blocks:
            assert time.monotonic() - started_at < 20
