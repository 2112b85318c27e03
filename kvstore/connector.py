"""The KV connector contract: how KV blocks leave and enter an engine.

A connector has two halves, as in vLLM's KVConnectorBase_V1:

- `KvConnectorScheduler` runs beside the engine's scheduler. It does bookkeeping on plain data:
  it numbers jobs and gathers them. The class is complete; most connectors use it as it is.
- `KvConnectorWorker` runs beside the model runner. It owns buffers and threads and moves the
  bytes. A connector's author writes this half.

In each step the engine passes one `ConnectorWork` from the scheduler half to the worker half, and
one `TransferResults` back. Nothing else passes between them. `kvstore.jobs` defines both.

Life of a block:

1. A prefill engine computes blocks of a prompt and calls `save`. The worker half copies the
   blocks to a store, or lends them where they lie.
2. When all blocks of the prompt are saved, the engine calls `make_handoff`, sends the handoff to
   a decode engine and calls `offer`.
3. The decode engine calls `keep` when it receives the handoff, `load` when it has free blocks for
   the KV, and `drop` when the KV is in its pool. An engine may also call `lookup` with the keys
   of a prompt, and load what that finds without a handoff.
4. The prefill engine calls `end_lease` when the handoff is over.

There are two families of connectors. A *store* keeps copies: the saved blocks are free again when
the save's result is in. A *peer* lends the blocks themselves: the save's result has `is_held`,
and the blocks stay as they are until `TransferResults.released` names the job.

Rules for the engine:

- Blocks that a `LoadJob` or a `SaveJob` names stay referenced in the pool until the job's result
  is in, even if the request ends before. So bytes may move at any time in between.
- The device has finished with these blocks: a `SaveJob` names blocks that completed steps have
  computed, and no step in flight touches the blocks of a `LoadJob`. So bytes may move while steps
  run, without waiting for one. The exception are connectors with `saves_ahead`: their jobs may
  name a step to come (`SaveJob.step`), and the engine reports which layers of it are computed
  (docs/adr/0024-saved-by-layer.md).
- For each lease that blocks were saved under, the engine calls either `offer` or `end_lease`.

Rules for the connector:

- Each job has exactly one result, which comes within the connector's own deadline. The exception
  is a load to whose blocks something may still write: `TransferResults.doubted` names it within
  the deadline, and its result comes when nothing writes any more.
- The connector calls the engine's `wake` for each result, from any thread.
- A load's result counts leading blocks with verified bytes. Nothing writes to the job's blocks
  after it.
- A cancelled load ends sooner if that is possible; its result comes nevertheless.
- The slots behind the valid tokens of a partial tail never leave the process.
- Lent blocks belong to a lease, whose id is the handoff's. Its time begins with `offer`. Engines
  that have the handoff renew it between `keep` and `drop`. It ends with `end_lease` or when its
  time is over. No block is read after that, and an ended lease never begins again.

Blocks and keys: job item `i` moves block `block_ids[i]` under `keys[i]`. Block ids are those of
*transfer blocks* (`kvstore.transfer_form`). If the pool's blocks are cut into `n` transfer blocks
each, pool block `b` holds the transfer blocks `b * n` to `b * n + n - 1`; with `n` = 1, transfer
blocks are the pool's blocks. The worker half alone decides in how many objects it stores a block.

An installed package adds a connector by naming a `ConnectorFactory` in its metadata:

    [project.entry-points."baton.kv_connectors"]
    myscheme = "my_package.my_module:MyConnector"

Then `--kv-connector myscheme://...` opens it. A backend that keeps objects by key needs no
connector of its own: it is a store (`kvstore.store`). docs/connector-contract.md shows both in
full, and `kvstore.conformance` tests them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from kvstore.connector_scheduler import KvConnectorScheduler, SavedSlices
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.jobs import (
    MISSING,
    ConnectorWork,
    LoadResult,
    LookupResult,
    SaveResult,
    TransferResults,
)
from kvstore.layout import KvLayout
from kvstore.transfer_form import WHOLE, PoolShare, TransferForm

__all__ = [
    "Connector",
    "ConnectorCapabilities",
    "ConnectorFactory",
    "KvConnectorScheduler",
    "KvConnectorWorker",
    "SavedSlices",
    "null_connector",
]


class KvConnectorWorker(ABC):
    """The half beside the model runner: owns buffers and threads, and moves the bytes.

    The engine's thread calls all methods. The order is `measure`, `register_pool`, `set_waker`,
    then `start` and `poll` in any order, then `close`.
    """

    @abstractmethod
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        """Receives the KV pool. Called once, before the first job.

        Args:
            pool: the tensor `[num_blocks, *layout.block_shape]`. If `form` has states, the slots
                for these lie in further blocks behind `share.num_blocks` blocks for tokens.
            layout: the shape and type of the pool's blocks.
            form: how blocks look between engines; None if they look as in the pool.
                `kvstore.transfer_form.BlockSlicing.of` computes how the pool is cut for it.
            share: which of the model's KV heads and layers the pool has.

        Raises:
            ConfigurationError: the pool cannot be cut that way; names the flag.
        """

    @abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """Receives the function to call, from any thread, when `poll` has new results."""

    def measure(self, metrics: KvMetrics, backend: str) -> None:  # noqa: B027 - optional
        """Counts the backend's calls from now on, for Prometheus. Called at most once.

        The engine counts jobs itself.

        Args:
            metrics: where to count.
            backend: the connector's name there. A connector of several uses one name for each.
        """

    def watch(self) -> None:  # noqa: B027 - optional
        """Finds out from now on, apart from jobs, whether the backend works. Called at most once,
        by an engine, after `set_waker`.
        """

    @property
    def statuses(self) -> Sequence[BackendStatus]:
        """Whether blocks can be loaded from each backend and saved to it. Any thread reads it."""
        return ()

    @abstractmethod
    def start(self, work: ConnectorWork) -> None:
        """Starts jobs; returns without waiting for them. `work` is not empty.

        Steps may be in flight, but not those that computed the blocks to save, except for jobs
        with a `SaveJob.step`.
        """

    def layers_computed(self, step: int, num_layers: int) -> None:  # noqa: B027 - optional
        """The first `num_layers` layers of a step's blocks are computed.

        Called while the step runs. The engine may leave out layers, and whole steps:
        `step_ended` is what a save can rely on.
        """

    def step_ended(self, step: int, *, computed: bool) -> None:  # noqa: B027 - optional
        """A step that saves may wait for is over.

        Args:
            step: its number.
            computed: whether the step's blocks hold what they should. If not, the layers that
                are not saved yet must not be saved.
        """

    @abstractmethod
    def poll(self) -> TransferResults:
        """Returns the transfers that have ended since the last call. Must not block."""

    @abstractmethod
    def close(self) -> None:
        """Stops threads, closes the backend and gives up unfinished jobs. Idempotent."""


Connector = tuple[KvConnectorScheduler, KvConnectorWorker]
"""Both halves."""


@dataclass(frozen=True, slots=True)
class ConnectorCapabilities:
    """Capabilities of a connector. It declares them, and the conformance suite tests them.

    Attributes:
        shared_between_processes: processes of one host that open the same URL can load what one
            of them saves.
        shared_between_hosts: processes of other hosts can, too.
        finds_by_key: look-ups find what others saved; else only a handoff leads to blocks.
        keeps_leases: the blocks of a handoff stay until its lease ends; else they may be evicted.
        lends_blocks: saved blocks stay in the engine's pool until their lease ends.
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
        """The capabilities of its connectors. A plain attribute fulfils this."""

    def open(self, url: str) -> Connector:
        """Opens both halves. Must not fail because a server or peer is unreachable.

        Raises:
            ConfigurationError: the URL is wrong; names the option.
        """


