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

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override

from kvstore.codec import DIGEST_SCHEME
from kvstore.guard.metrics import KvMetrics
from kvstore.guard.status import BackendStatus
from kvstore.handoff import KvHandoff
from kvstore.jobs import (
    ConnectorWork,
    LoadJob,
    LoadResult,
    LookupJob,
    LookupResult,
    SaveJob,
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


@dataclass(frozen=True, slots=True)
class SavedSlices:
    """The slices of each block that one rank of an engine saves.

    Attributes:
        params: `KvConnectorScheduler.params` of the rank's process.
        slices: numbers of the slices; see `kvstore.transfer_form.BlockSlicing.slice_numbers`.
    """

    params: bytes
    slices: tuple[int, ...]


class KvConnectorScheduler:
    """The half beside the engine's scheduler: numbers jobs and gathers them. No I/O, no torch.

    Stores and peers use it as it is. A connector over several others overrides it.

    Args:
        scheme: the connector's name, which both tiers must share. Handoffs carry it.
        lease_s: seconds that the blocks of a handoff can be loaded after `offer`, or after the
            last renewal.
        finds_by_key: whether `lookup` finds blocks that other engines saved. If not, only a
            handoff leads to blocks.
        params: what a reader must know about this process; every handoff carries it.
        saves_ahead: whether the worker half takes jobs of steps to come (`save_ahead`).

    Attributes:
        scheme: see above.
        finds_by_key: see above.
        params: see above.
        saves_ahead: see above.
    """

    def __init__(
        self,
        scheme: str,
        *,
        lease_s: float,
        finds_by_key: bool = True,
        params: bytes = b"",
        saves_ahead: bool = False,
    ) -> None:
        self.scheme = scheme
        self.finds_by_key = finds_by_key
        self.saves_ahead = saves_ahead
        self._lease_ms = int(lease_s * 1000)
        self.params = params
        self._work = ConnectorWork()
        self._job_ids = itertools.count()
        # Look-ups by job: None while open, else the number of blocks that were found.
        self._found: dict[int, int | None] = {}

    # Look-ups.

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Schedules a look-up; returns its job id."""
        job = LookupJob(next(self._job_ids), tuple(keys))
        self._work.lookups.append(job)
        self._found[job.job_id] = None
        return job.job_id

    def num_found(self, job_id: int) -> int | None:
        """Returns how many leading keys a look-up found; None while it has no answer."""
        return self._found[job_id]

    def forget_lookup(self, job_id: int) -> None:
        """Drops a look-up, answered or open. The engine calls it exactly once for each."""
        if self._found.pop(job_id) is None:
            self._work.cancelled_lookups.append(job_id)

    # Loads.

    def load(
        self, keys: Sequence[bytes], block_ids: Sequence[int], handoff: KvHandoff | None = None
    ) -> int:
        """Schedules a load; returns its job id.

        Args:
            keys: one per block to load.
            block_ids: the blocks to write to. They stay referenced until the result is in.
            handoff: the terms under which the blocks are offered; None if a look-up found them.
        """
        job = LoadJob(next(self._job_ids), tuple(keys), tuple(block_ids), handoff)
        self._work.loads.append(job)
        return job.job_id

    def cancel_load(self, job_id: int) -> None:
        """Asks for the early end of a load. Its result still comes. Finished loads are fine."""
        self._work.cancelled_loads.append(job_id)

    # Saves.

    def save(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        num_tail_tokens: int = 0,
        *,
        num_found: int = 0,
        lease_id: str = "",
    ) -> int:
        """Schedules a save; returns its job id. `SaveJob` describes the arguments.

        The blocks stay referenced until the result is in, or until they are released if the
        result says that they are held.
        """
        job_id = next(self._job_ids)
        self._work.saves.append(
            SaveJob(job_id, tuple(keys), tuple(block_ids), num_tail_tokens, num_found, lease_id)
        )
        return job_id

    def save_ahead(
        self, keys: Sequence[bytes], block_ids: Sequence[int], step: int, *, lease_id: str = ""
    ) -> int:
        """Schedules a save of full blocks that a step to come computes; returns its job id.

        The worker half saves the first layers while the step computes the others. Only
        connectors with `saves_ahead` support it.
        """
        job_id = next(self._job_ids)
        blocks = tuple(keys), tuple(block_ids)
        self._work.saves.append(SaveJob(job_id, *blocks, lease_id=lease_id, step=step))
        return job_id

    def delete(self, keys: Sequence[bytes]) -> None:
        """Schedules the removal of blocks that must not be loaded any more."""
        self._work.deletes.extend(keys)

    # Handoffs and leases.

    def join_ranks(self, ranks: Sequence[SavedSlices]) -> None:
        """Receives where readers find the slices of blocks that an engine of several ranks saves.

        Called at most once, before the first handoff. Does nothing here: stores find objects by
        their keys alone.

        Args:
            ranks: the ranks that save, in order. Together they save all slices.
        """

    def make_handoff(
        self,
        handoff_id: str,
        namespace: bytes,
        keys: Sequence[bytes],
        num_tokens: int,
    ) -> KvHandoff:
        """Returns the handoff for some or all blocks of a prompt. `KvHandoff` has the arguments."""
        return KvHandoff(
            handoff_id=handoff_id,
            namespace=namespace,
            block_keys=tuple(keys),
            num_tokens=num_tokens,
            connector=self.scheme,
            digest_scheme=DIGEST_SCHEME,
            lease_ms=self._lease_ms,
            connector_params=self.params,
        )

    def keep(self, handoff: KvHandoff) -> None:
        """Starts the renewal of another engine's lease: a request waits to load its blocks."""
        self._work.kept.append(handoff)

    def drop(self, handoff_id: str) -> None:
        """Ends `keep`: the blocks are loaded, or not needed any more. Unknown ids are fine."""
        self._work.dropped.append(handoff_id)

    def offer(self, lease_id: str) -> None:
        """Starts the time of a lease on own blocks: all saves have ended, the handoff is sent."""
        self._work.offered.append(lease_id)

    def end_lease(self, lease_id: str) -> None:
        """Ends a lease on own blocks. Unknown and ended ids are fine."""
        self._work.ended.append(lease_id)

    # Once per step.

    def build_work(self) -> ConnectorWork:
        """Returns the work scheduled since the last call. The caller owns it."""
        work, self._work = self._work, ConnectorWork()
        return work

    def update(self, results: TransferResults) -> TransferResults:
        """Processes the worker half's results; the engine calls it before it uses them.

        Returns:
            The results in terms of the engine's own jobs. A connector that splits a job into
            several reports one result for all of them.
        """
        for result in results.lookups:
            if result.job_id in self._found:  # else it was forgotten
                self._found[result.job_id] = result.num_blocks
        return results


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
            pool: the tensor `[num_blocks, *layout.block_shape]`.
            layout: the shape and type of the pool's blocks.
            form: how blocks look between engines; None if they look as in the pool.
                `kvstore.transfer_form.BlockSlicing.of` computes how the pool is cut for it.
            share: which of the model's KV heads the pool has.

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
        loads = (LoadResult(job.job_id, 0, "missing") for job in work.loads)
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
