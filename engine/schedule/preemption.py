"""`Preemption`: takes the blocks of less important groups if a running group lacks some. Pure."""

import logging

from engine.config import EngineConfig
from engine.groups.group import SequenceGroup
from engine.kv_cache.block_table import BlockTable
from engine.kv_cache.manager import KvCacheManager
from engine.kv_transfer.transfers import Transfers
from engine.runner import StepCosts
from engine.schedule.queues import GroupQueues
from engine.schedule.step_plan import StepPlan

__all__ = ["Preemption", "prefers_swap"]

_logger = logging.getLogger("baton.engine")


class Preemption:
    """Preempts running groups, whose KV is copied to the host, or dropped and computed again.

    Args:
        config: the policy.
        kv: the block tables.
        queues: waiting and running groups.
        transfers: prefetches and lent blocks, which are given up first.
        costs: measured costs of computing and of swapping.

    Attributes:
        num_preemptions: preemptions since the start.
        num_swap_preemptions: of them, those that copied KV to the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KvCacheManager,
        queues: GroupQueues,
        transfers: Transfers,
        costs: StepCosts,
    ) -> None:
        self._config = config
        self._kv = kv
        self._queues = queues
        self._transfers = transfers
        self._costs = costs
        self.num_preemptions = 0
        self.num_swap_preemptions = 0

    def make_room(
        self, group: SequenceGroup, table: BlockTable, start: int, end: int, plan: StepPlan
    ) -> bool:
        """Preempts groups, the least important first, until a table can grow.

        Returns:
            False if the group must wait for blocks, or was preempted itself.
        """
        while not self._kv.can_append(table, start, end):
            plan.admits_none = True
            if self._kv.will_append(table, start, end):
                return False  # steps in flight free them
            num_stopped = self._transfers.prefetches.stop() + self._transfers.lends.stop()
            if self._kv.will_append(table, start, end, num_freed=num_stopped):
                return False  # stopped prefetches and leases free them
            if len(self._queues.running) == 1:
                self._transfers.saves.yield_lent(group)
                return False  # transfers free them
            victim = self._queues.running[-1]
            self._preempt(victim, plan)
            if victim is group:
                return False
        return True

    def _preempt(self, group: SequenceGroup, plan: StepPlan) -> None:
        """Frees all blocks of a running group and puts it back into the queue."""
        self.num_preemptions += 1
        plan.drop(group)
        self._queues.stop_running(group)
        tables = [sequence.table for sequence in group.running if sequence.table is not None]
        assert len(tables) == len(group.running), "a running sequence has blocks"
        prefers = prefers_swap(self._config.preemption_mode, group, self._costs)
        if prefers and self._queues.rewind(group) and self._kv.can_swap_out(tables):
            group.swapped = self._kv.swap_out(tables, plan.step)
            plan.swapped.append(group)
            self.num_swap_preemptions += 1
            self._queues.wait_swapped(group)
        else:
            self._queues.wait_again(group)
        _logger.debug("preempted %s: %s", group.request_id, group.state.value)


def prefers_swap(mode: str, group: SequenceGroup, costs: StepCosts) -> bool:
    """Returns whether to copy a group's KV to the host instead of computing it again.

    Args:
        mode: `EngineConfig.preemption_mode`. "auto" chooses the faster way: to copy all blocks
            out and back in, or to compute the tokens that all sequences share once, and the
            rest of each sequence.
        group: a running group.
        costs: measured on this machine.
    """
    if mode != "auto":
        return mode == "swap"
    swap_s = 2 * len(set(group.held_blocks())) * costs.swapped_block_s
    return swap_s < _num_recomputed(group) * costs.prompt_token_s


def _num_recomputed(group: SequenceGroup) -> int:
    """Returns how many tokens to compute again. The shared prompt counts once."""
    own = sum(sequence.num_computed - group.num_prompt for sequence in group.running)
    return group.num_prompt + own