def null_connector() -> Connector:
    """Returns the connector of an engine that has none: it saves nothing and finds nothing.

    Look-ups find 0 blocks, loads bring none, and saves are not committed.
    """
    return KvConnectorScheduler("", lease_s=0, finds_by_key=False), _NullWorker()


_NO_RESULTS = TransferResults()


class _NullWorker(KvConnectorWorker):
    """Ends every job at the next poll, and moves nothing."""

    def __init__(self) -> None:
        self._results = _NO_RESULTS
        self._wake: Callable[[], None] = lambda: None

    @override
    def register_pool(
        self,
        pool: Any,
        layout: KvLayout,
        form: TransferForm | None = None,
        share: PoolShare = WHOLE,
    ) -> None:
        pass

    @override
    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    @override
    def start(self, work: ConnectorWork) -> None:
        before = self._results
        lookups = (LookupResult(job.job_id, 0) for job in work.lookups)
        loads = (LoadResult(job.job_id, 0, MISSING) for job in work.loads)
        saves = (SaveResult(job.job_id, committed=False) for job in work.saves)
        self._results = TransferResults(
            (*before.lookups, *lookups), (*before.loads, *loads), (*before.saves, *saves)
        )
        if self._results:
            self._wake()

    @override
    def poll(self) -> TransferResults:
        results, self._results = self._results, _NO_RESULTS
        return results

    @override
    def close(self) -> None:
        pass
