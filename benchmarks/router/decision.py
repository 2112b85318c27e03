"""Part `decision`: the time and memory that the choice of a replica takes, without any process."""

import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from baton.v1 import worker_pb2
from benchmarks.report import Table
from kvstore.block_key import BlockKeyChain
from router.fleet.replica_load import ReplicaLoad
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex
from router.routing.candidate import Prompt
from router.routing.policies import make_policy
from router.routing.policy import PolicySettings

__all__ = ["DecisionRow", "decision_table", "measure_decisions"]

_NUMBERS_OF_REPLICAS = (8, 64, 512)
_PROMPT_TOKENS = (1_000, 10_000, 100_000)
_BLOCK_SIZE = 16
_OWN_BLOCKS = 1024
"""Blocks of other prompts that each replica caches."""
_NUM_DECISIONS = 200
_SMOKE = ((2,), (1_000,), 2)


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """Figures of one number of replicas and one length of prompts.

    Attributes:
        num_replicas: replicas to choose from, each with the whole prompt or a part of it in its
            cache.
        num_tokens: tokens of the prompt.
        match_us: median processor time of the look-up of the prompt.
        decision_us: median processor time of the look-up and the choice.
        p99_us: its 99th percentile.
        expect_us: median processor time to note that the prompt was sent.
        index_mib: what the index takes, with three prompts and other blocks of each replica.
    """

    num_replicas: int
    num_tokens: int
    match_us: float
    decision_us: float
    p99_us: float
    expect_us: float
    index_mib: float


def measure_decisions(*, is_smoke: bool) -> list[DecisionRow]:
    """Measures the routing code of this process: the index of caches, the candidates that loads
    make, and the default policy.
    """
    replicas, lengths, num_decisions = (
        _SMOKE if is_smoke else (_NUMBERS_OF_REPLICAS, _PROMPT_TOKENS, _NUM_DECISIONS)
    )
    rows = []
    for num_replicas in replicas:
        router = _Router(num_replicas, lengths)
        rows += [router.measure(num_tokens, num_decisions) for num_tokens in lengths]
        sys.stderr.write(f"decision: {num_replicas} replicas\n")
    return rows


class _Router:
    """The index and the loads of replicas that cache prompts."""

    def __init__(self, num_replicas: int, lengths: Sequence[int]) -> None:
        self._num_tokens = lengths[0]
        self._keys_of = {length: _keys(length, f"prompt {length}") for length in lengths}
        infos = [_info(number) for number in range(num_replicas)]
        self._loads = [ReplicaLoad(info) for info in infos]
        for load in self._loads:
            load.take(_report())
        self._policy = make_policy("prefix", PolicySettings())
        self._index = CacheIndex()
        tracemalloc.start()
        try:
            self._fill(infos)
            self._memory_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    def _fill(self, infos: Sequence[worker_pb2.GetInfoResponse]) -> None:
        rng = random.Random(0)
        for number, info in enumerate(infos):
            form = CacheForm.from_info(info)
            assert form is not None, "these workers cache prefixes"
            cache = self._index.join(info.worker_id, form)
            cache.store(0, _keys(_OWN_BLOCKS * _BLOCK_SIZE, f"other {number}"), None)
            for keys in self._keys_of.values():
                # Half of the replicas have all of a prompt, the others a part.
                share = 1.0 if number % 2 == 0 else rng.random()
                cache.store(0, keys[: int(share * len(keys))], None)

    def measure(self, num_tokens: int, num_decisions: int) -> DecisionRow:
        """Measures decisions for one of the prompts."""
        self._num_tokens = num_tokens
        match_s = _processor_times(self._match, num_decisions)
        decision_s = _processor_times(self._decide, num_decisions)
        expect_s = _processor_times(self._expect, num_decisions)
        return DecisionRow(
            num_replicas=len(self._loads),
            num_tokens=self._num_tokens,
            match_us=1e6 * match_s[len(match_s) // 2],
            decision_us=1e6 * decision_s[len(decision_s) // 2],
            p99_us=1e6 * decision_s[int(0.99 * len(decision_s))],
            expect_us=1e6 * expect_s[len(expect_s) // 2],
            index_mib=self._memory_bytes / 2**20,
        )

    @property
    def _keys(self) -> Sequence[bytes]:
        return self._keys_of[self._num_tokens]

    def _match(self) -> None:
        self._index.match(self._keys, self._num_tokens)

    def _decide(self) -> None:
        match = self._index.match(self._keys, self._num_tokens)
        prompt = Prompt(num_tokens=self._num_tokens, block_size=_BLOCK_SIZE, match=match)
        candidates = [load.candidate(1.0) for load in self._loads]
        choice = self._policy.pick_decode(candidates, prompt)
        assert choice is not None, "there are replicas"

    def _expect(self) -> None:
        self._index.expect("worker-0", self._keys)


def _processor_times(call: Callable[[], None], number: int) -> list[float]:
    """Seconds of processor time of calls, in ascending order, after one that warms up."""
    call()
    times = []
    for _ in range(number):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return sorted(times)


def _keys(num_tokens: int, name: str) -> Sequence[bytes]:
    chain = BlockKeyChain(bytes(32), _BLOCK_SIZE, cache_salt=name)
    return tuple(chain.extend(range(num_tokens)))


def _info(number: int) -> worker_pb2.GetInfoResponse:
    return worker_pb2.GetInfoResponse(
        worker_id=f"worker-{number}",
        block_size=_BLOCK_SIZE,
        pool_block_size=_BLOCK_SIZE,
        num_blocks=1 << 20,
        max_num_seqs=256,
    )


def _report() -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        num_blocks=1 << 20,
        num_free_blocks=1 << 19,
        num_running=8,
        prompt_token_s=1e-4,
        decode_step_s=0.02,
    )


def decision_table(rows: Sequence[DecisionRow]) -> Table:
    """The figures as a table."""
    return Table(
        title="The choice of a replica for a prompt that all replicas cache, or a part of it",
        columns=(
            *("replicas", "prompt tokens", "look-up, us", "decision p50, us", "p99, us"),
            *("note of a sent prompt, us", "index, MiB"),
        ),
        rows=[list(asdict(row).values()) for row in rows],
    )
