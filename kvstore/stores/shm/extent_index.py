"""`ExtentIndex`: one process's index of the extents: objects by key, and free extents."""

from collections import defaultdict
from collections.abc import Iterable

from kvstore.stores.shm.extent_table import Extent, ExtentTable, State

__all__ = ["ExtentIndex"]

_Kind = tuple[int, bool]  # of a free extent: its room, and whether it has memory


class ExtentIndex:
    """Follows the changes of a table. All calls need the store's lock.

    The owner reports its changes, and `publish` passes them to other processes, once per holder of
    the lock. If a process dies before `publish`, the table is counted anew and all processes read
    all of it.

    Args:
        table: the table that it indexes.
    """

    def __init__(self, table: ExtentTable) -> None:
        self._table = table
        self._num_seen: int | None = None  # number of the table's changes read so far
        self._unpublished: list[Extent] = []
        self._by_key: dict[bytes, Extent] = {}
        self._keys: dict[Extent, bytes] = {}
        # Free extents: each dict is a set in the order in which they became free.
        self._free: defaultdict[_Kind, dict[Extent, None]] = defaultdict(dict)
        self._spare: dict[Extent, None] = {}  # those of any room that have memory
        self._kinds: dict[Extent, _Kind] = {}

    def catch_up(self) -> None:
        """Reads the changes of other processes."""
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
        """Publishes this process's changes to other processes."""
        if self._unpublished:
            self._num_seen = self._table.note_changes(self._unpublished)
            self._unpublished.clear()

    def find(self, key: bytes) -> Extent | None:
        """Returns the extent of an object; None if there is none."""
        return self._by_key.get(key)

    def take_free(self, room: int) -> Extent | None:
        """Removes and returns a free extent of that room; None if there is none.

        Prefers one with memory, the last that became free.
        """
        extents = self._free[room, True] or self._free[room, False]
        if not extents:
            return None
        extent, _ = extents.popitem()
        del self._kinds[extent]
        self._spare.pop(extent, None)
        self._unpublished.append(extent)
        return extent

    def first_spare(self) -> Extent | None:
        """Returns the free extent that has had spare memory for longest."""
        return next(iter(self._spare), None)

    def all_spare(self) -> list[Extent]:
        """Returns all free extents with memory, in the order in which they became free."""
        return list(self._spare)

    def note_object(self, extent: Extent, key: bytes) -> None:
        """Records that a reserved extent has become a key's object."""
        self._unpublished.append(extent)
        self._add_object(extent, key)

    def note_free(self, extent: Extent) -> None:
        """Records that an extent became free, or lost its memory while free."""
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
