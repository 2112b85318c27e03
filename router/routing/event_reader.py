"""`KvEventReader`: applies one replica's events to what the index knows of it. Pure."""

from collections.abc import Callable, Iterable, Sequence

from baton.v1 import worker_pb2
from router.routing.replica_cache import KvEventError, ReplicaCache
from router.routing.stored_keys import StoredKeys

__all__ = ["MAX_STALENESS_S", "KvEventReader"]

MAX_STALENESS_S = 5.0
"""Events that are known to be missing for longer are absent."""


class KvEventReader:
    """The place of this router in the events of one worker, from one start of the stream to the
    next.

    The worker numbers its events. An event with an older number than the last one is a repetition;
    a number that is left out is a gap, after which the content is unknown until the next snapshot.
    The worker's load reports say the number of its newest event, so it is known how far behind this
    router is.

    Args:
        cache: what the index knows of the replica.
        stored: what it knows of shared stores.
        store_ids: returns the identities of the stores through which the replica hands over.
    """

    def __init__(
        self, cache: ReplicaCache, stored: StoredKeys, store_ids: Callable[[], Sequence[str]]
    ) -> None:
        self._cache = cache
        self._stored = stored
        self._store_ids = store_ids
        self._last: int | None = None
        self._reported: tuple[int, float] = (0, 0.0)

    @property
    def has_begun(self) -> bool:
        """Whether the stream's snapshot has begun."""
        return self._last is not None

    def take(self, events: Iterable[worker_pb2.KvEvent]) -> None:
        """Applies events in order.

        Raises:
            KvEventError: the events have a gap, or cannot be right. The cache counts as empty until
                the next snapshot, which a new stream begins with.
        """
        try:
            for event in events:
                self._take(event)
        except KvEventError:
            self.end()
            raise

    def end(self) -> None:
        """Forgets what the replica holds, as its events are absent from now on."""
        self._cache.clear()
        self._cache.has_events = False
        self._last = None

    def report(self, newest: int, now: float) -> None:
        """Takes the number of the worker's newest event from a report of its load.

        Args:
            newest: the number.
            now: monotonic seconds.
        """
        if self.staleness_s(now) == 0.0:
            self._reported = newest, now

    def staleness_s(self, now: float) -> float:
        """Returns for how long an event is known that has not arrived; 0.0 if there is none."""
        number, since = self._reported
        return max(now - since, 0.0) if self._last is not None and number > self._last else 0.0

    def _take(self, event: worker_pb2.KvEvent) -> None:
        number, last = event.sequence_number, self._last
        if event.HasField("cleared"):
            if last is None or number >= last:
                self._cache.clear()
                self._cache.has_events = True
                self._last = number
            return
        if last is None:
            raise KvEventError("its events do not begin with a snapshot")
        if number > last + 1:
            raise KvEventError(f"its event {number} follows event {last}")
        if number >= last:
            self._last = number
            self._apply(event)

    def _apply(self, event: worker_pb2.KvEvent) -> None:
        match event.WhichOneof("event"):
            case "stored":
                stored = event.stored
                parent = stored.parent if stored.HasField("parent") else None
                self._cache.store(stored.group, stored.keys, parent)
            case "removed":
                self._cache.remove(event.removed.group, event.removed.keys)
            case "saved":
                self._stored.save(self._store_ids(), event.saved.keys, event.saved.ttl_s)
            case "missing":
                self._stored.remove(self._store_ids(), event.missing.keys)
            case _:  # of a later version
                pass
