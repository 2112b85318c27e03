"""`ReplicaCache`: the blocks of one replica, by its events and the prompts sent to it. Pure.

`SharedTables` has the tables of all replicas whose caches have one form.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile

from router.routing.block_table import BlockTable, members_of
from router.routing.cache_form import CacheForm

__all__ = ["KvEventError", "ReplicaCache", "SharedTables", "SlotBlocks", "Upkeep"]

_EXPECTED_S = 5.0
"""How long the blocks of a prompt that was just sent are expected, unless events name them."""
_EXPECTED_WITHOUT_EVENTS_S = 120.0
"""The same while the replica's events are absent."""


class KvEventError(Exception):
    """A replica's events do not fit together, so what it holds is unknown."""


class SharedTables:
    """The tables of the replicas whose caches have one form.

    Args:
        form: the form; its `max_blocks` do not count.
    """

    def __init__(self, form: CacheForm) -> None:
        self.form = form
        self.tables = [BlockTable(has_links=window is None) for window in form.windows]
        groups = list(enumerate(zip(self.tables, form.windows, strict=True)))
        self._full = [table for _, (table, window) in groups if window is None]
        self._windowed = [
            (table, window)
            for group, (table, window) in groups
            if window is not None and group != form.state_group
        ]
        self._states = [(table, 1) for group, (table, _) in groups if group == form.state_group]
        self._replica_of: list[str] = []
        self._free: list[int] = []
        self._live = 0

    @property
    def num_slots(self) -> int:
        """Slots that replicas have or have had."""
        return len(self._replica_of)

    @property
    def is_unused(self) -> bool:
        """Whether no replica has a slot, not even one whose blocks are still to be removed."""
        return len(self._free) == len(self._replica_of)

    def take_slot(self, replica_id: str) -> int:
        """Gives a replica the lowest free slot."""
        if self._free:
            slot = heappop(self._free)
            self._replica_of[slot] = replica_id
        else:
            slot = len(self._replica_of)
            self._replica_of.append(replica_id)
        self._live |= 1 << slot
        return slot

    def retire(self, slot: int) -> None:
        """Makes `match` ignore a slot, whose blocks are still to be removed."""
        self._live &= ~(1 << slot)

    def free(self, slot: int) -> None:
        """Gives back a retired slot without blocks."""
        heappush(self._free, slot)

    def match(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        blocks: dict[str, int],
        kv_blocks: dict[str, int],
    ) -> None:
        """Adds how many leading blocks of a prompt each replica can use.

        Args:
            keys: keys of the prompt's full blocks.
            num_tokens: length of the prompt, of which at least one token is computed.
            blocks: by replica id.
            kv_blocks: the blocks that it could use with states from elsewhere, where it needs
                states.
        """
        ratio = self.form.keys_per_block
        if ratio > 1:
            keys = keys[ratio - 1 :: ratio]
        limit = min(len(keys), (num_tokens - 1) // self.form.tokens_per_block)
        lengths = self._kv_lengths(keys, limit)
        if self._states:
            self._note(lengths, kv_blocks)
            lengths = self._settled(keys, lengths, [*self._windowed, *self._states])
        self._note(lengths, blocks)

    def _note(self, lengths: list[tuple[int, int]], blocks: dict[str, int]) -> None:
        names, ratio = self._replica_of, self.form.keys_per_block
        for replicas, length in lengths:
            if replicas & (replicas - 1):
                blocks.update(dict.fromkeys(members_of(replicas, names), length * ratio))
            else:  # most sets have one replica
                blocks[names[replicas.bit_length() - 1]] = length * ratio

    def _kv_lengths(self, keys: Sequence[bytes], limit: int) -> list[tuple[int, int]]:
        """Returns disjoint sets of replicas with the length of the prefix whose KV they have."""
        parts = [(self._live, limit)] if limit > 0 and self._live else []
        for table in self._full:
            parts = [
                part
                for replicas, length in parts
                for part in table.prefixes(keys, length, replicas)
            ]
        return self._settled(keys, parts, self._windowed) if self._windowed else parts

    def _settled(
        self,
        keys: Sequence[bytes],
        lengths: list[tuple[int, int]],
        windowed: Sequence[tuple[BlockTable, int]],
    ) -> list[tuple[int, int]]:
        """Returns the longest prefixes up to these lengths whose windows the replicas have.

        As `PrefixCache` of the engine does: if a block is missing that a prefix reads, every
        shorter one that has the block reads it too.
        """
        settled = []
        # A set of replicas, a length, and per layer group, from where on its blocks are held.
        work = [(replicas, length, [length] * len(windowed)) for replicas, length in lengths]
        while work:
            replicas, length, held_from = work.pop()
            for number, (table, window) in enumerate(windowed):
                index = min(held_from[number], length)
                first = max(0, length - window)
                while index > first and replicas:
                    holders = table.holders(keys[index - 1]) & replicas
                    if holders != replicas:
                        work.append((replicas & ~holders, index - 1, held_from.copy()))
                        replicas = holders
                    index -= 1
                held_from[number] = index
            if replicas and length:
                settled.append((replicas, length))
        return settled


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What the index does for its caches.

    Attributes:
        clock: monotonic seconds.
        discard: removes the blocks of a slot that was retired.
        schedule: makes the expected blocks of a slot expire.
    """

    clock: Callable[[], float]
    discard: Callable[["SlotBlocks"], None]
    schedule: Callable[["SlotBlocks"], None]


class ReplicaCache:
    """The blocks that one replica holds.

    Args:
        replica_id: names the replica.
        form: the form of its cache.
        shared: the tables of all replicas with this form.
        upkeep: what the index does for it.

    Attributes:
        has_events: whether its events are followed. Otherwise only what was sent there is known.
        turn: held by the one who follows them.
    """

    def __init__(
        self,
        replica_id: str,
        form: CacheForm,
        shared: SharedTables,
        upkeep: Upkeep,
    ) -> None:
        self.replica_id = replica_id
        self.form = form
        self.has_events = False
        self.turn = asyncio.Lock()
        self._shared = shared
        self._upkeep = upkeep
        self._blocks = SlotBlocks(shared, shared.take_slot(replica_id))

    @property
    def num_stored(self) -> int:
        """Blocks that it holds by its events, without states."""
        stored = self._blocks.stored
        return sum(len(keys) for group, keys in enumerate(stored) if group != self.form.state_group)

    @property
    def num_expected(self) -> int:
        """Blocks that it does not hold yet, but is expected to hold soon, without states."""
        expected = self._blocks.expected
        return sum(
            len(keys) for group, keys in enumerate(expected) if group != self.form.state_group
        )

    def store(self, group: int, keys: Sequence[bytes], parent: bytes | None) -> None:
        """Notes that blocks entered the cache; `parent` as in `BlockTable.add`.

        Raises:
            KvEventError: there is no such layer group, or the cache would be larger than it can be.
        """
        self._check_group(group)
        stored = self._blocks.stored[group]
        stored.update(keys)
        if len(stored) > self.form.max_blocks[group]:
            raise KvEventError(f"it has stored more than {self.form.max_blocks[group]} blocks")
        if expected := self._blocks.expected[group]:
            for key in keys:
                expected.pop(key, None)
        self._shared.tables[group].add(self._blocks.slot, keys, parent)

    def remove(self, group: int, keys: Sequence[bytes]) -> None:
        """Notes that blocks left the cache, or were not in it.

        Raises:
            KvEventError: there is no such layer group.
        """
        self._check_group(group)
        self._blocks.stored[group].difference_update(keys)
        if expected := self._blocks.expected[group]:
            for key in keys:
                expected.pop(key, None)
        self._shared.tables[group].remove(self._blocks.slot, keys)

    def clear(self) -> None:
        """Notes that the cache is empty, or that its content is unknown. O(1) but for what is
        expected, which stays so for a while: prompts that were just sent are computed soon.
        """
        old = self._blocks
        if any(old.stored) or any(old.expected):
            new = SlotBlocks(self._shared, self._shared.take_slot(self.replica_id))
            new.inherit(old, self._upkeep.clock() + _EXPECTED_S)
            self._blocks = new
            self._shared.retire(old.slot)
            self._upkeep.discard(old)
            self._upkeep.schedule(new)

    def close(self) -> None:
        """Removes the replica; nothing else may be called afterwards."""
        self._shared.retire(self._blocks.slot)
        self._upkeep.discard(self._blocks)

    def expect(self, keys: Sequence[bytes]) -> None:
        """Notes that the replica will soon hold the blocks of a prompt.

        Args:
            keys: keys of the prompt's full blocks.
        """
        ratio, blocks = self.form.keys_per_block, self._blocks
        keys = keys[ratio - 1 :: ratio] if ratio > 1 else keys
        expected_s = _EXPECTED_S if self.has_events else _EXPECTED_WITHOUT_EVENTS_S
        for group, most in enumerate(self.form.max_blocks):
            wanted = keys[-1:] if group == self.form.state_group else keys
            blocks.expect(group, wanted, self._upkeep.clock() + expected_s, most)
        self._upkeep.schedule(blocks)

    def _check_group(self, group: int) -> None:
        if group >= len(self.form.windows):
            raise KvEventError(f"there is no layer group {group}")


class SlotBlocks:
    """The blocks of one slot, by layer group.

    Args:
        shared: the tables that have them.
        slot: the slot.

    Attributes:
        slot: the slot.
        shared: the tables that have them.
        stored: blocks that events have named.
        expected: other blocks, and when they are no longer expected; ascending.
        is_scheduled: whether `expire` will be called.
    """

    def __init__(self, shared: SharedTables, slot: int) -> None:
        self.slot = slot
        self.shared = shared
        self.stored: list[set[bytes]] = [set() for _ in shared.tables]
        self.expected: list[OrderedDict[bytes, float]] = [OrderedDict() for _ in shared.tables]
        self.is_scheduled = False

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not any(self.stored) and not any(self.expected)

    @property
    def expires_at(self) -> float | None:
        """When the first of the expected blocks expires; None if there are none."""
        firsts = (next(iter(expected.values())) for expected in self.expected if expected)
        return min(firsts, default=None)

    def expect(self, group: int, keys: Sequence[bytes], expires_at: float, max_keys: int) -> None:
        """Adds the blocks with which a sequence begins, in place of the oldest if they are many.

        Args:
            group: the layer group.
            keys: the blocks; those that events have named are left out.
            expires_at: no earlier than that of the blocks before.
            max_keys: the most expected blocks.
        """
        stored, expected = self.stored[group], self.expected[group]
        new = [key for key in keys if key not in stored]
        if not new:
            return
        # In reverse, so that a prompt's end, which is useless without its beginning, leaves first.
        for key in reversed(new):
            expected[key] = expires_at
            expected.move_to_end(key)
        table = self.shared.tables[group]
        table.add(self.slot, keys, None)
        self._drop_oldest(group, len(expected) - max_keys)

    def inherit(self, old: "SlotBlocks", latest: float) -> None:
        """Adds the expected blocks of a slot that will be retired, until `latest` at most."""
        for group, table in enumerate(self.shared.tables):
            expected = self.expected[group]
            for key, expires_at in old.expected[group].items():
                expected[key] = min(expires_at, latest)
            table.copy(self.slot, expected)

    def expire(self, now: float) -> None:
        """Removes blocks that are no longer expected."""
        for group, expected in enumerate(self.expected):
            expired = takewhile(lambda expires_at: expires_at <= now, expected.values())
            self._drop_oldest(group, sum(1 for _ in expired))

    def discard(self, max_keys: int) -> None:
        """Removes up to about `max_keys` blocks. The slot is free once none is left."""
        for group, table in enumerate(self.shared.tables):
            stored, expected = self.stored[group], self.expected[group]
            removed = [stored.pop() for _ in range(min(max_keys, len(stored)))]
            removed += [expected.popitem()[0] for _ in range(min(max_keys, len(expected)))]
            table.remove(self.slot, removed)
        if self.is_empty:
            self.shared.free(self.slot)

    def _drop_oldest(self, group: int, num_keys: int) -> None:
        expected = self.expected[group]
        dropped = [expected.popitem(last=False)[0] for _ in range(num_keys)]
        self.shared.tables[group].remove(self.slot, dropped)
