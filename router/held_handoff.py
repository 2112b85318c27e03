"""`HeldHandoff`: a prompt's KV that prefill keeps for one request."""

from baton.v1 import prefill_pb2
from router.replica import PrefillReplica

__all__ = ["HeldHandoff"]


class HeldHandoff:
    """What prefill replicas have saved of a prompt; theirs until released or its lease ends.

    Attributes:
        message: what decode needs to load all of it; None until it is known, and
            once it is released, when the partial tail is gone.
    """

    def __init__(self) -> None:
        self.message: prefill_pb2.KvHandoff | None = None
        self._holders: dict[str, PrefillReplica] = {}  # by handoff id

    def hold(self, message: prefill_pb2.KvHandoff, holder: PrefillReplica) -> None:
        """A part of the prompt is kept."""
        self._holders[message.handoff_id] = holder

    def complete(self, message: prefill_pb2.KvHandoff, holder: PrefillReplica) -> None:
        """All of the prompt is kept."""
        self.hold(message, holder)
        self.message = message

    def release(self) -> None:
        """Lets the replicas drop it. Idempotent; does not wait."""
        self.message = None
        holders, self._holders = self._holders, {}
        for handoff_id, holder in holders.items():
            holder.release_handoff(handoff_id)
