"""How a running request gives way: recompute or swap. Pure."""

from engine.runner import StepCosts
from engine.sequence_group import SequenceGroup

__all__ = ["prefers_swap"]


def prefers_swap(mode: str, group: SequenceGroup, costs: StepCosts) -> bool:
    """Whether a group's KV should go to the host rather than be computed again.

    Args:
        mode: `EngineConfig.preemption_mode`. In "auto" it is the quicker of
            copying all blocks out and back in, and computing what the group's
            sequences have in common once and the rest of each.
        group: the group, running.
        costs: as measured on this machine.
    """
    if mode != "auto":
        return mode == "swap"
    swap_s = 2 * len(set(group.held_blocks())) * costs.swapped_block_s
    return swap_s < _num_recomputed(group) * costs.prompt_token_s


def _num_recomputed(group: SequenceGroup) -> int:
    """Tokens to compute again; the prompt, which all share, counts once."""
    own = sum(sequence.num_computed - group.num_prompt for sequence in group.running)
    return group.num_prompt + own
