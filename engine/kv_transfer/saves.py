"""`Saves`: saves KV of requests through the connector, and makes handoffs of it. Pure.

Prompts are saved block by block while they are computed, so that another engine can load the
first blocks before the last chunk is computed. Generated blocks are saved by policy: when a
sequence ends, every few blocks, or not at all. A partial last block is saved for a handoff only:
its full transfer blocks, and the tail. Of a model with recurrent layers, a handoff has the states
at its end, too, and with the blocks those states are saved from which other requests go on.

If the connector saves ahead, it receives the blocks that a step fills before the step runs. So
their first layers are saved while the step computes the others.
"""

from collections import abc

from engine.groups.group import Sequence, SequenceGroup
from engine.groups.states import new_handoff_id, overlap
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.blocks import TransferBlocks, TransferItem, held_by
from engine.kv_transfer.jobs import JobTable, Save
from engine.kv_transfer.save_policy import SavePolicy
from engine.kv_transfer.tails import Tails
from kvstore.connector import KvConnectorScheduler
from kvstore.guard.metrics import TransferMetrics
from kvstore.handoff import KvHandoff
from kvstore.jobs import SaveResult

__all__ = ["Saves"]

_CANCELLED = "cancelled"  # the error of a save whose lease is over


class Saves:
    """Saves and handoffs of one scheduler.

    Args:
        connector: the scheduler half.
        kv: the KV cache manager. Save jobs hold references in its pool.
        cut: how pool blocks are cut into transfer blocks.
        jobs: the table for the jobs.
        namespace: digest that block keys are rooted in.
        policy: what is saved.
        metrics: counts how much of the saves ran while prompts were computed.
    """

    def __init__(
        self,
        connector: KvConnectorScheduler,
        kv: KvCacheManager,
        cut: TransferBlocks,
        jobs: JobTable,
        *,
        namespace: bytes,
        policy: SavePolicy,
        metrics: TransferMetrics,
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._pool = kv.pool
        self._block_size = cut.spec.block_size
        self._cut = cut
        self._jobs = jobs
        self._namespace = namespace
        self._policy = policy
        self._metrics = metrics
        self._tails = Tails(connector, cut)

    # What is saved, and when.

    def save_computed(self, group: SequenceGroup) -> None:
        """By policy, saves the full prompt blocks that are computed and not saved yet."""
        if self._policy.prompts or group.hands_over:
            end = min(group.lead.num_computed, group.num_prompt) // self._block_size
            self._save_up_to(group.lead, end)

    def save_ahead(self, group: SequenceGroup, step: int) -> None:
        """By policy, saves the full prompt blocks that the step, which begins next, computes."""
        if self._policy.ahead and (self._policy.prompts or group.hands_over):
            self.save_computed(group)
            end = min(group.lead.num_scheduled, group.num_prompt) // self._block_size
            self._save_up_to(group.lead, end, step)

    def save_filled(self, sequence: Sequence) -> None:
        """By policy, saves generated blocks of a running sequence whose last block is full."""
        if self._policy.interval is None:
            return
        end = sequence.num_computed // self._block_size
        if end - self._first_unsaved(sequence) >= self._policy.interval:
            self._save_up_to(sequence, end)

    def save_ended(self, sequence: Sequence) -> None:
        """By policy, saves the blocks of a sequence that ends and still has its blocks."""
        if self._policy.at_end and not sequence.group.hands_over and sequence.table is not None:
            self._save_up_to(sequence, sequence.num_computed // self._block_size)

    def save_for_handoff(self, group: SequenceGroup) -> None:
        """Saves the prompt's partial last block, and makes the handoff of the prompt."""
        self._save_tail(group, group.lead, group.num_prompt)

    def save_to_move(self, group: SequenceGroup) -> None:
        """Saves the KV of a running group that continues on another engine.

        A store gets the blocks of all candidates, by policy. Other connectors hand over the KV of
        a single candidate that decodes; other KV is computed again. With states, stores hand it
        over as well, because requests only look for states at some places.
        """
        transfer, num_tokens = group.transfer, self._num_movable(group)
        if num_tokens:
            transfer.handoff_id = new_handoff_id()
        for branch in group.branches:
            self.save_ended(branch)
        if num_tokens:
            (sequence,) = group.branches
            if not self._connector.finds_by_key:
                transfer.num_saved = sequence.num_saved = 0
            self._save_up_to(sequence, num_tokens // self._block_size)
            self._save_tail(group, sequence, num_tokens)

    def _num_movable(self, group: SequenceGroup) -> int:
        """Returns how many tokens' KV a group that moves hands over."""
        states = self._kv.states
        if (self._connector.finds_by_key and states is None) or group.is_returning:
            return 0
        lead = group.lead
        if len(group.branches) > 1 or lead.num_computed < len(lead.token_ids) - 1:
            return 0
        if states is None:
            return lead.num_computed
        if lead.table is None:
            return 0
        # Steps in flight may have applied further tokens to the current states.
        return states.kept_end(lead.table, lead.num_computed)

    def _save_tail(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Saves a sequence's blocks after the full ones of the pool, and the states at the end, and
        makes the handoff of its first `num_tokens` tokens.
        """
        table, transfer = sequence.table, group.transfer
        assert table is not None
        num_saved = num_tokens // self._block_size
        num_full, num_tail = divmod(num_tokens, self._cut.size)
        keys = sequence.keys.of_prompt(sequence.token_ids[:num_tokens], transfer.handoff_id)
        indices = range(num_saved * self._cut.per_block, len(keys))
        items = list(self._cut.items(indices, keys, table.blocks, table.first_live))
        if full := [item for item in items if item.index < num_full]:
            self._save(group, num_saved, full, 0)
        for tail in [item for item in items if item.index >= num_full]:
            self._save(group, num_saved, [tail], num_tail, is_tail=True)
        if self._kv.states is not None:
            slot = self._kv.states.slot_after(table, num_tokens)
            states = list(self._cut.state_items(len(keys) - 1, keys[-1], slot))
            self._save(group, num_saved, states, 0, is_tail=num_tail > 0)
        transfer.handoff = self._make_handoff(group, keys, num_tokens)

    # Handoffs.

    def take_progress(self, group: SequenceGroup) -> KvHandoff | None:
        """Returns a handoff of the prompt blocks that were saved since the last call.

        Other engines can prefetch them. Returns None if there are none, or if this engine makes
        no handoff of the group.
        """
        transfer = group.transfer
        if not group.hands_over or transfer.save_failed or transfer.is_poisoned:
            return None
        first = transfer.num_announced
        end = min(transfer.pending_saves.values(), default=transfer.num_saved)
        if end <= first:
            return None
        transfer.num_announced = end
        count = self._cut.per_block
        keys = group.lead.keys.extend(group.request.spec.prompt_token_ids)[
            first * count : end * count
        ]
        return self._make_handoff(group, keys, end * self._block_size)

    def commit_handoff(self, group: SequenceGroup) -> KvHandoff | None:
        """Returns the handoff of a group whose saves have ended; None if a save failed.

        Without a saved tail it names the full blocks alone. The caller sends it to the router; its
        lease starts now.
        """
        transfer = group.transfer
        handoff = None if transfer.save_failed else transfer.handoff
        if handoff is not None and transfer.tail_failed:
            handoff = self._tails.cut_off(handoff)
        if handoff is None:
            return None
        transfer.handoff_sent = True
        self._connector.offer(handoff.handoff_id)
        self._tails.keep(handoff)
        if group.hands_over and group.times.first_token_at is not None:
            self._metrics.prompt_saved(*overlap(transfer.save_times, group.times.first_token_at))
        return handoff

    def release_handoff(self, handoff_id: str) -> None:
        """Ends a handoff's lease and deletes its tail; full blocks stay in a store for others.
        Unknown ids are fine.
        """
        self._connector.end_lease(handoff_id)
        self._tails.release(handoff_id)

    def take_back(self, group: SequenceGroup) -> None:
        """Ends the lease of a preempted group, so that its lent blocks come free.

        The group saves its prompt again later, under another handoff id.
        """
        transfer = group.transfer
        if not group.hands_over:
            return
        if any(save.lease_id == transfer.handoff_id for save in self._jobs.saves()):
            self._connector.end_lease(transfer.handoff_id)
            transfer.handoff_id = new_handoff_id()
            transfer.num_saved = transfer.num_announced = group.lead.num_saved = 0
            transfer.save_failed = False

    def yield_lent(self, group: SequenceGroup) -> None:
        """Ends the group's own lease if only its lent blocks could free the pool.

        The group would wait for itself otherwise. Its saves then hand nothing over. A model with
        sliding windows can get there: blocks behind a window are lent, but no longer used.
        """
        lease_id = group.transfer.handoff_id
        saves = list(self._jobs.saves())
        are_lent = all(save.job_id in self._jobs.lent for save in saves)
        if saves and are_lent and all(save.lease_id == lease_id for save in saves):
            self._connector.end_lease(lease_id)
            group.transfer.save_failed = True

    def abandon(self, group: SequenceGroup) -> None:
        """Cancels the handoff of a group that has ended, unless it was sent."""
        transfer = group.transfer
        if transfer.handoff_id and not transfer.handoff_sent:
            self._connector.end_lease(transfer.handoff_id)
            transfer.handoff_cancelled = True
            if not transfer.tail_failed:  # else it was deleted when its save failed
                self._tails.drop_useless(group)

    def discard(self, group: SequenceGroup) -> None:
        """Deletes all that the group has saved, as its KV is not finite, after the end of all open
        saves.
        """
        group.transfer.is_poisoned = True
        self._clean_up(group)

    # Ends of jobs.

    def finish(self, job: Save, result: SaveResult, now: float) -> None:
        """Processes a save's result, which has come at clock time `now`."""
        if result.is_held:
            self._jobs.lent[job.job_id] = job
        else:
            self._pool.release(job.block_ids)
        if result.committed and self._connector.finds_by_key:
            self._kv.events.record_saved(job.keys, self._connector.ttl_s)
        if job.group.hands_over:
            start = job.started_at + result.waited
            end = start + result.seconds if result.seconds else now
            job.group.transfer.save_times.append((start, end))
        self._end(job, failed=not result.committed, lease_is_over=result.error == _CANCELLED)

    def release(self, job_id: int) -> None:
        """Releases the blocks of a lent save: no engine reads them any more."""
        self._pool.release(self._jobs.lent.pop(job_id).block_ids)

    def give_up(self, job: Save) -> None:
        """Ends the wait for a save. Its blocks stay held until its result is in."""
        self._end(job, failed=True)

    def _end(self, job: Save, *, failed: bool, lease_is_over: bool = False) -> None:
        group, transfer = job.group, job.group.transfer
        transfer.pending_saves.pop(job.job_id, None)
        if job.lease_id == transfer.handoff_id:  # else it was taken back, and is saved again
            transfer.tail_failed |= failed and job.is_tail
            transfer.save_failed |= failed and (not job.is_tail or lease_is_over)
        self._tails.drop_useless(group)
        self._clean_up(group)

    def _first_unsaved(self, sequence: Sequence) -> int:
        return max(sequence.num_saved, sequence.group.transfer.num_saved)

    def _save_up_to(self, sequence: Sequence, end: int, step: int = 0) -> None:
        """Saves the full blocks before index `end` that are not saved yet.

        While blocks return from the host, it saves none; a later call does.

        Args:
            sequence: has blocks.
            end: index behind the last block to save.
            step: the step that computes the blocks; 0 if they are computed.
        """
        group, transfer = sequence.group, sequence.group.transfer
        first = self._first_unsaved(sequence)
        if end <= first or transfer.is_poisoned or group.is_returning:
            return
        assert sequence.table is not None
        keys = sequence.keys.extend(sequence.token_ids)
        count, table = self._cut.per_block, sequence.table
        # Blocks behind a window are not in the table: they were found, not computed here.
        indices = range(first * count, end * count)
        states = self._states_of(sequence, range(first, end))
        items = list(self._cut.items(indices, keys, table.blocks, table.first_live, states))
        sequence.num_saved = end
        transfer.num_saved = max(transfer.num_saved, min(end, group.num_prompt // self._block_size))
        if items:
            num_found = sum(item.index < group.num_matched * count for item in items)
            self._save(group, first, items, 0, num_found=num_found, step=step)

    def _states_of(self, sequence: Sequence, indices: range) -> dict[int, int]:
        """Returns the slots of the states to save with computed blocks, by the block that they lie
        at the end of.

        These are the states that other requests look for. A slot that has left the sequence's
        table may still be cached.
        """
        states, table, group = self._kv.states, sequence.table, sequence.group
        if states is None or not self._connector.finds_by_key:
            return {}
        assert table is not None
        keys = sequence.keys.extend_pool(sequence.token_ids)
        slots: dict[int, int] = {}
        for index in indices:
            is_handed_over = group.hands_over and (index + 1) * self._block_size == group.num_prompt
            if self._cut.spec.caches_state(index, table.num_known) and not is_handed_over:
                slot = states.slot_to_save(table, index, keys[index], len(slots))
                if slot is not None:
                    slots[index] = slot
        return slots

    def _save(
        self,
        group: SequenceGroup,
        first: int,
        items: abc.Sequence[TransferItem],
        num_tail: int,
        *,
        is_tail: bool = False,
        num_found: int = 0,
        step: int = 0,
    ) -> None:
        """Schedules one save job.

        Args:
            group: the request.
            first: index of the first pool block with an item.
            items: what to save.
            num_tail: tokens in the last item if it is a partial tail; else 0.
            is_tail: whether the items belong to a partial tail.
            num_found: leading items that were found in the prefix cache.
            step: the step that computes the items; 0 if they are computed.
        """
        transfer = group.transfer
        keys = [item.key for item in items]
        transfer_ids = [item.transfer_id for item in items]
        lease_id = transfer.handoff_id
        if step:
            job_id = self._connector.save_ahead(keys, transfer_ids, step, lease_id=lease_id)
        else:
            job_id = self._connector.save(
                keys,
                transfer_ids,
                num_tail,
                num_found=num_found,
                lease_id=lease_id,
                tail_group=items[-1].layer_group if num_tail else 0,
            )
        job = Save(
            job_id=job_id,
            block_ids=held_by(items),
            group=group,
            lease_id=lease_id,
            step=step,
            is_tail=is_tail,
            keys=() if is_tail else self._cut.plain_keys(items),
        )
        self._pool.acquire(job.block_ids)
        self._jobs.add(job)
        transfer.published += keys
        transfer.pending_saves[job_id] = first

    def _make_handoff(
        self, group: SequenceGroup, keys: abc.Sequence[bytes], num_tokens: int
    ) -> KvHandoff:
        return self._connector.make_handoff(
            group.transfer.handoff_id, self._namespace, keys, num_tokens
        )

    def _clean_up(self, group: SequenceGroup) -> None:
        """Deletes what a poisoned group has saved, once it has no open save.

        A save that was given up may still come; then this runs again when it has ended.
        """
        transfer = group.transfer
        if transfer.pending_saves or not transfer.is_poisoned:
            return
        num_known = transfer.num_saved * self._block_size
        keys = group.lead.keys.extend(group.lead.token_ids)
        known = self._cut.lookup_keys(
            keys, self._cut.loadable_ends(group.num_prompt, num_known + 1)
        )
        self._connector.delete(list(dict.fromkeys((*known, *transfer.published))))
