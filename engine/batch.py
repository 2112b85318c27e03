"""What crosses between scheduler and runner: frozen plain data, no tensors."""

from dataclasses import dataclass

__all__ = ["DrawParams", "ScheduledBatch", "ScheduledSequence", "StepOutput"]


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one token is drawn from its logits."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    Attributes:
        request_id: whose it is.
        token_ids: the tokens to run, one or more.
        start_position: position of the first of them; the KV of all positions
            before it is in the block table already.
        block_table: ids of the blocks of positions 0 and up; covers at least
            `start_position + len(token_ids)` slots.
        draw: how to draw the token that follows the last of `token_ids`; None
            where the step ends inside the prompt and no token is drawn. The
            noise position is `start_position + len(token_ids)`.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start_position: int
    block_table: tuple[int, ...]
    draw: DrawParams | None

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work for the runner; `sequences` is not empty.

    `block_copies` are (source, target) block ids, to be copied before the
    forward pass.
    """

    step: int
    sequences: tuple[ScheduledSequence, ...]
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences."""
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought: one drawn token per sequence, None where none was asked.

    A None where the sequence has `draw` set means that its logits were not
    finite: the engine ends that request with `InternalError`.
    """

    step: int
    token_ids: tuple[int | None, ...]
