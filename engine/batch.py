"""The data that scheduler and runner exchange: frozen and plain, no tensors.

The runner keeps one *row* per running sequence: its block tables, its
position, its `DrawParams` and the token drawn last. A batch lists changes, so
its size grows with the changes and not with the number of running sequences:

- a `ScheduledChunk` runs tokens that the scheduler knows: a part of a prompt,
  or the tokens that a sequence needs to continue. It sets the row's position
  and, if it draws one token, the row's `DrawParams`;
- a row in `decode_rows` runs the token that it drew last, and draws the next.
  The scheduler need not know that token yet: batch k + 1 may be built and
  submitted while batch k computes.
"""

from dataclasses import dataclass

from baton.sampling_params import SamplingParams

__all__ = [
    "INVALID_TOKEN",
    "ChunkOutput",
    "DrawParams",
    "ScheduledBatch",
    "ScheduledChunk",
    "StepOutput",
    "TableUpdate",
    "candidate_seed",
]

_MASK64 = 2**64 - 1

INVALID_TOKEN = -1
"""Reported if logits are not finite: the engine ends that request with `InternalError`."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The sampling parameters of one row: how its tokens are drawn from their logits."""

    temperature: float
    top_k: int
    top_p: float
    seed: int

    @classmethod
    def of_candidate(cls, params: SamplingParams, index: int) -> "DrawParams":
        """The parameters that candidate `index` of a request draws with."""
        assert params.seed is not None, "a request's seed is set before an engine gets it"
        return cls(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=candidate_seed(params.seed, index),
        )


def candidate_seed(seed: int, index: int) -> int:
    """The seed that candidate `index` of a request draws with; candidate 0 uses the request's.

    The value is SplitMix64's output function (Steele et al. 2014) of the request's seed
    plus `index` times its increment, so the seeds of a request's candidates differ from each
    other, whatever the request's seed is.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """From this step on, a row's block table reads `block_ids` from `first_index` on.

    Entries before `first_index` stay unless the row belongs to a new sequence. A new
    sequence's lie behind every window of the layer group and are not read.

    Attributes:
        row: the row whose table changes.
        layer_group: the layer group whose table changes (`KvCacheSpec`).
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
        row: the sequence's row.
        token_ids: the tokens to run, one or more.
        start_position: position of the first of them.
        draws: parameters for drawing the token after `token_ids`, one entry per
            candidate: candidates of one prompt draw from the same logits. Empty
            if nothing is drawn. The noise position is
            `start_position + len(token_ids)`.
        num_top: report this many most likely next tokens instead (beam search).
        wants_logprobs: report the drawn tokens' log-probabilities too, here
            and while the row decodes.
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
        decode_rows: rows that run the token they drew last; none of them has a
            chunk. The same object as in the previous batch if nothing changed.
        table_updates: changes of the rows' block tables.
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
        """Tokens to run, over all sequences; 0 if the batch only swaps."""
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decode_rows)


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The result of a chunk that draws tokens or reports the most likely ones.

    Attributes:
        token_ids: one per entry of `draws`, or the `num_top` most likely, the
            likeliest first. Each is `INVALID_TOKEN` if logits are not finite.
        logprobs: log-softmax of the raw logits at `token_ids`, if requested.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step.

    Attributes:
        step: the batch's number.
        chunks: one per chunk; None for a chunk that needs no logits.
        decoded: one token per row of `decode_rows`.
        decoded_logprobs: log-probabilities of `decoded` if requested for any of
            those rows, with NaN for the other rows; else empty.
    """

    step: int
    chunks: tuple[ChunkOutput | None, ...] = ()
    decoded: tuple[int, ...] = ()
    decoded_logprobs: tuple[float, ...] = ()
