"""`TransferBlocks`: cuts a sequence's pool blocks into transfer blocks. Pure.

Sequences hold, share and cache blocks of the pool. Jobs move transfer blocks, and keys name them
(`kvstore.transfer_form`). A pool block holds one or more transfer blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.kv_cache.spec import KvCacheSpec
from kvstore.block_key import layer_group_key

__all__ = ["PromptBlock", "TransferBlocks", "TransferItem", "held_by"]


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A full pool block of a prompt.

    Attributes:
        keys: one per transfer block in it.
        parent: pool key of the block before it; None for the first.
    """

    keys: tuple[bytes, ...]
    parent: bytes | None

    @property
    def key(self) -> bytes:
        """Its key in the pool."""
        return self.keys[-1]


@dataclass(frozen=True, slots=True)
class TransferItem:
    """One layer group's KV of one transfer block.

    Attributes:
        index: the transfer block's index in its sequence.
        key: the layer group's object key.
        block_id: the pool block that contains it.
        transfer_id: the transfer block's number in the pool.
    """

    index: int
    key: bytes
    block_id: int
    transfer_id: int


@dataclass(frozen=True, slots=True)
class TransferBlocks:
    """How an engine's pool blocks are cut.

    Attributes:
        spec: describes the pool's blocks.
        size: tokens per transfer block; divides the tokens per pool block.
    """

    spec: KvCacheSpec
    size: int

    @property
    def per_block(self) -> int:
        """Transfer blocks per pool block."""
        return self.spec.block_size // self.size

    def ids_in(self, block_ids: Iterable[int]) -> list[int]:
        """Returns the ids of all transfer blocks in pool blocks."""
        count = self.per_block
        return [block * count + part for block in block_ids for part in range(count)]

    def items(
        self,
        indices: Iterable[int],
        keys: Sequence[bytes],
        blocks: Sequence[Sequence[int]],
        first_live: Sequence[int],
    ) -> Iterator[TransferItem]:
        """Returns the items that hold some transfer blocks of a sequence, in order.

        The states of recurrent layers are not among them.

        Args:
            indices: indices of the transfer blocks.
            keys: the sequence's transfer block keys, at least up to the last of `indices`.
            blocks: the sequence's pool blocks, per layer group.
            first_live: index of the first block that the sequence still has, per layer group.
        """
        count = self.per_block
        for index in indices:
            block, part = divmod(index, count)
            for layers, own in enumerate(blocks[: len(self.spec.windows)]):
                if block >= first_live[layers]:
                    key = layer_group_key(keys[index], layers)
                    yield TransferItem(index, key, own[block], own[block] * count + part)

    def object_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the object keys of all layer groups of transfer blocks."""
        groups = range(len(self.spec.windows))
        return [layer_group_key(key, layers) for key in keys for layers in groups]


def held_by(items: Iterable[TransferItem]) -> list[int]:
    """Returns the pool blocks that contain the items: each once, in order."""
    return list(dict.fromkeys(item.block_id for item in items))
