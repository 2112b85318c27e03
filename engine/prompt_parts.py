"""`PromptParts`: puts transfer blocks of prompts together until they fill blocks. Pure."""

from collections import OrderedDict

from engine.transfer_blocks import TransferBlocks
from kvstore.handoff import KvHandoff

__all__ = ["PromptParts"]

# Prompts of which part of a block has come; beyond, the rest of such a block goes unused.
_MAX_PROMPTS = 1024


class PromptParts:
    """What has come of prompts, each told of from its beginning, in order, in any portions.

    Args:
        cut: how blocks are cut into transfer blocks.
    """

    def __init__(self, cut: TransferBlocks) -> None:
        self._cut = cut
        # Per prompt, keys of its last, unfinished block, and the index behind them.
        self._begun: OrderedDict[str, tuple[list[bytes], int]] = OrderedDict()

    def whole_blocks(self, handoff: KvHandoff) -> list[list[bytes]]:
        """Blocks that a portion completes, as the keys of their transfer blocks.

        Args:
            handoff: names the portion's full transfer blocks; its tokens end with them.
        """
        count = self._cut.per_block
        end = handoff.num_tokens // self._cut.size
        start = end - len(handoff.block_keys)
        before, index = self._begun.pop(handoff.handoff_id, ([], start))
        keys = [*(before if index == start else ()), *handoff.block_keys]
        keys = keys[-(end - len(keys)) % count :]  # a block of which the beginning did not come
        whole = len(keys) // count * count
        if keys[whole:]:
            self._begun[handoff.handoff_id] = (keys[whole:], end)
            if len(self._begun) > _MAX_PROMPTS:
                self._begun.popitem(last=False)
        return [keys[first : first + count] for first in range(0, whole, count)]
