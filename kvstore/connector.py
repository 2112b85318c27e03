"""The KV connector interface: how KV blocks leave and enter an engine.

A connector has two halves, as in vLLM's KVConnectorBase_V1. The *scheduler
half* is pure bookkeeping: it decides what to look up, load and save, in plain
data. The *worker half* owns buffers and threads and moves the bytes. Between
them go only `ConnectorWork` (down, once per step) and `TransferResults` (up).

Who owns what:

- Blocks named in a `LoadJob` or `SaveJob` stay referenced in the engine's
  pool until the job's result comes back, whatever happens to the request. So
  a peer may read or write them at any time in between.
- The device is done with them: what a `SaveJob` names was computed by steps
  whose outputs the engine has, and no step in flight touches what a `LoadJob`
  names. So bytes may move beside the steps, without waiting for any. A
  connector that `saves_ahead` also gets jobs that name a step to come, and
  hears which layers of the blocks are computed (docs/adr/0024-saved-by-layer.md).
- Every job ends in exactly one result, within the connector's own deadline; but for a load to
  whose blocks something may still write, which is told of by then (`TransferResults.doubted`).
- Cancelling a load only makes its result come sooner.

There are two families. A *store* has copies of what was saved: the blocks are
free once the save's result is in. A *peer* lends the blocks themselves: the
save's result says `is_held`, and they stay referenced until `released` names
the job. What is lent belongs to a lease, whose time begins when it is offered:
when all that it is for is saved, and others are told. From then on whoever loads
renews it, and it ends when it is released or has run out.

Block lists are half-open prefixes: job item `i` moves `block_ids[i]` under
`keys[i]`. What they name are *transfer blocks*, as `kvstore.transfer_form` cuts
them out of the pool's: with `n` in each, pool block `b` has `b * n` to
`b * n + n - 1`. Where an engine's blocks go as they are, these are the pool's.
In how many objects the heads of a block go is the worker half's matter.

What a connector of its own is made from, and what it can do.

A third party names such an object in its package's metadata:

    [project.entry-points."baton.kv_connectors"]
    myscheme = "my_package.my_module:MyConnector"

A store needs none: see `kvstore.registry`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from kvstore.handoff import KvHandoff
from kvstore.layout import KvLayout
from kvstore.metrics import KvMetrics
from kvstore.transfer_form import WHOLE, HeadShare, TransferForm

__all__ = [
    "Connector",
    "ConnectorCapabilities",
    "ConnectorFactory",
    "ConnectorWork",
    "KvConnectorScheduler",
    "KvConnectorWorker",
    "LoadJob",
    "LoadResult",
    "LookupJob",
    "LookupResult",
    "SaveJob",
    "SaveResult",
    "TransferResults",
    "WorkBuffer",
]


@dataclass(frozen=True, slots=True)
class LookupJob:
    """Asks how many of these keys, from the first, can be loaded."""

    job_id: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill these blocks of the pool, converted to its type.

    Attributes:
        handoff: the terms under which a prefill engine offers them; None for
            what a look-up found.
    """

    job_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    handoff: KvHandoff | None = None


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Publish these blocks of the pool.

    Attributes:
        num_tail_tokens: valid tokens in the last block if it is a partial
            tail, whose other slots must not leave this process; 0 if all
            blocks are full.
        num_found: the first so many blocks were not computed for this job but
            found in the engine's cache: others may have saved them before.
        lease_id: the handoff that the blocks are saved for; empty if none.
        step: that computes what is missing of the blocks, and begins after the job; 0 if they
            are computed. Only full blocks are saved so.
    """

    job_id: int
    keys: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    num_tail_tokens: int = 0
    num_found: int = 0
    lease_id: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The first `num_blocks` keys of the look-up can be loaded now."""

    job_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The first `num_blocks` blocks hold verified bytes; the rest must not be read.

    `error` says why, where fewer than asked arrived: "missing", "corrupt",
    "unavailable", "cancelled", "failed". `seconds` is how long the bytes took to
    come, and says more than the time until the engine asks; 0 if nobody measured
    it. It is no part of what makes results equal.
    """

    job_id: int
    num_blocks: int
    error: str = ""
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Whether every block of the job can now be loaded by others.

    `is_held`: they are read where they lie, until `TransferResults.released` names the job.
    `error` says why it is not committed, where that is known, and `seconds` how long the
    save took: both as in `LoadResult`. For `waited` seconds more nobody was at it,
    as layers of its step were not computed.
    """

    job_id: int
    committed: bool
    is_held: bool = False
    error: str = ""
    seconds: float = field(default=0.0, compare=False)
    waited: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class ConnectorWork:
    """What the worker half shall start in this step.

    Attributes:
        kept: handoffs to others' blocks, whose leases are to be renewed until `dropped`.
        dropped: ids of handoffs of `kept`.
        offered: leases on own blocks whose handoffs are told: from now on they may run out.
        ended: leases on own blocks that nobody needs any longer. They never begin again.
    """

    lookups: tuple[LookupJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    cancelled_lookups: tuple[int, ...] = ()
    cancelled_loads: tuple[int, ...] = ()
    deletes: tuple[bytes, ...] = ()
    kept: tuple[KvHandoff, ...] = ()
    dropped: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class TransferResults:
    """What has ended since the last poll.

    Attributes:
        released: save jobs that were held, whose blocks nobody reads any more.
        doubted: load jobs that have failed, whose results come when nothing can write to their
            blocks any more, however long that is. Nobody should wait for one.
    """

    lookups: tuple[LookupResult, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    saves: tuple[SaveResult, ...] = ()
    released: tuple[int, ...] = ()
    doubted: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


@dataclass(slots=True)
class WorkBuffer:
    """Jobs gathered during one step, drained into a `ConnectorWork`."""

    lookups: list[LookupJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    cancelled_lookups: list[int] = field(default_factory=list)
    cancelled_loads: list[int] = field(default_factory=list)
    deletes: list[bytes] = field(default_factory=list)
    kept: list[KvHandoff] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    offered: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def drain(self) -> ConnectorWork:
        """Returns what was gathered and empties the buffer."""
        jobs = {name: getattr(self, name) for name in self.__slots__}
        work = ConnectorWork(**{name: tuple(items) for name, items in jobs.items()})
        for items in jobs.values():
            items.clear()
        return work


class KvConnectorScheduler(ABC):
    """The half beside the scheduler: pure, no I/O, no torch."""

    scheme: str
    """The URL scheme, as `KvHandoff.connector` names it."""
    finds_by_key: bool
    """Whether look-ups find what others saved; else only a handoff leads to blocks."""
    saves_ahead: bool = False
    """Whether it has `save_ahead`."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> int:
        """Schedules a look-up; returns its job id."""

    @abstractmethod
    def num_found(self, job_id: int) -> int | None:
        """How many leading keys a look-up found; None means ask again next step."""

    @abstractmethod
    def forget_lookup(self, job_id: int) -> None:
        """Drops a look-up, answered or open. Exactly once for each."""

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], handoff: KvHandoff | None = None
    ) -> int:
        """Schedules a load; returns its job id. The blocks stay until its result.

        Args:
            keys: of the blocks to load.
            block_ids: where to.
            handoff: see `LoadJob`.
        """

    @abstractmethod
    def cancel_load(self, job_id: int) -> None:
        """The load's bytes are no longer wanted. Its result still comes."""

    @abstractmethod
    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        *,
        num_found: int = 0,
        lease_id: str = "",
    ) -> int:
        """Schedules a save; returns its job id. The blocks stay until its result, and
        where that says so until they are released. See `SaveJob` for the arguments.
        """

    def save_ahead(
        self, keys: Sequence[bytes], block_ids: Sequence[int], step: int, *, lease_id: str = ""
    ) -> int:
        """As `save`, of full blocks that a step computes which begins after the job: what is
        computed of them is saved meanwhile. Only where the connector `saves_ahead`.
        """
        raise NotImplementedError

    @abstractmethod
    def make_handoff(
        self,
        handoff_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
        kv_form: str = "",
    ) -> KvHandoff:
        """The handoff for blocks of a prompt that are saved, or some of them."""

    @abstractmethod
    def keep(self, handoff: KvHandoff) -> None:
        """A request waits to load what others offer: its lease is to be renewed."""

    @abstractmethod
    def drop(self, handoff_id: str) -> None:
        """Ends `keep`: what the request needed is loaded, or nobody waits any more."""

    def offer(self, lease_id: str) -> None:  # noqa: B027 - who lends nothing may do nothing
        """A handoff is told, all of whose saves have ended: its lease may run out from now on."""

    @abstractmethod
    def end_lease(self, lease_id: str) -> None:
        """Nobody needs any longer what was saved for a handoff alone. Unknown ids are fine.

        One of this and `offer` is owed for each lease that something was saved for.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Schedules the removal of blocks that nobody must load any more."""

    @abstractmethod
    def build_work(self) -> ConnectorWork:
        """What this step must start; empties the buffer."""

    @abstractmethod
    def update(self, results: TransferResults) -> TransferResults:
        """Takes in what the worker half reports; called before the scheduler handles it.

        Returns:
            What the scheduler shall handle: where one job became several, their results in one.
        """


class KvConnectorWorker(ABC):
    """The half beside the model runner: buffers, threads, bytes."""

    @abstractmethod
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: HeadShare = WHOLE,
    ) -> None:
        """Hands over the KV pool tensor `[num_blocks, *layout.block_shape]`.

        Called once, before `start`.

        Args:
            pool: the tensor.
            layout: of its blocks.
            form: in which blocks come and go; None: as they are in the pool. `BlockSlicing.of`
                tells what that means for this pool.
            share: which of the model's KV heads the pool has.

        Raises:
            ConfigurationError: the pool cannot be cut so; names the flag.
        """

    @abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called, from any thread, when `poll` has news."""

    def measure(self, metrics: KvMetrics, backend: str) -> None:  # noqa: B027 - may do nothing
        """Counts what the backend does from now on, for Prometheus.

        Called once, before `start`. The engine counts jobs by itself.

        Args:
            metrics: where to count.
            backend: what to call it there; a connector of several adds to the name.
        """

    @abstractmethod
    def start(self, work: ConnectorWork) -> None:
        """Starts jobs; returns without waiting for them. Engine thread only.

        Called while steps may be in flight, but not those that computed the saved blocks; see
        `SaveJob.step` for the exception.
        """

    def layers_computed(self, step: int, num_layers: int) -> None:  # noqa: B027 - may do nothing
        """The first `num_layers` layers of what a step computes lie in its blocks.

        The engine's thread tells it in the midst of the step. Not told of all layers, nor of all
        steps: `step_ended` makes up for it.
        """

    def step_ended(self, step: int, *, computed: bool) -> None:  # noqa: B027 - may do nothing
        """A step is over that saves may wait for. Engine thread only.

        Args:
            step: its number.
            computed: whether it left in its blocks what it should have; else what is not
                saved yet must not be.
        """

    @abstractmethod
    def poll(self) -> TransferResults:
        """What has ended since the last call. Engine thread only; does not block."""

    @abstractmethod
    def close(self) -> None:
        """Stops threads and closes the backend; jobs under way are given up. Idempotent."""


Connector = tuple[KvConnectorScheduler, KvConnectorWorker]
"""Both halves."""


@dataclass(frozen=True, slots=True)
class ConnectorCapabilities:
    """What a connector can do, declared and not guessed.

    Attributes:
        shared_between_processes: what one process of a host saves, others that
            open the same URL can load.
        shared_between_hosts: so can processes of other hosts.
        finds_by_key: look-ups find what others saved; else only a handoff leads to blocks.
        keeps_leases: what a handoff names stays until its lease ends; else it may be evicted.
        lends_blocks: what is saved stays in the engine's pool until its lease ends.
    """

    shared_between_processes: bool
    shared_between_hosts: bool
    finds_by_key: bool = True
    keeps_leases: bool = False
    lends_blocks: bool = False


@runtime_checkable
class ConnectorFactory(Protocol):
    """Opens a connector. A class with a class method `open` is one, and so is a module."""

    @property
    def capabilities(self) -> ConnectorCapabilities:
        """What its connectors can do. A plain attribute will do."""

    def open(self, url: str) -> Connector:
        """Opens both halves. That others are not there yet is no reason to fail.

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """
