"""`KvStore`: what a backend must do to hold KV blocks. `KvObject`: an object in memory.

A store keeps immutable byte objects under 32-byte keys. It does not interpret
them: the codec (`kvstore.codec`) adds a header to each block and verifies it. A
new store is one small class; `kvstore.conformance` tests it.

Contract, tested by the conformance suite:

- An object becomes visible whole or not at all (atomic commit), and never
  changes: putting a key that exists keeps the old object and succeeds.
- Objects live `ttl_s` from their last touch unless evicted, and are not
  returned long after. These are touches: a put (also of a key that exists), a
  get that hits, and being counted by `contains_prefix`, so that what a look-up
  found can be loaded. An expired object is not touched: only a put brings the
  key back.
- `max_bytes` bounds memory or disk: the least recently touched objects are
  evicted first. Only puts evict; opening a store does not.
- Where leases are kept, eviction takes no object within `lease_s` of its last
  touch. If a put would need the room of leased objects, it fails and nothing is
  evicted for it. Expiry and `delete` ignore leases.
- Every method may be called from several threads at once and ends within
  `timeout_s`; it raises `StoreUnavailableError` if the backend does not answer.
  No other exception escapes: an absent object is a result, not an error.
- If some of a backend's servers do not answer, their objects count as absent, and the calls that
  need only these raise `PartlyUnavailableError`.
- `KvStore.timeout_s` is the URL's; callers use it to detect calls that hang.
- Once a call has returned or raised, the store neither reads nor writes the
  memory that it was given: the payloads may be blocks of a KV pool.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple, Self

from kvstore.block_key import KEY_BYTES

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "GetStatus",
    "KvObject",
    "KvStore",
    "PartlyUnavailableError",
    "StoreCapabilities",
    "StoreDiagnosis",
    "StoreFullError",
    "StoreStats",
    "StoreUnavailableError",
    "unused_key",
]

DEFAULT_TIMEOUT_S = 2.0
"""`KvStore.timeout_s` where the URL names none."""


def unused_key() -> bytes:
    """A random key, which no object has."""
    return secrets.token_bytes(KEY_BYTES)


class StoreDiagnosis:
    """Answers for a store of one server that can be written to without harm.

    Stores for which that is not true override it.
    """

    def new_keys(self) -> Mapping[str, bytes]:
        """Returns unused keys that together reach every server of the store, by its name.

        Raises:
            StoreUnavailableError: the store does not know its servers.
        """
        return {"": unused_key()}

    def has_room(self, key: bytes, num_bytes: int) -> bool:
        """Whether a key's server can take that much without evicting anything.

        Raises:
            StoreUnavailableError: the server does not answer.
        """
        return True

    def rehearse_put(self, key: bytes, num_bytes: int) -> None:
        """Sends a server what a put of an object sends, so that it stores nothing.

        Called where `has_room` is false.

        Raises:
            StoreUnavailableError: the server refuses it.
        """

    def remarks(self) -> Sequence[str]:
        """Returns refusals of servers within calls that succeeded nevertheless."""
        return ()


class KvObject(NamedTuple):
    """Views of the bytes of one object in memory: those of the header, then those of the payload.

        in a staging segment   | header | payload |     one run of bytes
        in a KV pool           | header |  | payload |  the payload is a block of the pool

    Where an object is split is not stored: it may be read into views of other sizes with the
    same total.

    Attributes:
        header: contiguous bytes; may be empty.
        payload: contiguous bytes; may be empty.
    """

    header: memoryview
    payload: memoryview

    @classmethod
    def split(cls, memory: memoryview, num_header_bytes: int) -> Self:
        """Views one run of bytes as an object; a short run has a short header and no payload."""
        return cls(memory[:num_header_bytes], memory[num_header_bytes:])

    @property
    def nbytes(self) -> int:
        """Bytes of header and payload together."""
        return self.header.nbytes + self.payload.nbytes

    def to_bytes(self) -> bytes:
        """Returns a copy of all bytes."""
        return b"".join(self)

    def fill(self, value: bytes | bytearray) -> None:
        """Overwrites header and payload with a value of `nbytes` bytes."""
        self.header[:] = value[: len(self.header)]
        self.payload[:] = value[len(self.header) :]


class StoreUnavailableError(Exception):
    """The backend did not answer in time or refused; nothing was returned.

    Attributes:
        is_logged: whether the log has a line about the outage that it belongs to.
    """

    is_logged = False


class StoreFullError(StoreUnavailableError):
    """A put found no room: the backend answers, and has room again when a lease ends."""


class PartlyUnavailableError(StoreUnavailableError):
    """Some of the backend's servers did not answer, and the others did what they could.

    The store itself leaves those servers alone for a while, and has logged it.
    """

    is_logged = True


class GetStatus(IntEnum):
    """The result of `get_into` for one key. Unless it is HIT, the memory's content is undefined.

    WRONG_SIZE: the store has an object of another size than the memory.
    """

    HIT = 0
    MISSING = 1
    WRONG_SIZE = 2


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """Capabilities of a kind of store.

    Attributes:
        shared_between_processes: processes of one host that open the same URL
            see each other's objects.
        shared_between_hosts: processes of different hosts do, too.
        survives_restart: objects outlive a restart of the machine or server that
            holds them, as configured by default.
        takes_max_bytes: the URL's `max_bytes` bounds the store; otherwise the
            backend is bounded by its own configuration.
        keeps_leases: eviction spares objects touched within `lease_s`, an option of the URL.
    """

    shared_between_processes: bool
    shared_between_hosts: bool
    survives_restart: bool
    takes_max_bytes: bool
    keeps_leases: bool = False


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of one store instance since it was opened, and the store's size and age.

    A field is None if the backend cannot find it out cheaply.

    Attributes:
        puts: keys passed to `put`, including those that existed.
        gets: keys passed to `get_into`.
        hits: keys of them that were found with the right size.
        put_bytes: bytes of all puts.
        get_bytes: bytes of all hits.
        num_objects: objects in the store, of all its users.
        num_bytes: bytes of these objects.
        oldest_age_s: seconds since the least recently touched object was touched. A store
            that lists its objects only now and then reports the age as of the last listing.
        evictions: objects that this instance removed to make room.
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
    """A backend for KV blocks. The module's docstring is the contract.

    Attributes:
        capabilities: what this kind of store can do.
        ttl_s: seconds that an object lives from its last touch.
        lease_s: seconds from its last touch in which it is not evicted; 0 without leases.
        timeout_s: longest that a call waits for the backend.
    """

    capabilities: ClassVar[StoreCapabilities]
    ttl_s: float
    lease_s: float = 0.0
    timeout_s: float = DEFAULT_TIMEOUT_S

    @classmethod
    def memory_bytes(cls, url: str) -> int:
        """Returns how much of the memory of this machine the objects of a store may take; 0 if they
        lie elsewhere. Does not open the store.

        Raises:
            ConfigurationError: the URL is malformed, or an option out of range.
        """
        return 0

    @classmethod
    @abstractmethod
    def from_url(cls, url: str) -> Self:
        """Opens the backend that a URL names; `kvstore.url` helps to parse it.

        Every store takes the options `ttl_s` and `timeout_s`, and `lease_s` if it
        keeps leases. Opening does not fail because the backend is down or cannot
        be opened now, such as a file on a disk that is read-only: the methods
        raise then, and work as soon as the backend does
        (`kvstore.stores.opening` helps).

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """

    @classmethod
    def open_for_diagnosis(cls, url: str) -> Self:
        """Opens a store to find out whether it works, without a change to what is in it.

        A put evicts nothing then, and nothing is removed because its TTL is over: the URL of a
        diagnosis may have other options than that of the workers. Stores that remove objects
        themselves override this.

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """
        return cls.from_url(url)

    @abstractmethod
    def put(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> None:
        """Stores each object under its key, batched or pipelined.

        The objects are not written to. After an error any subset of them may be stored, each
        of them whole.

        Raises:
            StoreUnavailableError: the backend did not answer, or is full of leased objects.
        """

    @abstractmethod
    def get_into(self, keys: Sequence[bytes], objects: Sequence[KvObject]) -> list[GetStatus]:
        """Reads each key's object into writable memory of the same size.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    @abstractmethod
    def contains_prefix(self, keys: Sequence[bytes]) -> int:
        """Returns the number of leading keys the store holds.

        One call to the backend, whatever the number of keys. Touches the keys
        that it counts.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Removes objects; returns how many existed.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """

    def identity(self) -> str:
        """Returns a text that identifies this store among others of its kind: all processes that
        see the same objects get the same text, which the first of them writes into the store.

        Empty if that is unknown, for example because the store is empty and cannot be written to.

        Raises:
            StoreUnavailableError: the backend did not answer.
        """
        return ""

    def probe_servers(self) -> float | None:
        """Asks the servers that did not answer whether they do again. From the first call on, no
        other method asks them, so that no caller waits for them.

        Returns:
            Seconds until the next call is due; None if all servers answer.
        """
        return None

    @property
    def failing_servers(self) -> Sequence[str]:
        """Names those servers of several that do not answer, each with the reason."""
        return ()

    @property
    def diagnosis(self) -> StoreDiagnosis:
        """Findings for `baton doctor` that no other method returns."""
        return StoreDiagnosis()

    @abstractmethod
    def stats(self) -> StoreStats:
        """Returns counters, size and age. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections and mappings. The objects stay. Idempotent."""
