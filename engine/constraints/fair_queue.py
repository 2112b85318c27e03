"""`FairQueue`: a queue whose owners take turns, however much each of them has put into it. Pure."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

_Item = TypeVar("_Item")


class FairQueue(Generic[_Item]):
    """Items by owner. Not thread-safe."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, deque[_Item]] = OrderedDict()  # the next owner first

    def add(self, owner: str, item: _Item) -> None:
        """Adds an item behind the owner's others."""
        self._items.setdefault(owner, deque()).append(item)

    def take(self) -> _Item | None:
        """Removes and returns the first item of the owner whose turn it is; None if it is empty."""
        if not self._items:
            return None
        owner, items = self._items.popitem(last=False)
        item = items.popleft()
        if items:
            self._items[owner] = items
        return item

    def make_room(self, owner: str) -> _Item | None:
        """Removes the newest item of the owner with the most, for one of another owner.

        Returns:
            None if no owner has at least two more than the one that needs room.
        """
        num_own = len(self._items.get(owner, ()))
        largest = max(self._items, key=lambda name: len(self._items[name]), default=owner)
        if largest == owner or len(self._items[largest]) < num_own + 2:
            return None
        return self._items[largest].pop()
