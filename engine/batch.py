"""What crosses between scheduler and runner: frozen plain data, no tensors.

The runner keeps one *row* per running sequence: its block tables, its
position, how its tokens are drawn and the token drawn last. A batch says what
changes; so its size grows with the changes, not with what runs:

- a `ScheduledChunk` runs tokens that the scheduler knows: a part of a prompt,
  or what a sequence needs to go on. It sets the row's position, and where it
  draws one token, the row's way of drawing;
- a row in `decode_rows` runs the token that it drew last, and draws the next.
  The scheduler need not know that token yet: batch k + 1 may be built, and
  handed over, while batch k computes.
"""

from dataclasses import dataclass

__all__ = [
    "INVALID_TOKEN",
    "ChunkOutput",
    "DrawParams",
    "ScheduledBatch",
    "ScheduledChunk",
    "StepOutput",
    "TableUpdate",
]

INVALID_TOKEN = -1
"""Drawn where logits are not finite: the engine ends that request with `InternalError`."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How tokens are drawn from their logits."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """From this step on, a row's block table reads `block_ids` from `first_index` on.

    Entries before `first_index` stay, where the row is not a new sequence's;
    where it is, they lie behind every window of the group and are not read.

    Attributes:
        row: whose table.
        layer_group: which layer group's table (`KvCacheSpec`).
        first_index: block index of the first of `block_ids`.
        block_ids: ids in the pool.
    """

    row: int
    layer_group: int
    first_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Known tokens of one sequence.

    The KV of all positions before `start_position` that attention sees is in
    the row's blocks already; the tables cover the chunk's own slots.

    Attributes:
        row: the sequence's.
        token_ids: the tokens to run, one or more.
        start_position: position of the first of them.
        draws: how to draw what follows the last of `token_ids`, one entry per
            token: candidates of one prompt draw from the same logits. Empty
            where nothing is drawn. The noise position is
            `start_position + len(token_ids)`.
        num_top: report this many most likely next tokens instead (beam search).
        wants_logprobs: report the drawn tokens' log-probabilities too, here
            and while the row decodes on.
    """

    row: int
    token_ids: tuple[int, ...]
    start_position: int
    draws: tuple[DrawParams, ...] = ()
    num_top: int = 0
    wants_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return len(self.token_ids)

    @property
    def needs_logits(self) -> bool:
        """Whether it draws or reports anything."""
        return bool(self.draws) or self.num_top > 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work for the runner, in this order: `table_updates`, `swap_ins`,
    `swap_outs`, `block_copies`, then the forward pass and the draws.

    Attributes:
        step: counts batches, from 1.
        chunks: known tokens, at most one chunk per row.
        decode_rows: rows that run the token they drew last, none of which has
            a chunk. The same object as in the batch before if nothing changed.
        table_updates: what changes in the rows' block tables.
        swap_ins: (host block, block) to copy into the pool.
        swap_outs: (block, host block) to copy out of it.
        block_copies: (source, target) blocks; all sources are read before any
            target is written.
    """

    step: int
    chunks: tuple[ScheduledChunk, ...] = ()
    decode_rows: tuple[int, ...] = ()
    table_updates: tuple[TableUpdate, ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    swap_outs: tuple[tuple[int, int], ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens to run, over all sequences; 0 where the batch only swaps."""
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decode_rows)


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """What a chunk that draws, or reports the most likely tokens, brought.

    Attributes:
        token_ids: one per entry of `draws`, or the `num_top` most likely, the
            likeliest first. `INVALID_TOKEN` each where logits are not finite.
        logprobs: log-softmax of the raw logits at `token_ids`, where asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought.

    Attributes:
        step: the batch's.
        chunks: one per chunk; None where it asked for nothing.
        decoded: one token per row of `decode_rows`.
        decoded_logprobs: of `decoded`, if any of those rows wants them; else
            empty. NaN for rows that do not.
    """

    step: int
    chunks: tuple[ChunkOutput | None, ...] = ()
    decoded: tuple[int, ...] = ()
    decoded_logprobs: tuple[float, ...] = ()
