"""`HeldHandoff`: the KV of a request that replicas keep for the one that continues it."""

from baton.v1 import prefill_pb2
from router.fleet.decode_replica import DecodeReplica
from router.fleet.prefill_replica import PrefillReplica

__all__ = ["HeldHandoff"]

_Holder = PrefillReplica | DecodeReplica


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
