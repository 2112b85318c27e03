"""The state of a request across replicas: its tokens, its KV, and what went wrong on them."""

import logging
from collections import defaultdict
from collections.abc import Sequence

from baton.common.errors import (
    AbortedError,
    BatonError,
    InternalError,
    Reason,
    ResourceExhaustedError,
)
from baton.common.request.answer import CandidateOutput
from baton.common.request.request_spec import RequestSpec
from baton.common.request.sampling_params import SamplingParams
from baton.v1 import decode_pb2, prefill_pb2
from router.fleet.decode_connection import ReplicaLostError
from router.fleet.tier_replicas import DecodeReplica, PrefillReplica

__all__ = ["HeldHandoff", "Progress", "Setbacks"]

_Holder = PrefillReplica | DecodeReplica
_LOGGER = logging.getLogger("baton.router")
_MAX_LOSSES = 4
"""A request that loses this many replicas is probably the cause of their deaths."""


class Progress:
    """The tokens of the candidates that have not ended.

    Ranked candidates send their tokens when all have ended. Until then only their
    first tokens, drawn by prefill, are known; a request that loses its replica
    continues from these.

    Args:
        params: the request's.

    Attributes:
        num_tokens: tokens that replicas have sent.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.num_tokens = 0
        self._is_ranked = params.is_ranked
        self._token_ids: defaultdict[int, list[int]] = defaultdict(list)
        self._ended: set[int] = set()
        self._ranked_start: prefill_pb2.PrefillResult | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any token has been drawn."""
        return bool(self._token_ids or self._ended or self._ranked_start)

    def add_prefilled(
        self, result: prefill_pb2.PrefillResult, outputs: Sequence[CandidateOutput]
    ) -> None:
        """Adds the first tokens, which a prefill replica sent; `outputs` has those of `result`."""
        if result.candidates or result.first_beams:
            self._ranked_start = result
        for output in outputs:
            self.add(output)

    def add(self, output: CandidateOutput) -> None:
        """Adds an output of a replica. Late tokens of a candidate that has ended are dropped."""
        index, token_ids = output.index, output.token_ids
        self.num_tokens += len(token_ids)
        if output.finish_reason:
            self.end(index)
        elif token_ids and not (self._is_ranked or index in self._ended):
            self._token_ids[index].extend(token_ids)

    def end(self, index: int) -> None:
        """Notes that a candidate needs no more tokens. Idempotent."""
        self._ended.add(index)
        self._token_ids.pop(index, None)

    def has_ended(self, index: int) -> bool:
        """Whether a candidate needs no more tokens."""
        return index in self._ended

    def write_to(self, start: decode_pb2.StartDecode) -> None:
        """Adds the candidates' tokens to the message for the replica that continues."""
        for index, token_ids in self._token_ids.items():
            start.candidates.add(index=index, output_token_ids=token_ids)
        if self._ranked_start is not None:
            start.candidates.extend(self._ranked_start.candidates)
            start.first_beams.extend(self._ranked_start.first_beams)


class HeldHandoff:
    """The KV of one request's prompt that prefill replicas keep until it is released, or that of a
    request which has moved from a decode replica.

    Attributes:
        message: the handoff that lists all blocks; None until it is known and after the
            release, which drops the partial block.
        has_waited_in_vain: whether prefill has waited for a KV store and has no handoff. Decode
            should not wait for the store again.
    """

    def __init__(self) -> None:
        self.message: prefill_pb2.KvHandoff | None = None
        self.has_waited_in_vain = False
        self._holders: dict[str, _Holder] = {}  # by handoff id

    def hold(self, message: prefill_pb2.KvHandoff, holder: _Holder) -> None:
        """Notes that a replica keeps some of the blocks."""
        self._holders[message.handoff_id] = holder

    def complete(self, message: prefill_pb2.KvHandoff, holder: _Holder) -> None:
        """Notes that a replica keeps all of the blocks."""
        self.hold(message, holder)
        self.message = message

    def forget(self, holder: _Holder) -> None:
        """Notes that a replica keeps no blocks any more."""
        self._holders = {key: each for key, each in self._holders.items() if each is not holder}

    def release(self) -> None:
        """Makes the replicas drop the blocks. Idempotent; does not wait."""
        self.message = None
        holders, self._holders = self._holders, {}
        for handoff_id, holder in holders.items():
            holder.release_handoff(handoff_id)


class Setbacks:
    """The losses, refusals and failures of one request so far.

    Attributes:
        refused: ids of replicas that are not tried again.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self._spec = spec
        self._num_losses = 0
        self._has_failed = False
        self.refused: frozenset[str] = frozenset()

    def add(self, replica: DecodeReplica, error: BatonError, *, was_running: bool) -> None:
        """Notes that a replica did not finish the request.

        Args:
            replica: the replica.
            error: its error, or `ReplicaLostError`.
            was_running: whether it sent tokens before; its error then counts as a loss,
                not as a refusal.

        Raises:
            AbortedError: the request lost too many replicas. Those that drained do not count.
            InternalError: two replicas failed; the request is probably the cause.
        """
        if self.has_found_full(error):
            replica.note_full(self._spec)
        elif error.reason == Reason.NO_REPLICA_READY:  # it drains, or its role changes: not forever
            replica.note_leaving()
        elif not isinstance(error, ReplicaLostError):  # a lost one may connect again
            self.refused |= {replica.replica_id}
        if replica.load.stalled:
            self._note_failure(InternalError("a step with this request did not end"))
        elif isinstance(error, InternalError):
            self._note_failure(error)
        elif (isinstance(error, ReplicaLostError) or was_running) and not replica.is_leaving:
            self._note_loss(error)

    def has_found_full(self, error: BatonError) -> bool:
        """Whether an error says that a replica is full now. Several candidates may never fit it."""
        return isinstance(error, ResourceExhaustedError) and self._spec.params.num_candidates == 1

    def _note_failure(self, error: InternalError) -> None:
        if self._has_failed:
            raise error
        self._has_failed = True

    def _note_loss(self, error: BatonError) -> None:
        _LOGGER.warning("request_id=%s: %s", ascii(self._spec.client_id), error.message)
        self._num_losses += 1
        if self._num_losses >= _MAX_LOSSES:
            raise AbortedError(
                f"{self._num_losses} decode replicas were lost while request "
                f"{self._spec.client_id} ran",
                reason=Reason.REPLICAS_LOST,
            )
