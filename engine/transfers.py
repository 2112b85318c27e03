"""`Transfers`: ties sequences to the KV connector's scheduler half. Pure.

Decides what a sequence loads and saves, and keeps a reference on every block
that a job names until the job's result is in, whatever becomes of the
sequence. So an abort or a preemption never hands a block that is still being
read or written to somebody else.
"""

import uuid
from collections import OrderedDict, abc
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.sequence import Sequence
from kvstore.connector import ConnectorWork, KvConnectorScheduler, LoadResult, TransferResults
from kvstore.handoff import KvHandoff

__all__ = ["FinishedLoad", "Transfers"]

# Handoffs nobody released are forgotten beyond this; the store's TTL removes their tails.
_MAX_HANDOFFS = 65_536


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A sequence's load has ended; the sequence still waits for it.

    Attributes:
        sequence: whose load it was.
        num_tokens: tokens whose KV is in the sequence's blocks now.
        error: why fewer than asked arrived; empty if all did.
    """

    sequence: Sequence
    num_tokens: int
    error: str


@dataclass(frozen=True, slots=True)
class _Load:
    sequence: Sequence
    first_block: int
    block_ids: list[int]
    num_tokens: int


class Transfers:
    """Loads and saves of all sequences of one scheduler.

    Args:
        connector: the scheduler half; None runs without a connector.
        pool: where job references are kept.
        block_size: tokens per block.
        namespace: digest that block keys are rooted in.
        saves: whether computed prompt blocks are published.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler | None,
        pool: BlockPool,
        *,
        block_size: int,
        namespace: bytes,
        saves: bool,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._block_size = block_size
        self._namespace = namespace
        self._saves = saves and connector is not None
        self._loads: dict[int, _Load] = {}
        self._save_jobs: dict[int, tuple[Sequence, list[int]]] = {}
        # Tails of handoffs that nobody has released yet, by handoff id.
        self._tail_keys: OrderedDict[str, bytes] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Jobs whose result is not in."""
        return len(self._loads) + len(self._save_jobs)

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        held = [block for load in self._loads.values() for block in load.block_ids]
        return held + [block for _, blocks in self._save_jobs.values() for block in blocks]

    def num_loadable(self, sequence: Sequence) -> int | None:
        """Leading blocks that the connector can load; None: ask again next step."""
        if self._connector is None or not sequence.may_load:
            return 0
        if sequence.pending_handoff is not None:
            return len(sequence.pending_handoff.block_keys)
        num_keys = (len(sequence.token_ids) - 1) // self._block_size
        if num_keys == 0:
            return 0
        if sequence.lookup_job is None:
            sequence.lookup_job = self._connector.lookup(sequence.keys.keys[:num_keys])
        return self._connector.num_found(sequence.lookup_job)

    def start_load(self, sequence: Sequence, num_loadable: int) -> bool:
        """Loads what the admitted sequence lacks of the first `num_loadable` blocks.

        Returns:
            Whether there was anything to load.
        """
        handoff, sequence.pending_handoff = sequence.pending_handoff, None
        first = sequence.num_computed // self._block_size
        sequence.num_saved = max(sequence.num_saved, num_loadable)
        if self._connector is None or num_loadable <= first:
            return False
        keys = handoff.block_keys if handoff else sequence.keys.keys
        block_ids = sequence.block_ids[first:num_loadable]
        job_id = self._connector.load(keys[first:num_loadable], block_ids)
        self._pool.acquire(block_ids)
        num_tokens = handoff.num_tokens if handoff else num_loadable * self._block_size
        self._loads[job_id] = _Load(sequence, first, block_ids, num_tokens)
        sequence.load_job = job_id
        return True

    def save_computed(self, sequence: Sequence) -> None:
        """Publishes the sequence's full, computed prompt blocks not published yet."""
        end = min(sequence.num_computed, sequence.num_prompt) // self._block_size
        if not self._saves or end <= sequence.num_saved:
            return
        blocks = slice(sequence.num_saved, end)
        self._save(sequence, sequence.keys.keys[blocks], sequence.block_ids[blocks], 0)
        sequence.num_saved = end

    def save_for_handoff(self, sequence: Sequence) -> None:
        """Publishes what `save_computed` leaves of the prompt: its partial tail."""
        assert self._connector is not None, "prefill engines have a connector"
        num_full, num_tail = divmod(sequence.num_prompt, self._block_size)
        handoff_id = uuid.uuid4().hex
        keys = sequence.keys.of_prompt(sequence.request.prompt_token_ids, handoff_id)
        if num_tail:
            self._save(sequence, keys[-1:], [sequence.block_ids[num_full]], num_tail)
        sequence.handoff = self._connector.make_handoff(
            handoff_id, self._namespace, keys, sequence.num_prompt
        )

    def commit_handoff(self, sequence: Sequence) -> KvHandoff | None:
        """The handoff of a sequence whose saves have ended; None if one failed."""
        handoff = sequence.handoff
        if handoff is None or sequence.save_failed:
            return None
        if handoff.num_tokens % self._block_size != 0:
            self._tail_keys[handoff.handoff_id] = handoff.block_keys[-1]
        if len(self._tail_keys) > _MAX_HANDOFFS:
            self._tail_keys.popitem(last=False)
        return handoff

    def release_handoff(self, handoff_id: str) -> None:
        """Deletes the handoff's tail, which nobody else can use. Unknown ids are fine.

        Full blocks stay for other requests.
        """
        key = self._tail_keys.pop(handoff_id, None)
        if key is not None and self._connector is not None:
            self._connector.delete([key])

    def discard_saved(self, sequence: Sequence) -> None:
        """Takes back what the sequence has published: it must not be loaded.

        Where saves are still under way, their ends are awaited first, so that
        none comes after the deletion.
        """
        sequence.is_poisoned = True
        if self._saves and not sequence.pending_saves:
            self._unpublish(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the scheduler's queues, or starts over."""
        if self._connector is None:
            return
        if sequence.lookup_job is not None:
            self._connector.forget_lookup(sequence.lookup_job)
            sequence.lookup_job = None
        if sequence.load_job is not None:
            self._connector.cancel_load(sequence.load_job)
            sequence.load_job = None

    def apply(self, results: TransferResults) -> tuple[list[FinishedLoad], list[Sequence]]:
        """Takes in results; drops the jobs' references.

        Returns:
            Loads that sequences still wait for, and sequences whose last save
            has ended.
        """
        if self._connector is None:
            return [], []
        self._connector.update(results)
        loads = [finished for r in results.loads if (finished := self._finish_load(r))]
        saved = dict.fromkeys(self._finish_save(r.job_id, r.committed) for r in results.saves)
        return loads, [sequence for sequence in saved if not sequence.pending_saves]

    def build_work(self) -> ConnectorWork:
        """What the worker half must start now."""
        return self._connector.build_work() if self._connector is not None else ConnectorWork()

    def _save(
        self,
        sequence: Sequence,
        keys: abc.Sequence[bytes],
        block_ids: list[int],
        num_tail: int,
    ) -> None:
        assert self._connector is not None
        job_id = self._connector.save(keys, block_ids, num_tail)
        self._pool.acquire(block_ids)
        self._save_jobs[job_id] = (sequence, block_ids)
        sequence.pending_saves.add(job_id)

    def _finish_load(self, result: LoadResult) -> FinishedLoad | None:
        load = self._loads.pop(result.job_id)
        self._pool.release(load.block_ids)
        if load.sequence.load_job != result.job_id:
            return None  # aborted meanwhile
        load.sequence.load_job = None
        if result.num_blocks == len(load.block_ids):
            return FinishedLoad(load.sequence, load.num_tokens, "")
        num_good = (load.first_block + result.num_blocks) * self._block_size
        return FinishedLoad(load.sequence, num_good, result.error or "missing")

    def _finish_save(self, job_id: int, committed: bool) -> Sequence:
        sequence, block_ids = self._save_jobs.pop(job_id)
        self._pool.release(block_ids)
        sequence.pending_saves.discard(job_id)
        sequence.save_failed |= not committed
        if sequence.is_poisoned and not sequence.pending_saves:
            self._unpublish(sequence)
        return sequence

    def _unpublish(self, sequence: Sequence) -> None:
        assert self._connector is not None
        self._connector.delete(sequence.keys.keys[: sequence.num_saved])
