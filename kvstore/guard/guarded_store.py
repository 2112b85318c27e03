"""`GuardedStore`: a store behind breakers."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvstore.guard.breaker import Breaker, NotAskedError
from kvstore.guard.metrics import BreakersOfDirections
from kvstore.guard.outage_log import OutageLog
from kvstore.guard.status import BackendStatus
from kvstore.store import GetStatus, KvObject, KvStore, StoreUnavailableError, unused_key

__all__ = ["GuardedStore"]

_SMALL_BYTES = 64

_Result = TypeVar("_Result")


class GuardedStore:
    """Passes calls on to a store while it answers. Any thread may call all methods.

    There is one breaker for reads, one for puts and one for deletions: a full store still serves
    what it has, and corrupt objects must be deleted from it. A store that answers no reads gets no
    puts either, so that a request waits for one call and not for one of each kind.

    Args:
        store: the store.
        name: its URL without secrets, for logs and errors.
        clock: seconds, for the breakers.

    Attributes:
        store: see above.
        name: see above.
        on_open: called when a breaker may have opened.
    """

    def __init__(
        self, store: KvStore, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self.name = name
        self.on_open: Callable[[], None] = lambda: None
        log = OutageLog(name, clock)
        self._reads = Breaker(name, clock, log=log)
        self._puts = Breaker(name, clock, log=log, problem="takes no blocks")
        self._deletions = Breaker(name, clock, log=log, problem="deletes no blocks")
        self._breakers = (self._reads, self._puts, self._deletions)
        # Sizes of objects in calls that failed, which probes repeat.
        self._get_bytes, self._put_bytes = 0, _SMALL_BYTES

    # Calls.

    def num_held(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading keys the store holds, unless the breaker of reads is open."""
        return self._call(
            self._reads, lambda: self.store.contains_prefix(keys), on_failure=self.open_reads
        )

    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Reads objects from the store, unless the breaker of reads is open."""

        def note(error: StoreUnavailableError) -> None:
            self._get_bytes = objects[0].nbytes
            self.open_reads(error)

        return self._call(self._reads, lambda: self.store.get_into(keys, objects), on_failure=note)

    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Puts objects into the store, unless the breaker of puts is open."""

        def note(_: StoreUnavailableError) -> None:
            self._put_bytes = objects[0].nbytes
            self.on_open()

        self._call(self._puts, lambda: self.store.put(keys, objects), on_failure=note)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes objects from the store, unless the breaker of deletions is open."""
        return self._call(
            self._deletions, lambda: self.store.delete(keys), on_failure=lambda _: self.on_open()
        )

    def open_reads(self, error: StoreUnavailableError) -> None:
        """Makes reads and puts fail: the store answers no reads."""
        self._reads.open(error)
        self.open_puts(error)

    def open_puts(self, error: StoreUnavailableError) -> None:
        """Makes puts fail."""
        self._puts.open(error)
        self.on_open()

    def _call(
        self,
        breaker: Breaker,
        call: Callable[[], _Result],
        on_failure: Callable[[StoreUnavailableError], None],
    ) -> _Result:
        """Makes a call, unless the breaker is open; `on_failure` gets the error of one made."""
        try:
            return breaker.call(call)
        except NotAskedError:
            raise
        except StoreUnavailableError as error:
            on_failure(error)
            raise

    # State.

    @property
    def answers(self) -> bool:
        """Whether it is asked what it holds."""
        return not self._reads.is_open

    @property
    def breakers(self) -> BreakersOfDirections:
        """The breakers' state, for Prometheus."""
        return (
            ("load", self._reads.counts),
            ("save", self._puts.counts),
            ("save", self._deletions.counts),
        )

    def status(self, identity: str = "") -> BackendStatus:
        """Returns whether blocks can be loaded and saved."""
        problems = [
            f"{breaker.problem}: {breaker.error}" for breaker in self._breakers if breaker.is_open
        ]
        problem = next(iter([*problems, *self.store.failing_servers]), "")
        can_load, can_save = self.answers, not self._puts.is_open
        return BackendStatus(self.name, identity, can_load, can_save, problem)

    # Probes.

    def probe_apart_from_calls(self) -> None:
        """From now on `probe_due` alone finds out whether a store that failed works again."""
        for breaker in self._breakers:
            breaker.probes_with_calls = False

    def probe_due(self) -> float | None:
        """Repeats what has failed, with keys that nothing else has and objects of the same size.

        Returns:
            Seconds until it is to be called again; None while all breakers are closed.
        """
        probes = (self._probe_reads, self._probe_puts, self._probe_deletions)
        for breaker, probe in zip(self._breakers, probes, strict=True):
            if breaker.due_in_s == 0 and not breaker.is_full:
                with suppress(StoreUnavailableError):
                    breaker.probe(probe)
        times = [breaker.due_in_s for breaker in self._breakers if not breaker.is_full]
        times.append(self.store.probe_servers())
        return min((due_s for due_s in times if due_s is not None), default=None)

    def check(self) -> None:
        """Finds out whether each server of the store answers, and whether one that was full has
        room.
        """
        with suppress(StoreUnavailableError):
            self._call(self._reads, self._look_everywhere, on_failure=self.open_reads)
            if self._puts.is_full:
                self._puts.probe(self._probe_puts)

    def _look_everywhere(self) -> None:
        self.store.contains_prefix(list(self.store.diagnosis.new_keys().values()))

    def _probe_reads(self) -> None:
        key = unused_key()
        self.store.contains_prefix([key])
        if self._get_bytes:
            self.store.get_into([key], [_object(self._get_bytes)])

    def _probe_puts(self) -> None:
        key = unused_key()
        self.store.put([key], [_object(self._put_bytes)])
        with suppress(StoreUnavailableError):
            self.store.delete([key])

    def _probe_deletions(self) -> None:
        self.store.delete([unused_key()])


def _object(num_bytes: int) -> KvObject:
    return KvObject.split(memoryview(bytearray(num_bytes)), 0)
