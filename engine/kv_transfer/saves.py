"""`Saves`: what requests publish through the KV connector, and the handoffs of it. Pure.

Prompts are saved block by block while they are computed, so that whoever loads
them can begin before the last chunk. What is generated is saved by policy: when
a sequence ends, every so many blocks, or not at all. Blocks that are not full are
saved for a handoff alone: their full transfer blocks, and the tail. As long as a
sequence writes to one, nobody else may hold it.

Where the connector can, blocks that a step fills are given to it before the step, so that
their first layers move while the next ones compute.

A save job holds a reference on its blocks until its result is in; where the
connector lends the blocks themselves, until they are released (`kvstore.connector`).
"""

from collections import OrderedDict, abc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from engine.group import Sequence, SequenceGroup, new_handoff_id
from engine.kv_cache.block_pool import BlockPool
from engine.kv_transfer.blocks import TransferBlocks, TransferItem, held_by
from kvstore.connector import KvConnectorScheduler
from kvstore.handoff import KvHandoff
from kvstore.jobs import SaveResult

__all__ = ["SavePolicy", "Saves"]

# Handoffs nobody released are forgotten beyond this; the store's TTL removes their tails.
_MAX_HANDOFFS = 65_536


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """What an engine publishes.

    Attributes:
        prompts: blocks of prompts, as they are computed.
        ahead: those as soon as a step is to compute them.
        interval: generated blocks, whenever so many have filled up; None: not while a
            sequence runs.
        at_end: generated blocks, when a sequence ends.
    """

    prompts: bool = False
    ahead: bool = False
    interval: int | None = None
    at_end: bool = False


@dataclass(frozen=True, slots=True)
class _Save:
    """`lease_id` is the group's handoff's when it began."""

    group: SequenceGroup
    block_ids: list[int]
    lease_id: str


