"""`HeldHandoff`: the KV of a prompt that prefill replicas keep for decode."""

from baton.v1 import prefill_pb2
from router.replica import PrefillReplica

__all__ = ["HeldHandoff"]


class HeldHandoff:
    """The KV of one request's prompt that prefill replicas keep until it is released.

    Attributes:
        message: the handoff that lists all blocks; None until it is known and after the
            release, which drops the partial block.
    """

    def __init__(self) -> None:
        self.message: prefill_pb2.KvHandoff | None = None
        self._holders: dict[str, PrefillReplica] = {}  # by handoff id

    def hold(self, message: prefill_pb2.KvHandoff, holder: PrefillReplica) -> None:
        """Notes that a replica keeps some of the prompt's blocks."""
        self._holders[message.handoff_id] = holder

    def complete(self, message: prefill_pb2.KvHandoff, holder: PrefillReplica) -> None:
        """Notes that a replica keeps all of the prompt's blocks."""
        self.hold(message, holder)
        self.message = message

    def release(self) -> None:
        """Makes the replicas drop the blocks. Idempotent; does not wait."""
        self.message = None
        holders, self._holders = self._holders, {}
        for handoff_id, holder in holders.items():
            holder.release_handoff(handoff_id)
