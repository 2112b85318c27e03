"""`KvConnectorScheduler`: the half of a connector beside the engine's scheduler. Pure.

`kvstore.connector` describes both halves, and exports them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.codec import DIGEST_SCHEME
from kvstore.handoff import KvHandoff
from kvstore.jobs import ConnectorWork, LoadJob, LookupJob, SaveJob, TransferResults

__all__ = ["KvConnectorScheduler", "SavedSlices"]


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

    @property
    def ttl_s(self) -> float:
        """Seconds that saved blocks stay at least; 0.0 if that is not known."""
        return self._lease_ms / 1000

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
        tail_group: int = 0,
    ) -> int:
        """Schedules a save; returns its job id. `SaveJob` describes the arguments.

        The blocks stay referenced until the result is in, or until they are released if the
        result says that they are held.
        """
        job_id = next(self._job_ids)
        self._work.saves.append(
            SaveJob(
                job_id,
                tuple(keys),
                tuple(block_ids),
                num_tail_tokens,
                num_found,
                lease_id,
                tail_group=tail_group,
            )
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
        """Returns what was scheduled since the last call. The caller owns it."""
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
