"""`TransferBlocks`: a sequence's blocks as the transfer blocks that they are cut into. Pure.

The pool's blocks are what sequences hold, share and cache; transfer blocks are what jobs move
and keys name (`kvstore.transfer_form`). Where an engine's blocks go as they are, both are one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.kv_cache.spec import KvCacheSpec
from kvstore.block_key import layer_group_key

__all__ = ["TransferBlocks", "TransferItem", "held_by"]


@dataclass(frozen=True, slots=True)
class TransferItem:
    """One layer group's KV of one transfer block.

    Attributes:
        index: of the transfer block in its sequence.
        key: the layer group's.
        block_id: of the pool's block that it is in.
        transfer_id: its own in the pool.
    """

    index: int
    key: bytes
    block_id: int
    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferBlocks:
    """How the blocks of an engine's sequences are cut.

    Attributes:
        spec: of the pool's blocks.
        size: tokens of a transfer block; divides those of a block.
    """

    spec: KvCacheSpec
    size: int

    @property
    def per_block(self) -> int:
        """Transfer blocks in a block."""
        return self.spec.block_size // self.size

    def ids_in(self, block_ids: Iterable[int]) -> list[int]:
        """All transfer blocks of blocks of the pool."""
        count = self.per_block
        return [block * count + part for block in block_ids for part in range(count)]

    def items(
        self,
        indices: Iterable[int],
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[int]],
        first_live: Sequence[int],
    ) -> Iterator[TransferItem]:
        """What is moved of transfer blocks of a sequence, in order.

        Args:
            indices: of the transfer blocks.
            keys: of all of the sequence's, up to the last of `indices`.
            blocks: the sequence's blocks per layer group.
            first_live: per layer group, the index of the first block that it has.
        """
        count = self.per_block
        for index in indices:
            block, part = divmod(index, count)
            for group, own in enumerate(blocks):
                if block >= first_live[group]:
                    key = layer_group_key(keys[index], group)
                    yield TransferItem(index, key, own[block], own[block] * count + part)

    def object_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        """Keys of all layer groups of transfer blocks."""
        groups = range(self.spec.num_layer_groups)
        return [layer_group_key(key, group) for key in keys for group in groups]


def held_by(items: Iterable[TransferItem]) -> list[int]:
    """The blocks that items are in, each once, in order."""
    return list(dict.fromkeys(item.block_id for item in items))
