"""`TransferBlocks`: cuts a sequence's pool blocks into transfer blocks. Pure.

Sequences hold, share and cache blocks of the pool. Jobs move transfer blocks, and keys name them
(`kvstore.transfer_form`). A pool block holds one or more transfer blocks.

A slot with the states of recurrent layers is moved as some transfer blocks, too, its *units*. Their
ids follow those of all transfer blocks of tokens, and their keys are derived from that of the
transfer block whose last token is the last one that the states have.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine.kv_cache.spec import KvCacheSpec
from kvstore.block_key import layer_group_key, state_key

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
    """One layer group's KV of one transfer block, or a unit of the states at its end.

    Attributes:
        index: the transfer block's index in its sequence.
        key: the layer group's object key, or the unit's.
        block_id: the pool block or the slot that contains it.
        transfer_id: the transfer block's number in the pool.
        layer_group: the layer group.
    """

    index: int
    key: bytes
    block_id: int
    transfer_id: int
    layer_group: int = 0


@dataclass(frozen=True, slots=True)
class TransferBlocks:
    """How an engine's pool blocks are cut.

    Attributes:
        spec: describes the pool's blocks.
        size: tokens per transfer block; divides the tokens per pool block.
        num_blocks: blocks in the pool; the ids of units follow those of their transfer blocks.
        num_units: units of a slot; 0 for a model without recurrent layers.
    """

    spec: KvCacheSpec
    size: int
    num_blocks: int = 0
    num_units: int = 0

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
        states: Mapping[int, int] = MappingProxyType({}),
    ) -> Iterator[TransferItem]:
        """Returns the items that hold some transfer blocks of a sequence, in order.

        Args:
            indices: indices of the transfer blocks.
            keys: the sequence's transfer block keys, at least up to the last of `indices`.
            blocks: the sequence's pool blocks, per layer group.
            first_live: index of the first block that the sequence still has, per layer group.
            states: by pool block, the slot with the states at its end, if it is moved, too. It
                follows the last transfer block of the pool block.
        """
        count = self.per_block
        for index in indices:
            block, part = divmod(index, count)
            for layers, own in enumerate(blocks[: len(self.spec.windows)]):
                if block >= first_live[layers]:
                    key = layer_group_key(keys[index], layers)
                    yield TransferItem(index, key, own[block], own[block] * count + part, layers)
            if block in states and part == count - 1:
                yield from self.state_items(index, keys[index], states[block])

    def state_items(self, index: int, key: bytes, slot: int) -> Iterator[TransferItem]:
        """Returns the units of a slot.

        Args:
            index: index of the transfer block at the end of which its states are.
            key: key of that transfer block.
            slot: the slot's id.
        """
        first = self.num_blocks * self.per_block + (slot - self.num_blocks) * self.num_units
        for unit, unit_key in enumerate(self.state_keys(key)):
            yield TransferItem(index, unit_key, slot, first + unit)

    def state_keys(self, key: bytes) -> list[bytes]:
        """Returns the keys of the units of the states at the end of a transfer block."""
        return [state_key(key, unit) for unit in range(self.num_units)]

    def token_keys(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the object keys of the KV of transfer blocks, of all layer groups."""
        groups = range(len(self.spec.windows))
        return [layer_group_key(key, layers) for key in keys for layers in groups]

    def object_keys(self, key: bytes) -> list[bytes]:
        """Returns the object keys of a transfer block, and of the states at its end."""
        return [*self.token_keys([key]), *self.state_keys(key)]

    def plain_keys(self, items: Iterable[TransferItem]) -> list[bytes]:
        """Returns the keys of the transfer blocks of layer group 0 among items."""
        return [i.key for i in items if i.layer_group == 0 and i.block_id < self.num_blocks]

    # Look-ups.

    def loadable_ends(self, num_prompt: int, num_tokens: int) -> Sequence[int]:
        """Returns after how many leading transfer blocks a sequence can go on, ascending.

        Without states these are all numbers. With them, it can go on where other sequences have
        saved states: at multiples of the spacing, and at the end of the last full pool block of
        the same prompt, or of all the same tokens.

        Args:
            num_prompt: tokens in the prompt.
            num_tokens: tokens of the sequence, at least one of which is left to compute.
        """
        limit, size = num_tokens - 1, self.spec.block_size
        if self.spec.states is None:
            return range(1, limit // self.size + 1)
        interval = self.spec.states.cached_interval
        last_ends = {min(tokens, limit) // size * size for tokens in (num_prompt, limit)}
        ends = sorted({*range(interval, limit + 1, interval), *last_ends} - {0})
        return [end // self.size for end in ends]

    def lookup_keys(self, keys: Sequence[bytes], ends: Sequence[int]) -> list[bytes]:
        """Returns the object keys of all that a sequence needs to go on at one end after the other.

        Args:
            keys: its transfer block keys.
            ends: from `loadable_ends`.
        """
        object_keys: list[bytes] = []
        first = 0
        for end in ends:
            object_keys += self.token_keys(keys[first:end])
            object_keys += self.state_keys(keys[end - 1])
            first = end
        return object_keys

    def last_found(self, ends: Sequence[int], num_found: int) -> int:
        """Returns the last of `ends` for which all is there; 0 if there is none.

        Args:
            ends: from `loadable_ends`.
            num_found: how many leading ones of the `lookup_keys` were found.
        """

        def num_keys(index: int) -> int:
            return ends[index] * len(self.spec.windows) + (index + 1) * self.num_units

        index = bisect_right(range(len(ends)), num_found, key=num_keys)
        return ends[index - 1] if index else 0


def held_by(items: Iterable[TransferItem]) -> list[int]:
    """Returns the pool blocks that contain the items: each once, in order."""
    return list(dict.fromkeys(item.block_id for item in items))