class Saves:
    """Saves and handoffs of all requests of one scheduler.

    Args:
        connector: the scheduler half.
        pool: where job references are kept.
        cut: how blocks are cut into transfer blocks.
        namespace: digest that block keys are rooted in.
        policy: what is published.
        on_job: called with the id of each job that is scheduled, and the step that it waits for
            or 0.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        pool: BlockPool,
        cut: TransferBlocks,
        *,
        namespace: bytes,
        policy: SavePolicy,
        on_job: Callable[[int, int], None],
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._block_size = cut.spec.block_size
        self._cut = cut
        self._namespace = namespace
        self._policy = policy
        self._on_job = on_job
        self._jobs: dict[int, _Save] = {}
        self._held: dict[int, _Save] = {}
        # Tails of handoffs that nobody has released yet, by handoff id.
        self._tail_keys: OrderedDict[str, list[bytes]] = OrderedDict()

    @property
    def in_flight(self) -> int:
        """Jobs whose result is not in."""
        return len(self._jobs)

    def is_open(self, job_id: int) -> bool:
        """Whether a save's result is awaited."""
        return job_id in self._jobs

    def held_blocks(self) -> list[int]:
        """One entry per reference that a job holds."""
        saves = chain(self._jobs.values(), self._held.values())
        return [block for save in saves for block in save.block_ids]

    # What is saved.

    def save_computed(self, group: SequenceGroup) -> None:
        """Publishes the group's full, computed prompt blocks not published yet."""
        if self._policy.prompts:
            end = min(group.lead.num_computed, group.num_prompt) // self._block_size
            self._save_up_to(group.lead, end)

    def save_ahead(self, group: SequenceGroup, step: int) -> None:
        """By policy, publishes the full prompt blocks that a step to come computes, too."""
        if self._policy.ahead:
            self.save_computed(group)
            end = min(group.lead.num_scheduled, group.num_prompt) // self._block_size
            self._save_up_to(group.lead, end, step)

    def save_filled(self, sequence: Sequence) -> None:
        """A block of a running sequence has filled up: publishes what is due by policy."""
        if self._policy.interval is None:
            return
        end = sequence.num_computed // self._block_size
        if end - self._first_unsaved(sequence) >= self._policy.interval:
            self._save_up_to(sequence, end)

    def save_ended(self, sequence: Sequence) -> None:
        """A sequence has all its tokens, and still its blocks: publishes them by policy."""
        if self._policy.at_end and sequence.table is not None:
            self._save_up_to(sequence, sequence.num_computed // self._block_size)

    def save_for_handoff(self, group: SequenceGroup) -> None:
        """Publishes what `save_computed` leaves of the prompt: its last, partial block."""
        table = group.lead.table
        assert table is not None
        num_saved = group.num_prompt // self._block_size
        num_full, num_tail = divmod(group.num_prompt, self._cut.size)
        keys = group.lead.keys.of_prompt(group.request.spec.prompt_token_ids, group.handoff_id)
        indices = range(num_saved * self._cut.per_block, len(keys))
        items = list(self._cut.items(indices, keys, table.blocks, table.first_live))
        if full := [item for item in items if item.index < num_full]:
            self._save(group, num_saved, full, 0)
        for tail in [item for item in items if item.index >= num_full]:
            self._save(group, num_saved, [tail], num_tail)
        group.handoff = self._make_handoff(group, keys, group.num_prompt)

    # What others hear of it.

    def take_progress(self, group: SequenceGroup) -> KvHandoff | None:
        """Blocks that others can load since the last call; None if there are none, or the
        group hands nothing over.
        """
        if not group.hands_over or group.save_failed or group.is_poisoned:
            return None
        first, end = group.num_told, min(group.pending_saves.values(), default=group.num_saved)
        if end <= first:
            return None
        group.num_told = end
        count = self._cut.per_block
        keys = group.lead.keys.extend(group.request.spec.prompt_token_ids)[
            first * count : end * count
        ]
        return self._make_handoff(group, keys, end * self._block_size)

    def commit_handoff(self, group: SequenceGroup) -> KvHandoff | None:
        """The handoff of a group whose saves have ended; None if one failed."""
        handoff = group.handoff
        if handoff is None or group.save_failed:
            return None
        group.is_handed_over = True
        self._connector.offer(handoff.handoff_id)
        if keys := self._tail_of(handoff):
            self._tail_keys[handoff.handoff_id] = keys
        if len(self._tail_keys) > _MAX_HANDOFFS:
            self._tail_keys.popitem(last=False)
        return handoff

    def end_handoff(self, handoff_id: str) -> None:
        """Gives back what was saved for one handoff alone. Unknown ids are fine.

        Full blocks that a store has stay for other requests.
        """
        self._connector.end_lease(handoff_id)
        if keys := self._tail_keys.pop(handoff_id, None):
            self._connector.delete(keys)

    def take_back(self, group: SequenceGroup) -> None:
        """The group gives way, and with its blocks all that is lent of them. What it hands
        over when it has computed them again has another id, and is saved anew.
        """
        saves = chain(self._jobs.values(), self._held.values())
        if group.hands_over and any(save.lease_id == group.handoff_id for save in saves):
            self._connector.end_lease(group.handoff_id)
            group.handoff_id = new_handoff_id()
            group.num_saved = group.num_told = group.lead.num_saved = 0
            group.save_failed = False

    def yield_lent(self, group: SequenceGroup) -> None:
        """The group waits for blocks, and no other holds any. Where all that could come free
        is lent for its own handoff, as what lies behind a window is, it hands nothing over.
        """
        lent = self._held.values()
        if lent and not self._jobs and all(save.lease_id == group.handoff_id for save in lent):
            self._connector.end_lease(group.handoff_id)

    def abandon(self, group: SequenceGroup) -> None:
        """The request is over; unless it was handed over, nobody comes for what it saved."""
        if group.hands_over and not group.is_handed_over:
            self._connector.end_lease(group.handoff_id)
            group.is_abandoned = True
            self._delete_tail(group)

    def discard(self, group: SequenceGroup) -> None:
        """Takes back what the group has published: it must not be loaded.

        Where saves are still under way, their ends are awaited first, so that
        none comes after the deletion.
        """
        group.is_poisoned = True
        self._clean_up(group)

    # What becomes of jobs.

    def finish(self, result: SaveResult) -> SequenceGroup:
        """Takes in a result; whose save it was."""
        save = self._jobs.pop(result.job_id)
        if result.is_held:
            self._held[result.job_id] = save
        else:
            self._pool.release(save.block_ids)
        self._end(result.job_id, save, failed=not result.committed)
        return save.group

    def release(self, job_id: int) -> None:
        """Nobody reads the blocks of a finished job any more."""
        self._pool.release(self._held.pop(job_id).block_ids)

    def give_up(self, job_id: int) -> tuple[SequenceGroup, int]:
        """A save does not report: its group goes on. Its blocks stay held.

        Returns:
            The group, and how many blocks stay.
        """
        save = self._jobs[job_id]
        self._end(job_id, save, failed=True)
        return save.group, len(save.block_ids)

    def _end(self, job_id: int, save: _Save, *, failed: bool) -> None:
        group = save.group
        group.pending_saves.pop(job_id, None)
        if save.lease_id == group.handoff_id:  # what was taken back is saved again
            group.save_failed |= failed
        self._delete_tail(group)
        self._clean_up(group)

    def _first_unsaved(self, sequence: Sequence) -> int:
        return max(sequence.num_saved, sequence.group.num_saved)

    def _save_up_to(self, sequence: Sequence, end: int, step: int = 0) -> None:
        """Saves the full blocks before index `end` that are not saved yet; see `_save`.

        None while they come back from the host: whoever saves next saves them.
        """
        group, first = sequence.group, self._first_unsaved(sequence)
        if end <= first or group.is_poisoned or group.is_returning:
            return
        assert sequence.table is not None
        keys = sequence.keys.extend(sequence.token_ids)
        count, table = self._cut.per_block, sequence.table
        # What lies behind a window was found, not computed.
        indices = range(first * count, end * count)
        items = list(self._cut.items(indices, keys, table.blocks, table.first_live))
        sequence.num_saved = end
        group.num_saved = max(group.num_saved, min(end, group.num_prompt // self._block_size))
        if items:
            num_found = max(0, group.num_matched - first) * count * len(table.blocks)
            self._save(group, first, items, 0, num_found=min(num_found, len(items)), step=step)

    def _save(
        self,
        group: SequenceGroup,
        first: int,
        items: abc.Sequence[TransferItem],
        num_tail: int,
        *,
        num_found: int = 0,
        step: int = 0,
    ) -> None:
        """Schedules a save, of which a step may have to compute what was not found."""
        keys = [item.key for item in items]
        transfer_ids = [item.transfer_id for item in items]
        if step:
            job_id = self._connector.save_ahead(keys, transfer_ids, step, lease_id=group.handoff_id)
        else:
            job_id = self._connector.save(
                keys, transfer_ids, num_tail, num_found=num_found, lease_id=group.handoff_id
            )
        group.published += keys
        block_ids = held_by(items)
        self._pool.acquire(block_ids)
        self._jobs[job_id] = _Save(group, block_ids, group.handoff_id)
        self._on_job(job_id, step)
        group.pending_saves[job_id] = first

    def _make_handoff(
        self, group: SequenceGroup, keys: abc.Sequence[bytes], num_tokens: int
    ) -> KvHandoff:
        return self._connector.make_handoff(group.handoff_id, self._namespace, keys, num_tokens)

    def _tail_of(self, handoff: KvHandoff) -> list[bytes]:
        """Keys of what only its own request can use: they are drawn for it alone."""
        if handoff.num_tokens % self._cut.size == 0:
            return []
        return self._cut.object_keys(handoff.block_keys[-1:])

    def _delete_tail(self, group: SequenceGroup) -> None:
        """Deletes the tail of a handoff that is never told, once no save of it may come."""
        if group.is_abandoned and group.handoff is not None and not group.pending_saves:
            self._connector.delete(self._tail_of(group.handoff))

    def _clean_up(self, group: SequenceGroup) -> None:
        """Deletes what nobody may load of a group, none of whose saves may still come. One
        that was given up may: it is deleted again when it has ended.
        """
        if group.pending_saves or not group.is_poisoned:
            return
        num_known = group.num_saved * self._cut.per_block
        known = group.lead.keys.extend(group.lead.token_ids)[:num_known]
        doomed = dict.fromkeys((*self._cut.object_keys(known), *group.published))
        self._connector.delete(list(doomed))
