"""`SimulatedRouter`: the decisions of a router, by the parts that a real one has.

`OracleRouter` sees all pools and queues as they are, at once.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from typing_extensions import override

from baton.v1 import worker_pb2
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import SimulatedReplica
from benchmarks.router.simulation.requests import SimulatedRequest
from router.fleet.replica_load import ReplicaLoad
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex, CacheMatch
from router.routing.candidate import Candidate, Prompt, beginning_key
from router.routing.costs import compare_places, prefill_scores, wants_remote_prefill
from router.routing.event_reader import KvEventReader
from router.routing.policy import RoutingPolicy

__all__ = ["OracleRouter", "Placed", "SimulatedRouter"]

_HOP_S = 0.001
_MEAN_OUTPUT_TOKENS = 350.0


class Placed(NamedTuple):
    """The replicas that were chosen for a request.

    Attributes:
        decode: generates its answer.
        prefill: computes its prompt; None if decode does.
        num_uncached_tokens: tokens of the prompt that prefill has to compute.
        num_missing_blocks: blocks of the prompt that decode lacks.
    """

    decode: SimulatedDecode
    prefill: SimulatedPrefill | None
    num_uncached_tokens: int
    num_missing_blocks: int


def _ignore() -> None:
    """Does nothing."""


class SimulatedRouter:
    """A router of one model. Made within a running loop, whose clock it follows.

    Args:
        policy: chooses among replicas.
        prefill: the replicas of the prefill tier.
        decode: the replicas of the decode tier.
        max_local_prefill_tokens: the longest remainder of a prompt that decode computes; None lets
            the costs decide.

    Attributes:
        loads: of each replica, as far as the router knows.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        prefill: Sequence[SimulatedPrefill],
        decode: Sequence[SimulatedDecode],
        max_local_prefill_tokens: int | None = None,
    ) -> None:
        self._policy = policy
        self._max_local_prefill_tokens = max_local_prefill_tokens
        self._clock = asyncio.get_running_loop().time
        self._block_size = decode[0].machine.block_size
        self._prefill = {replica.worker_id: replica for replica in prefill}
        self._decode = {replica.worker_id: replica for replica in decode}
        self._replicas: dict[str, SimulatedReplica] = {**self._prefill, **self._decode}
        self._index = CacheIndex(clock=self._clock)
        self.loads: dict[str, ReplicaLoad] = {}
        self._readers: dict[str, KvEventReader] = {}
        for worker_id, replica in self._replicas.items():
            self.loads[worker_id] = ReplicaLoad(replica.info, worker_id, self._clock)
            form = CacheForm.from_info(replica.info)
            assert form is not None, "simulated replicas cache prefixes"
            cache = self._index.join(worker_id, form)
            self._readers[worker_id] = KvEventReader(cache, self._index.stored, tuple)

    def take_events(self, worker_id: str, events: Sequence[worker_pb2.KvEvent]) -> None:
        """Takes events of a replica's prefix cache."""
        self._readers[worker_id].take(events)

    def take_report(self, worker_id: str, report: worker_pb2.WorkerLoad) -> None:
        """Takes a replica's load."""
        self.loads[worker_id].take(report)

    def believed_blocks(self) -> Mapping[str, int]:
        """By replica, how many blocks its events have named."""
        return {cache.replica_id: cache.num_stored for cache in self._index.caches()}

    async def serve(self, request: SimulatedRequest) -> None:
        """Chooses the replicas of a request, and has it served there."""
        await self.run(request, self.place(request))

    def place(self, request: SimulatedRequest, decode_ids: Iterable[str] | None = None) -> Placed:
        """Chooses the replicas of a request.

        Args:
            request: the request.
            decode_ids: the decode replicas that may be chosen, at least one; None for all.
        """
        prompt = self._prompt(request)
        candidates = self._candidates(self._decode if decode_ids is None else decode_ids)
        choice = self._policy.pick_decode(candidates, prompt)
        assert choice is not None, "there are decode replicas"
        decode = self._decode[choice.replica_id]
        candidates = self._candidates(self._prefill)
        if not self._is_remote(prompt, decode, candidates):
            return Placed(decode, None, 0, 0)
        choice = self._policy.pick_prefill(candidates, prompt)
        assert choice is not None, "there are prefill replicas"
        cached_tokens = prompt.match.blocks(choice.replica_id) * prompt.block_size
        num_uncached_tokens = max(prompt.num_tokens - cached_tokens, 1)
        num_missing_blocks = self._num_blocks(request) - prompt.match.blocks(decode.worker_id)
        prefill = self._prefill[choice.replica_id]
        return Placed(decode, prefill, num_uncached_tokens, num_missing_blocks)

    async def run(
        self,
        request: SimulatedRequest,
        placed: Placed,
        on_first_token: Callable[[], None] = _ignore,
        on_begin: Callable[[], None] = _ignore,
    ) -> None:
        """Has a request served by its replicas, where it is counted at once.

        Args:
            request: the request.
            placed: its replicas.
            on_first_token: called when prefill has computed its prompt.
            on_begin: called when decode begins to generate.
        """
        if placed.prefill is not None:
            await self._compute_prompt(request, placed, placed.prefill)
            self._note_first_token(request)
            on_first_token()
        await self._generate(request, placed, on_begin)

    async def _compute_prompt(
        self, request: SimulatedRequest, placed: Placed, prefill: SimulatedPrefill
    ) -> None:
        decode_load = self.loads[placed.decode.worker_id]
        with (
            self.loads[prefill.worker_id].reserve(placed.num_uncached_tokens, 0),
            decode_load.reserve(0, placed.num_missing_blocks, is_sent=False),
        ):
            self._index.expect(prefill.worker_id, request.keys)
            await asyncio.sleep(_HOP_S)
            await prefill.compute(request)

    async def _generate(
        self, request: SimulatedRequest, placed: Placed, on_begin: Callable[[], None]
    ) -> None:
        decode, is_local = placed.decode, placed.prefill is None
        num_matched = self._match(request).blocks(decode.worker_id)
        num_missing_blocks = self._num_blocks(request) - num_matched
        num_computed = request.num_tokens - num_matched * self._block_size if is_local else 0

        def begin() -> None:
            if is_local:
                self._note_first_token(request)
            on_begin()

        with self.loads[decode.worker_id].reserve(num_computed, num_missing_blocks):
            self._index.expect(decode.worker_id, request.keys)
            await asyncio.sleep(_HOP_S)
            await decode.generate(request, begin, is_local=is_local)

    def _note_first_token(self, request: SimulatedRequest) -> None:
        request.first_token_s = self._clock() + _HOP_S - request.arrival_s

    def _num_blocks(self, request: SimulatedRequest) -> int:
        """Blocks that a prompt fills."""
        return -(-request.num_tokens // self._block_size)

    def _prompt(self, request: SimulatedRequest) -> Prompt:
        return Prompt(
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            match=self._match(request),
            key=beginning_key(request.keys, self._block_size) if request.keys else b"",
            num_output_tokens=_MEAN_OUTPUT_TOKENS,
        )

    def _match(self, request: SimulatedRequest) -> CacheMatch:
        return self._index.match(request.keys, request.num_tokens)

    def _candidates(self, worker_ids: Iterable[str]) -> Sequence[Candidate]:
        return [self.loads[worker_id].candidate(1.0) for worker_id in worker_ids]

    def _is_remote(
        self, prompt: Prompt, decode: SimulatedDecode, candidates: Sequence[Candidate]
    ) -> bool:
        (candidate,) = self._candidates((decode.worker_id,))
        cached = prompt.match.blocks(candidate.replica_id) * prompt.block_size
        uncached = max(prompt.num_tokens - cached, 1)
        if self._max_local_prefill_tokens is not None:
            return wants_remote_prefill(uncached, None, self._max_local_prefill_tokens)
        best = min(prefill_scores(candidates, prompt))
        places = compare_places(candidate, prompt, best)
        return wants_remote_prefill(uncached, places, None)


class OracleRouter(SimulatedRouter):
    """A router that sees what the pools hold and will hold once their queues are computed, and how
    long these take.
    """

    @override
    def _match(self, request: SimulatedRequest) -> CacheMatch:
        blocks = {
            worker_id: replica.coming_blocks(request)
            for worker_id, replica in self._replicas.items()
        }
        return CacheMatch(blocks, lambda _: 0)

    @override
    def _candidates(self, worker_ids: Iterable[str]) -> Sequence[Candidate]:
        candidates = []
        for worker_id in worker_ids:
            replica = self._replicas[worker_id]
            load = ReplicaLoad(replica.info, worker_id, self._clock)
            report = replica.load()
            if isinstance(replica, SimulatedPrefill):
                report.queued_prompt_s = replica.queue_s
            load.take(report)
            candidates.append(load.candidate(1.0))
        return candidates
