"""`Setbacks`: what went wrong with one request on decode replicas, and when to give up."""

import logging

from baton.common.errors import (
    AbortedError,
    BatonError,
    InternalError,
    Reason,
    ResourceExhaustedError,
)
from baton.common.request.request_spec import RequestSpec
from router.fleet.decode_connection import ReplicaLostError
from router.fleet.tier_replicas import DecodeReplica

__all__ = ["Setbacks"]

_LOGGER = logging.getLogger("baton.router")
_MAX_LOSSES = 4
"""A request that loses this many replicas is probably the cause of their deaths."""


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
