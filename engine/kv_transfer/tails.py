"""`Tails`: what is saved for one handoff alone, and deleted with it. Pure.

A prompt's last block that is not full has a key that depends on the handoff. So have the states
after its last token.
"""

from collections import OrderedDict

from engine.groups.group import SequenceGroup
from engine.kv_transfer.blocks import TransferBlocks
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff

__all__ = ["Tails"]

# Handoffs with a tail that may be released. Beyond this, the store's TTL removes the oldest tail.
_MAX_HANDOFFS = 65_536


class Tails:
    """The tails of one scheduler's handoffs.

    Args:
        connector: the scheduler half.
        cut: how pool blocks are cut into transfer blocks.
    """

    def __init__(self, connector: KvConnectorScheduler, cut: TransferBlocks) -> None:
        self._connector = connector
        self._cut = cut
        self._key_of: OrderedDict[str, bytes] = OrderedDict()  # by handoff, until its release

    def keep(self, handoff: KvHandoff) -> None:
        """Keeps a handoff's tail, which other engines may load now, until `release`."""
        if self._has_tail(handoff):
            self._key_of[handoff.handoff_id] = handoff.block_keys[-1]
        if len(self._key_of) > _MAX_HANDOFFS:
            self._key_of.popitem(last=False)

    def release(self, handoff_id: str) -> None:
        """Deletes the tail of a handoff. Unknown ids are fine."""
        if key := self._key_of.pop(handoff_id, None):
            self._connector.delete(self._cut.object_keys(key))

    def drop_useless(self, group: SequenceGroup) -> None:
        """Deletes a tail that no handoff names once the group has no open save."""
        transfer = group.transfer
        is_useless = transfer.handoff_cancelled or transfer.tail_failed
        handoff = transfer.handoff
        if is_useless and handoff and not transfer.pending_saves and self._has_tail(handoff):
            self._connector.delete(self._cut.object_keys(handoff.block_keys[-1]))

    def cut_off(self, handoff: KvHandoff) -> KvHandoff | None:
        """Returns a handoff without its tail, which could not be saved. None if it has no full
        block, or if the model has states: those at the end of the full blocks are not saved.
        """
        num_full = handoff.num_tokens // self._cut.size
        if not num_full or self._cut.spec.states is not None:
            return None
        keys, num_tokens = handoff.block_keys[:num_full], num_full * self._cut.size
        return self._connector.make_handoff(handoff.handoff_id, handoff.namespace, keys, num_tokens)

    def _has_tail(self, handoff: KvHandoff) -> bool:
        return handoff.num_tokens % self._cut.size > 0
