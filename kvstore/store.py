"""`KvStore`: what a backend must do to hold KV blocks.

A store keeps immutable byte objects under 32-byte keys. It knows nothing of
models or digests: the codec (`kvstore.codec`) frames and verifies. A new
store is one small class; `kvstore.conformance` tests it.

Contract, tested by the conformance suite:

- An object becomes visible whole or not at all (atomic commit), and never
  changes: putting a key that exists keeps the old object and succeeds.
- Objects live `ttl_s` from their last touch unless evicted, and are not
  returned long after. Puts (of existing keys too), gets that hit and keys that
  `contains_prefix` counts are touches: what a look-up promised can be loaded.
  What expired is not touched: nothing brings it back but a put.
- Memory or disk is bounded by `max_bytes`: the least recently touched go first.
- Where leases are kept, eviction takes no object within `lease_s` of its last
  touch. A put that only leased objects could make room for fails, and nothing
  is evicted for it. Expiry and `delete` know no leases.
- Every method is safe to call from several threads at once and ends within
  `timeout_s`, with `StoreUnavailableError` if the backend does not answer.
  Nothing else escapes: what is absent is a result, not an error.
- `KvStore.timeout_s` is the URL's: who calls tells by it that calls hang.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Self

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Frame",
    "GetStatus",
    "KvStore",
    "StoreCapabilities",
    "StoreStats",
    "StoreUnavailableError",
]


DEFAULT_TIMEOUT_S = 2.0
"""`KvStore.timeout_s`, where the URL does not say."""


Frame = tuple[memoryview, memoryview]
"""An object in two parts, wherever each lies: its bytes are those of the first, then the second."""


class StoreUnavailableError(Exception):
    """The backend did not answer in time or refused; nothing was returned."""


class GetStatus(IntEnum):
    """What became of one key of `get_many_into`; the buffer's content is undefined if no hit."""

    HIT = 0
    MISSING = 1
    WRONG_SIZE = 2
    """The object's size is not the buffer's."""


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a backend can do, declared and not guessed.

    Attributes:
        shared_between_processes: processes of one host that open the same URL
            see each other's objects.
        shared_between_hosts: so do processes of different hosts.
        survives_restart: objects outlive a restart of what holds them: the
            machine or the server, as configured by default.
        takes_max_bytes: the URL's `max_bytes` bounds the store; otherwise the
            backend is bounded by its own configuration.
        keeps_leases: eviction spares what was touched within `lease_s`, an option of the URL.
        takes_frames: `put_frames` and `get_frames_into` move objects in two parts.
    """

    shared_between_processes: bool
    shared_between_hosts: bool
    survives_restart: bool
    takes_max_bytes: bool
    keeps_leases: bool = False
    takes_frames: bool = False


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of one store object since it was opened, and the store's size and age.

    None stands for what the backend cannot tell cheaply.

    Attributes:
        puts: keys given to `put_many` and `put_frames`, those that existed too.
        gets: keys asked of `get_many_into` and `get_frames_into`.
        hits: of them, those that were found with the right size.
        put_bytes: of all puts.
        get_bytes: of all hits.
        num_objects: that the store holds, whoever put them.
        num_bytes: of them.
        oldest_age_s: seconds since the least recently touched object was touched. A store
            that only learns it now and then tells what it last saw.
        evictions: objects that this store object removed to make room.
        expirations: objects that it removed because their TTL was over.
    """

    puts: int
    gets: int
    hits: int
    put_bytes: int
    get_bytes: int
    num_objects: int | None
    num_bytes: int | None
    oldest_age_s: float | None = None
    evictions: int | None = None
    expirations: int | None = None


class KvStore(ABC):
    """A backend for KV blocks. See the module's contract.

    Attributes:
        capabilities: what the backend can do.
        ttl_s: seconds that an object lives from its last touch.
        lease_s: of them, those in which it is not evicted; 0 where no leases are kept.
        timeout_s: longest that a call waits for the backend.
    """

    capabilities: ClassVar[StoreCapabilities]
    ttl_s: float
    lease_s: float = 0.0
    timeout_s: float = DEFAULT_TIMEOUT_S

    @classmethod
    @abstractmethod
    def from_url(cls, url: str) -> Self:
        """Opens the backend that a URL names; `kvstore.url` helps to read it.

        Every store takes the options `ttl_s` and `timeout_s`, and `lease_s` if it
        keeps leases. A backend that is down is no reason to fail here: the methods
        will say so.

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """

    @abstractmethod
    def put_many(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> None:
        """Stores each value under its key, batched or pipelined.

        The values may be reused by the caller once this returns. On an error
        any subset may have been stored, each of them whole.

        Raises:
            StoreUnavailableError: the backend did not answer, or is full of what
                it must not evict.
        """

    @abstractmethod
    def get_many_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[GetStatus]:
        """Reads each object into its preallocated writable buffer of the same size.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    def put_frames(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> None:
        """As `put_many`, of objects in two parts. Only of stores with `takes_frames`.

        Once it returns or raises, nothing reads the parts: they may be memory that changes.
        """
        raise NotImplementedError

    def get_frames_into(self, keys: Sequence[bytes], frames: Sequence[Frame]) -> list[GetStatus]:
        """As `get_many_into`, with two buffers for each object, together as long as it is. Only
        of stores with `takes_frames`.

        Once it returns or raises, nothing writes to the parts: they may be memory of others.
        """
        raise NotImplementedError

    @abstractmethod
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """How many leading keys exist: the index of the first missing one.

        One call to the backend, whatever the number of keys. Touches the keys
        it counts: each lives `ttl_s` from now, and others are evicted first.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many existed.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Counters, size and age. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and mappings. The objects stay. Idempotent."""
