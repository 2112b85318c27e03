"""Tiers of several ranks over peers, some of which are killed while blocks are being loaded."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing

import grpc
import pytest

from baton.common.security.cluster import ClusterSecurity
from baton.v1 import kv_peer_pb2, kv_peer_pb2_grpc
from engine.loop.core import EngineCore
from engine.request import EngineOutput, EngineRequest
from engine.runtime.ranks.processes import RankProcesses
from kernels.library.commands import library
from kernels.ranks import RanksLostError
from kvstore.peer.address import holders_of
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.engine_work import has_work
from tests.support.real_engines import SplitRun, build_core, hand_over, tokens_of
from tests.support.requests import engine_request

pytestmark = [
    pytest.mark.skipif(library() is None, reason="no native kernels"),
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("loads_are_worth_it"),
]

TOKEN = "a token of thirty-two characters"
NUM_TOKENS = 10
PROMPT = tuple(prompt_of(43))


def core_of_ranks(role: str, num_ranks: int) -> EngineCore:
    return build_core(
        *(tiny_checkpoint("llama"), role),
        security=ClusterSecurity(token=TOKEN),
        tensor_parallel_size=num_ranks,
        kv_transfer_head_slices=2,
        kv_connector="grpc://?timeout_s=20",
        block_size=8,
    )


def run_until(core: EngineCore, is_over: Callable[[], bool]) -> list[EngineOutput]:
    """Steps until a condition holds; returns the outputs."""
    outputs: list[EngineOutput] = []
    give_up_at = time.monotonic() + 60
    while not is_over():
        assert time.monotonic() < give_up_at
        core.run_step(outputs.extend)
    return outputs


def prefill_one(core: EngineCore, request_id: str) -> EngineRequest:
    """Computes the prompt; returns the request for decode."""
    request = engine_request(request_id, PROMPT, max_tokens=NUM_TOKENS)
    core.scheduler.add(request)
    return hand_over(request, run_until(core, lambda: not core.scheduler.num_unfinished))


def other_rank_of(core: EngineCore) -> int:
    """Returns the process id of rank 1."""
    ranks = core._runner._ranks
    assert isinstance(ranks, RankProcesses)
    return ranks._children.pids[0]


def all_free(core: EngineCore) -> bool:
    return core.scheduler.load().num_free_blocks == core.num_blocks


def check_is_closed(endpoint: str) -> None:
    """Checks that a caller without the cluster's token is refused."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = kv_peer_pb2_grpc.KvPeerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Describe(kv_peer_pb2.DescribeRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_prompt_is_computed_again_if_a_rank_that_lends_it_is_killed() -> None:
    with (
        closing(core_of_ranks("prefill", 2)) as prefill,
        closing(core_of_ranks("decode", 1)) as decode,
    ):
        handed = prefill_one(prefill, "a")
        lender = other_rank_of(prefill)
        (address,) = holders_of(handed.handoff.connector_params, (1,))
        check_is_closed(address.endpoint)
        os.kill(lender, signal.SIGSTOP)
        peers = decode._connector._peers._peers
        decode.scheduler.add(handed)
        run_until(decode, lambda: address in peers and peers[address].num_users > 0)
        os.kill(lender, signal.SIGKILL)
        outputs = run_until(decode, lambda: not has_work(decode))
        assert all_free(decode)
        decode.scheduler.check()
    found = [*handed.progress[0].output_token_ids, *tokens_of(outputs)]
    assert found == reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
    assert outputs[0].cached_tokens == 0


def check_hand_over(prefill: EngineCore, decode: EngineCore) -> None:
    prompt = tuple(prompt_of(31, seed=1))
    split = SplitRun(prefill, decode)
    split.run([engine_request("first", prompt, max_tokens=NUM_TOKENS)])
    outputs = split.outputs["first"]
    found = [*split.handed["first"].progress[0].output_token_ids, *tokens_of(outputs)]
    assert found == reference_greedy(tiny_checkpoint("llama"), prompt, NUM_TOKENS)
    assert outputs[0].cached_tokens == len(prompt)


def test_ranks_hand_over_and_lent_blocks_come_back_if_a_rank_that_reads_them_is_killed() -> None:
    with (
        closing(core_of_ranks("prefill", 2)) as prefill,
        closing(core_of_ranks("decode", 2)) as decode,
    ):
        check_hand_over(prefill, decode)
        handed = prefill_one(prefill, "a")
        lender = other_rank_of(prefill)
        os.kill(lender, signal.SIGSTOP)
        decode.scheduler.add(handed)
        jobs = decode._connector._joined._jobs
        run_until(decode, lambda: [job.num_missing for job in jobs.values()] == [1])
        os.kill(other_rank_of(decode), signal.SIGKILL)
        with pytest.raises(RanksLostError):
            run_until(decode, lambda: False)
        os.kill(lender, signal.SIGCONT)
        assert not all_free(prefill)
        prefill.scheduler.release_handoff(handed.handoff.handoff_id)
        run_until(prefill, lambda: all_free(prefill))
        prefill.scheduler.check()
