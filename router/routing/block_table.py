"""`BlockTable`: which replicas hold which blocks of one layer group. Pure.

A replica is a small number, its *slot*, and a set of replicas is an integer with a bit per slot.
One dictionary maps the key of a block to the set of its holders, however many replicas there are.

In a layer group without a window a replica can use a prefix only from its first block on. Pools
evict a sequence's end before its beginning, so a replica that holds a block nearly always holds
the blocks before it, and a binary search over the prompt's keys finds the length of its prefix. A
block that a replica holds without the block before it is an *orphan*. The table knows all orphans,
from links between the blocks, and searches only before the first orphan of a prompt. So the
answer is exact.
"""

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import TypeVar

__all__ = ["BlockTable", "members_of"]

_DEPTH_BITS = 24
_UNKNOWN_DEPTH = (1 << _DEPTH_BITS) - 1
"""Of a block whose distance from the start of its sequence is not known; the largest depth."""
_BITS_OF_DIGITS = bytes.maketrans(b"01", bytes((0, 1)))
_Name = TypeVar("_Name")


class BlockTable:
    """The holders of the blocks of one layer group.

    Args:
        has_links: whether the blocks' order counts, as it does in a layer group without a window.
    """

    def __init__(self, *, has_links: bool) -> None:
        self._has_links = has_links
        # Holders and depth in one integer: a dictionary of integers needs no visits of the garbage
        # collector, however large it is.
        self._values: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[bytes, bytes | set[bytes]] = {}
        self._orphans: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_links(self) -> int:
        """Number of blocks whose predecessor is known."""
        return len(self._parents)

    def holders(self, key: bytes) -> int:
        """Returns the set of replicas that hold a block."""
        return self._values.get(key, 0) >> _DEPTH_BITS

    def add(self, slot: int, keys: Iterable[bytes], parent: bytes | None) -> None:
        """Notes that a replica holds consecutive blocks of one sequence.

        Args:
            slot: the replica.
            keys: keys of the blocks.
            parent: key of the block before them; None if they begin a sequence.
        """
        if not self._has_links:
            self._add_unlinked(slot, keys)
            return
        bit, values, children = 1 << (slot + _DEPTH_BITS), self._values, self._children
        depth = 0 if parent is None else self._depth_after(parent)
        for key in keys:
            value = values.get(key)
            is_new = value is None
            if value is None:
                value = depth
                if parent is not None:
                    self._link(parent, key)
            if not value & bit:
                values[key] = value | bit
                before = parent if is_new else self._parents.get(key)
                if before is not None and not values.get(before, 0) & bit:
                    self._orphans[key] = self._orphans.get(key, 0) | bit
                if key in children:
                    self._adopt_children(key, bit, is_new=is_new)
            parent = key
            depth = min((value & _UNKNOWN_DEPTH) + 1, _UNKNOWN_DEPTH)

    def copy(self, slot: int, keys: Iterable[bytes]) -> None:
        """Notes that a replica holds blocks, each of which another slot holds."""
        bit, values = 1 << (slot + _DEPTH_BITS), self._values
        for key in keys:
            values[key] |= bit
            before = self._parents.get(key)
            if before is not None and not values.get(before, 0) & bit:
                self._orphans[key] = self._orphans.get(key, 0) | bit
            if self._orphans:
                for child in self._children_of(key):
                    self._remove_orphan(child, bit)

    def remove(self, slot: int, keys: Iterable[bytes]) -> None:
        """Notes that a replica holds blocks no longer. Blocks that it does not hold are fine."""
        bit, values = 1 << (slot + _DEPTH_BITS), self._values
        for key in keys:
            value = values.get(key, 0)
            if not value & bit:
                continue
            value &= ~bit
            if self._has_links:
                self._remove_orphan(key, bit)
                for child in self._children_of(key):
                    if values.get(child, 0) & bit:
                        self._orphans[child] = self._orphans.get(child, 0) | bit
            if value >> _DEPTH_BITS:
                values[key] = value
            else:
                del values[key]
                self._unlink(key)

    def prefixes(self, keys: Sequence[bytes], limit: int, replicas: int) -> list[tuple[int, int]]:
        """Returns how many leading blocks of a prompt replicas hold.

        O(log n) look-ups for each different length.

        Args:
            keys: keys of the prompt's blocks.
            limit: the most blocks that count.
            replicas: the set of replicas that are asked for.

        Returns:
            Disjoint sets of replicas with the length of their prefix; no set of length 0.
        """
        if not limit:
            return []
        get = self._values.get
        rest = get(keys[0], 0) & replicas << _DEPTH_BITS  # shifted, as the values are
        searches = []  # sets, and the indexes of their last block: the least, the largest
        for place, orphaned in self._orphans_in(keys) if rest else ():
            # The block before the orphan is missing.
            if part := orphaned & rest:
                searches.append((part, 0, min(place - 1, limit) - 1))
                rest &= ~part
        lengths = []
        if whole := get(keys[limit - 1], 0) & rest:  # nearly all of a prompt is cached, or little
            lengths.append((whole >> _DEPTH_BITS, limit))
            rest ^= whole
        if rest:
            searches.append((rest, 0, limit - 2))
        while searches:
            part, low, high = searches.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                holders = get(keys[middle], 0) & part
                if not holders:
                    high = middle - 1
                elif holders == part:
                    low = middle
                else:
                    searches.append((part ^ holders, low, middle - 1))
                    part, low = holders, middle
            lengths.append((part >> _DEPTH_BITS, low + 1))
        return lengths

    def check(self) -> None:
        """Verifies the invariants; for tests.

        Raises:
            AssertionError: links or orphans are wrong, which is a bug.
        """
        linked = {child for parent in self._children for child in self._children_of(parent)}
        assert linked == set(self._parents), "links differ in their directions"
        assert linked <= self._values.keys(), "a block that nobody holds has a link"
        assert all(value >> _DEPTH_BITS for value in self._values.values())
        for key, value in self._values.items():
            parent = self._parents.get(key)
            missing = 0 if parent is None else value >> _DEPTH_BITS & ~self.holders(parent)
            assert self._orphans.get(key, 0) >> _DEPTH_BITS == missing, "an orphan is not known"
        assert self._orphans.keys() <= self._values.keys()

    def _add_unlinked(self, slot: int, keys: Iterable[bytes]) -> None:
        bit, values = 1 << (slot + _DEPTH_BITS), self._values
        for key in keys:
            values[key] = values.get(key, 0) | bit

    def _depth_after(self, parent: bytes) -> int:
        """Returns the depth of a block after `parent`, the number of blocks before it."""
        return min((self._values.get(parent, _UNKNOWN_DEPTH) & _UNKNOWN_DEPTH) + 1, _UNKNOWN_DEPTH)

    def _orphans_in(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Returns the places of orphans in a prompt, ascending, and the replicas of each, shifted
        as they are in `_values`.
        """
        orphans, values = self._orphans, self._values
        if len(orphans) < len(keys):
            places = [(values[key] & _UNKNOWN_DEPTH, key) for key in orphans]
            if all(depth != _UNKNOWN_DEPTH for depth, _ in places):
                here = [p for p in places if p[0] < len(keys) and keys[p[0]] == p[1]]
                return [(place, orphans[key]) for place, key in sorted(here)]
        return [(place, orphans[key]) for place, key in enumerate(keys) if key in orphans]

    # Links from a block to the one before it, and back.

    def _children_of(self, key: bytes) -> Iterable[bytes]:
        children = self._children.get(key, ())
        return (children,) if isinstance(children, bytes) else children

    def _link(self, parent: bytes, key: bytes) -> None:
        self._parents[key] = parent
        siblings = self._children.get(parent)
        if siblings is None:
            self._children[parent] = key
        elif isinstance(siblings, bytes):
            self._children[parent] = {siblings, key}
        else:
            siblings.add(key)

    def _unlink(self, key: bytes) -> None:
        parent = self._parents.pop(key, None)
        if parent is None:
            return
        siblings = self._children[parent]
        if isinstance(siblings, set) and len(siblings) > 1:
            siblings.discard(key)
        else:
            del self._children[parent]

    def _adopt_children(self, key: bytes, bit: int, *, is_new: bool) -> None:
        """Ends that blocks after a block, which a replica holds now, are orphans there."""
        if self._orphans:
            for child in self._children_of(key):
                self._remove_orphan(child, bit)
        if is_new:
            self._place_children(key)

    def _remove_orphan(self, key: bytes, bit: int) -> None:
        if (replicas := self._orphans.get(key)) is not None:
            if replicas & ~bit:
                self._orphans[key] = replicas & ~bit
            else:
                del self._orphans[key]

    def _place_children(self, key: bytes) -> None:
        """Gives the blocks after a block their depth, if it was not known before."""
        values, unplaced = self._values, [key]
        while unplaced:
            parent = unplaced.pop()
            depth = self._depth_after(parent)
            if depth == _UNKNOWN_DEPTH:
                continue
            for child in self._children_of(parent):
                if values[child] & _UNKNOWN_DEPTH == _UNKNOWN_DEPTH:
                    values[child] = values[child] & ~_UNKNOWN_DEPTH | depth
                    unplaced.append(child)


def members_of(replicas: int, names: Sequence[_Name]) -> Iterable[_Name]:
    """Returns the names of the replicas in a set.

    Args:
        replicas: the set.
        names: the name of each slot.
    """
    digits = bin(replicas)[:1:-1]  # the lowest first
    return compress(names, digits.encode().translate(_BITS_OF_DIGITS))
