"""`SimulatedRouter`: the decisions of a router, by the parts that a real one has.

`OracleRouter` sees all pools and queues as they are, at once.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from baton.v1 import worker_pb2
from benchmarks.router.simulation.decode import SimulatedDecode
from benchmarks.router.simulation.prefill import SimulatedPrefill
from benchmarks.router.simulation.replica import SimulatedReplica
from benchmarks.router.simulation.requests import BLOCK_TOKENS, SimulatedRequest
from benchmarks.router.simulation.virtual_time import VirtualTime
from router.fleet.replica_load import ReplicaLoad
from router.routing.cache_form import CacheForm
from router.routing.cache_index import CacheIndex, CacheMatch
from router.routing.candidate import Candidate, Prompt, beginning_key
from router.routing.costs import compare_places, prefill_scores, wants_remote_prefill
from router.routing.event_reader import KvEventReader
from router.routing.policy import RoutingPolicy

__all__ = ["OracleRouter", "SimulatedRouter"]

_HOP_S = 0.001
_MEAN_OUTPUT_TOKENS = 350.0


class SimulatedRouter:
    """A router of one model.

    Args:
        policy: chooses among replicas.
        prefill: the replicas of the prefill tier.
        decode: the replicas of the decode tier.
        time: the clock.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        prefill: Sequence[SimulatedPrefill],
        decode: Sequence[SimulatedDecode],
        time: VirtualTime,
    ) -> None:
        self._policy = policy
        self._time = time
        self._prefill = {replica.worker_id: replica for replica in prefill}
        self._decode = {replica.worker_id: replica for replica in decode}
        self._index = CacheIndex(clock=time.clock)
        self._loads: dict[str, ReplicaLoad] = {}
        self._readers: dict[str, KvEventReader] = {}
        for worker_id, replica in {**self._prefill, **self._decode}.items():
            self._loads[worker_id] = ReplicaLoad(replica.info, worker_id, time.clock)
            form = CacheForm.from_info(replica.info)
            assert form is not None
            cache = self._index.join(worker_id, form)
            self._readers[worker_id] = KvEventReader(cache, self._index.stored, tuple)

    def take_events(self, worker_id: str, events: Sequence[worker_pb2.KvEvent]) -> None:
        """Takes events of a replica's prefix cache."""
        self._readers[worker_id].take(events)

    def take_report(self, worker_id: str, report: worker_pb2.WorkerLoad) -> None:
        """Takes a replica's load."""
        self._loads[worker_id].take(report)

    def believed_blocks(self) -> Mapping[str, int]:
        """By replica, how many blocks its events have named."""
        return {cache.replica_id: cache.num_stored for cache in self._index.caches()}

    def route(self, request: SimulatedRequest) -> None:
        """Chooses the replicas of a request and sends it there."""
        prompt = Prompt(
            num_tokens=request.num_tokens,
            block_size=BLOCK_TOKENS,
            match=self._match(request),
            key=beginning_key(request.keys, BLOCK_TOKENS) if request.keys else b"",
            num_output_tokens=_MEAN_OUTPUT_TOKENS,
        )
        choice = self._policy.pick_decode(self._candidates(self._decode), prompt)
        assert choice is not None
        decode = self._decode[choice.replica_id]
        candidates = self._candidates(self._prefill)
        if not self._is_remote(prompt, decode, candidates):
            self._decode_all(request, decode, is_local=True)
            return
        choice = self._policy.pick_prefill(candidates, prompt)
        assert choice is not None
        self._send_prompt(request, prompt, self._prefill[choice.replica_id], decode)

    def _match(self, request: SimulatedRequest) -> CacheMatch:
        return self._index.match(request.keys, request.num_tokens)

    def _candidates(self, tier: Mapping[str, SimulatedReplica]) -> Sequence[Candidate]:
        return [self._loads[worker_id].candidate(1.0) for worker_id in tier]

    def _is_remote(
        self, prompt: Prompt, decode: SimulatedDecode, candidates: Sequence[Candidate]
    ) -> bool:
        (candidate,) = self._candidates({decode.worker_id: decode})
        best = min(prefill_scores(candidates, prompt))
        places = compare_places(candidate, prompt, best)
        cached = prompt.match.blocks(candidate.replica_id) * prompt.block_size
        uncached = max(prompt.num_tokens - cached, 1)
        return wants_remote_prefill(uncached, places, None)

    def _send_prompt(
        self,
        request: SimulatedRequest,
        prompt: Prompt,
        prefill: SimulatedPrefill,
        decode: SimulatedDecode,
    ) -> None:
        cached = prompt.match.blocks(prefill.worker_id)
        num_blocks = -(-prompt.num_tokens // prompt.block_size)
        missing = num_blocks - prompt.match.blocks(decode.worker_id)
        num_tokens = max(request.num_tokens - cached * BLOCK_TOKENS, 1)
        queued = ExitStack()
        queued.enter_context(self._loads[prefill.worker_id].reserve(num_tokens, 0))
        held = self._loads[decode.worker_id].reserve(0, missing, is_sent=False)
        queued.enter_context(held)
        self._index.expect(prefill.worker_id, request.keys)

        def on_first_token() -> None:
            request.first_token_s = self._time.now + _HOP_S - request.arrival_s
            queued.close()
            self._decode_all(request, decode, is_local=False)

        self._time.call_later(_HOP_S, lambda: prefill.submit(request, on_first_token))

    def _decode_all(
        self, request: SimulatedRequest, decode: SimulatedDecode, *, is_local: bool
    ) -> None:
        matched = self._match(request).blocks(decode.worker_id)
        missing = len(request.keys) + 1 - matched
        num_computed = request.num_tokens - matched * BLOCK_TOKENS if is_local else 0
        running = ExitStack()
        load = self._loads[decode.worker_id]
        running.enter_context(load.reserve(num_computed, missing))
        self._index.expect(decode.worker_id, request.keys)

        def on_begin() -> None:
            if is_local:
                request.first_token_s = self._time.now + _HOP_S - request.arrival_s

        def submit() -> None:
            decode.submit(request, is_local=is_local, on_begin=on_begin, on_done=running.close)

        self._time.call_later(_HOP_S, submit)


class OracleRouter(SimulatedRouter):
    """A router that sees what the pools hold and will hold once their queues are computed, and how
    long these take.
    """

    def _match(self, request: SimulatedRequest) -> CacheMatch:
        replicas = [*self._prefill.values(), *self._decode.values()]
        blocks = {replica.worker_id: replica.coming_blocks(request) for replica in replicas}
        return CacheMatch(blocks, lambda _: 0)

    def _candidates(self, tier: Mapping[str, SimulatedReplica]) -> Sequence[Candidate]:
        candidates = []
        for worker_id, replica in tier.items():
            load = ReplicaLoad(replica.info, worker_id, self._time.clock)
            report = replica.load()
            if isinstance(replica, SimulatedPrefill):
                report.queued_prompt_s = replica.queue_s
            load.take(report)
            candidates.append(load.candidate(1.0))
        return candidates
