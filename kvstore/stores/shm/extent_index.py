"""`ExtentIndex`: which extent holds which object, and which are free, as one process knows it."""

from collections import defaultdict
from collections.abc import Iterable

from kvstore.stores.shm.extent_table import Extent, ExtentTable, State

__all__ = ["ExtentIndex"]

_Kind = tuple[int, bool]  # of a free extent: its room, and whether there is memory behind it


class ExtentIndex:
    """Follows the changes of a table. All calls need the store's lock.

    What changed is told to it, and by it to other processes: once for all of a call, in
    `publish`. Should that not be reached, the table is counted anew, and everybody looks at all.

    Args:
        table: what it follows.
    """

    def __init__(self, table: ExtentTable) -> None:
        self._table = table
        self._num_seen: int | None = None  # changes
        self._unpublished: list[Extent] = []
        self._by_key: dict[bytes, Extent] = {}
        self._keys: dict[Extent, bytes] = {}
        # Free ones, as sets in the order in which they became so.
        self._free: defaultdict[_Kind, dict[Extent, None]] = defaultdict(dict)
        self._spare: dict[Extent, None] = {}  # of all rooms, those with memory behind them
        self._kinds: dict[Extent, _Kind] = {}

    def catch_up(self) -> None:
        """Learns what other processes did."""
        self._unpublished.clear()
        changed: Iterable[Extent] | None = None
        if self._num_seen is not None:
            changed = self._table.changes_since(self._num_seen)
        if changed is None:
            self._forget()
            changed = (self._table[index] for index in range(len(self._table)))
        for extent in changed:
            self._learn(extent)
        self._num_seen = self._table.header.num_changes

    def publish(self) -> None:
        """Tells other processes what this one changed."""
        if self._unpublished:
            self._num_seen = self._table.note_changes(self._unpublished)
            self._unpublished.clear()

    def find(self, key: bytes) -> Extent | None:
        """The extent of an object."""
        return self._by_key.get(key)

    def take_free(self, room: int, *, bare: bool = False) -> Extent | None:
        """A free extent of that room, which is not free from now on; if possible one with memory
        behind it, the last first. If `bare`, one without.
        """
        found = self._free[room, False]
        if not bare:
            found = self._free[room, True] or found
        if not found:
            return None
        extent, _ = found.popitem()
        del self._kinds[extent]
        self._spare.pop(extent, None)
        self._unpublished.append(extent)
        return extent

    def num_spare(self, room: int) -> int:
        """How many free extents of that room have memory behind them."""
        return len(self._free[room, True])

    def first_spare(self) -> Extent | None:
        """The free extent that has kept its memory for longest."""
        return next(iter(self._spare), None)

    def all_spare(self) -> list[Extent]:
        """Free extents that have kept their memory, from when they became free on."""
        return list(self._spare)

    def note_object(self, extent: Extent, key: bytes) -> None:
        """What was being written to has an object."""
        self._unpublished.append(extent)
        self._add_object(extent, key)

    def note_free(self, extent: Extent) -> None:
        """An extent became free, or lost its memory while it was."""
        self._unpublished.append(extent)
        self._drop(extent)
        self._add_free(extent)

    def _forget(self) -> None:
        self._by_key.clear()
        self._keys.clear()
        self._free.clear()
        self._spare.clear()
        self._kinds.clear()

    def _learn(self, extent: Extent) -> None:
        self._drop(extent)
        match extent.state:
            case State.OBJECT:
                self._add_object(extent, extent.key)
            case State.FREE:
                self._add_free(extent)

    def _add_object(self, extent: Extent, key: bytes) -> None:
        self._keys[extent] = key
        self._by_key[key] = extent

    def _add_free(self, extent: Extent) -> None:
        kind = self._kinds[extent] = extent.room, bool(extent.resident_bytes)
        self._free[kind][extent] = None
        if kind[1]:
            self._spare[extent] = None

    def _drop(self, extent: Extent) -> None:
        key = self._keys.pop(extent, None)
        if key is None:
            self._drop_free(extent)
        elif self._by_key[key] is extent:
            del self._by_key[key]

    def _drop_free(self, extent: Extent) -> None:
        kind = self._kinds.pop(extent, None)
        if kind is not None:
            del self._free[kind][extent]
            self._spare.pop(extent, None)
