"""`PromptParts`: puts transfer blocks of prompts together until they fill blocks. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

from engine.transfer_blocks import TransferBlocks
from kvstore.handoff import KvHandoff

__all__ = ["PromptBlock", "PromptParts"]

# Prompts of which the rest may come; beyond, the rest of the oldest goes unused.
_MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A block of a prompt.

    Attributes:
        keys: of its transfer blocks.
        parent: key of the block before it; None for the first.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None

    @property
    def key(self) -> bytes:
        """Its key in the pool."""
        return self.keys[-1]


@dataclass(slots=True)
class _Begun:
    """`keys` are those of the last, unfinished block, `parent` that of the block before it."""

    end: int = 0
    keys: tuple[bytes, ...] = ()
    parent: bytes | None = None


class PromptParts:
    """What has come of prompts, each told of from its beginning, in order, in any portions.

    Args:
        cut: how blocks are cut into transfer blocks.
    """

    def __init__(self, cut: TransferBlocks) -> None:
        self._cut = cut
        self._begun: OrderedDict[str, _Begun] = OrderedDict()

    def whole_blocks(self, handoff: KvHandoff) -> list[PromptBlock]:
        """Blocks that a portion completes; none if something before it did not come.

        Args:
            handoff: names the portion's full transfer blocks; its tokens end with them.
        """
        end = handoff.num_tokens // self._cut.size
        start = end - len(handoff.block_keys)
        begun = self._begun.pop(handoff.handoff_id, None)
        if start == 0:
            begun = _Begun()
        if begun is None or begun.end != start:
            return []
        count, keys = self._cut.per_block, (*begun.keys, *handoff.block_keys)
        whole = len(keys) // count * count
        blocks = []
        for first in range(0, whole, count):
            blocks.append(PromptBlock(keys[first : first + count], begun.parent))
            begun.parent = blocks[-1].key
        begun.end, begun.keys = end, keys[whole:]
        self._begun[handoff.handoff_id] = begun
        if len(self._begun) > _MAX_PROMPTS:
            self._begun.popitem(last=False)
        return blocks

    def forget(self, handoff_id: str) -> None:
        """The rest of a prompt is not wanted. Unknown ids are fine."""
        self._begun.pop(handoff_id, None)
