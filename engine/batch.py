"""The data that scheduler and runner exchange: frozen and plain, no tensors.

The runner keeps one *row* per running sequence: its block tables, its
position, its `DrawParams` and the token drawn last. A batch lists changes, so
its size grows with the changes and not with the number of running sequences:

- a `ScheduledChunk` runs tokens that the scheduler knows: a part of a prompt,
  or the tokens that a sequence needs to continue. It sets the row's position
  and, if it draws one token, the row's `DrawParams`. Draft tokens that
  follow ("drafts") may come after them, to draw several tokens in one step;
- a row in `decode_rows` runs the token that it drew last, and draws the next.
  The scheduler need not know that token yet: batch k + 1 may be built and
  submitted while batch k computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.draw_params import DrawParams, LogitRules

__all__ = [
    "INVALID_TOKEN",
    "NO_LOGPROBS",
    "NO_TOKEN",
    "PROCESSOR_FAILED",
    "ChunkOutput",
    "DraftWork",
    "ProcessedText",
    "ScheduledBatch",
    "ScheduledChunk",
    "StepOutput",
    "TableUpdate",
    "TokenLogprobs",
]

INVALID_TOKEN = -1
"""Reported if logits are not finite: the engine ends that request with `InternalError`."""

NO_LOGPROBS = -1
"""The number of likeliest tokens to report if no `TokenLogprobs` are to be reported."""

NO_TOKEN = -2
"""Reported if a row's rules leave no token: the engine ends that request with
`InvalidArgumentError`."""

PROCESSOR_FAILED = -3
"""Reported if a logits processor raised an exception, or left no finite logits or some that are
NaN or infinite: the engine ends that request with `InternalError`."""


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
class ProcessedText:
    """The text of a sequence whose logits the engine's logits processors change.

    Attributes:
        sequence_id: the same in all chunks of one sequence, and of no other sequence.
        args: `SamplingParams.extra_args`.
        prompt_token_ids: the tokens of the prompt.
        output_token_ids: all tokens generated so far.
    """

    sequence_id: tuple[int, int]
    args: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftWork:
    """The work of a draft model, or of draft heads, for a sequence after a step.

    Attributes:
        first: position of the first of `token_ids`; the model has run the tokens before them in
            this row.
        token_ids: tokens before those of the chunk that it runs; empty for heads, which run only
            tokens whose states the step computes.
        num_proposals: number of draft tokens after the drawn ones; the row's tables cover
            so many positions after the chunk. 0 if `token_ids` end before the chunk: later steps
            run the tokens between them.
        cache_salt: only sequences with the same salt may share KV.
    """

    first: int
    token_ids: tuple[int, ...]
    num_proposals: int
    cache_salt: str = ""


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
        num_drafts: number of the last `token_ids` that are draft tokens, less than all. Then
            `draws` has one entry, which draws the token after each known or draft token in turn, as
            long as the draft tokens are equal to what is drawn. The row must not decode afterwards.
        num_top: report this many most likely next tokens instead (beam search).
        wants_logprobs: report the drawn tokens' log-probabilities too, for
            ranking, here and while the row decodes.
        num_logprobs: report `TokenLogprobs` of the drawn tokens, with this many
            likeliest tokens, here and while the row decodes; or `NO_LOGPROBS`.
        prompt_targets: the tokens of the prompt that follow the first
            `len(prompt_targets)` of `token_ids`; report `TokenLogprobs` of them.
        num_prompt_logprobs: number of likeliest tokens in these reports.
        history: the sequence's tokens before `token_ids` if the rules of `draws`, which are the
            same in all of them, read the history; else empty. Candidates of one request may
            share the tuple, but not the rules: the runner keeps what it has stored for them.
        mask: the tokens that may be drawn after `token_ids`, without drafts: bit i % 32 of
            little-endian 32-bit word i // 32 for token i. None: all. The row must not decode
            afterwards.
        draft_masks: one mask for each of the draft tokens, of the tokens that may be drawn after
            it. Empty: all.
        processed: the sequence with `token_ids`, if logits processors change the logits after
            them. The row must not decode afterwards.
        draft_work: what a draft model does after the step. The row must not decode afterwards.
    """

    row: int
    token_ids: tuple[int, ...]
    start_position: int
    draws: tuple[DrawParams, ...] = ()
    num_top: int = 0
    num_drafts: int = 0
    wants_logprobs: bool = False
    num_logprobs: int = NO_LOGPROBS
    prompt_targets: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    history: tuple[int, ...] = ()
    mask: bytes | None = None
    draft_masks: tuple[bytes | None, ...] = ()
    processed: ProcessedText | None = None
    draft_work: DraftWork | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return len(self.token_ids)

    @property
    def num_drafted_tokens(self) -> int:
        """Known tokens that a draft model runs; less those that it has drafted."""
        if self.draft_work is None:
            return 0
        num_known = self.num_tokens - self.num_drafts if self.draft_work.num_proposals else 0
        return len(self.draft_work.token_ids) + num_known

    @property
    def end(self) -> int:
        """Position after the last known token."""
        return self.start_position + len(self.token_ids) - self.num_drafts

    @property
    def draws_for_row(self) -> bool:
        """Whether it draws the one token that its row may run next."""
        return len(self.draws) == 1 and not self.num_drafts

    def without_drafts(self) -> tuple["ScheduledChunk", ...]:
        """Returns one chunk for each token that it may draw, whose last token is known."""
        if not self.num_drafts:
            return (self,)
        num_known = len(self.token_ids) - self.num_drafts
        masks = self.mask, *(self.draft_masks or (None,) * self.num_drafts)
        return tuple(
            replace(
                self,
                token_ids=self.token_ids[: num_known + index],
                num_drafts=0,
                mask=mask,
                draft_masks=(),
            )
            for index, mask in enumerate(masks)
        )

    @property
    def rules(self) -> LogitRules | None:
        """The rules that the logits after `token_ids` must follow."""
        return self.draws[0].rules if self.draws else None

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's own."""
        return self.rules is not None or self.mask is not None

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
        return sum([chunk.num_tokens for chunk in self.chunks]) + len(self.decode_rows)

    @property
    def num_drafted_tokens(self) -> int:
        """Known tokens that a draft model runs, over all sequences."""
        return sum([chunk.num_drafted_tokens for chunk in self.chunks])

    @property
    def num_proposals(self) -> int:
        """Number of draft tokens that a draft model makes one after the other."""
        works = [chunk.draft_work for chunk in self.chunks if chunk.draft_work is not None]
        return max([work.num_proposals for work in works], default=0)

    @property
    def reports_prompts(self) -> bool:
        """Whether any chunk reports `TokenLogprobs` of its prompt."""
        return any(chunk.prompt_targets for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at the place of one token; the fields have the wire's names.

    `EngineConfig.logprobs_mode` says of which distribution those of drawn tokens are;
    those of the prompt's tokens are always of the model's own.

    Attributes:
        logprob: the token's own.
        rank: the token's rank in the vocabulary: 1 and the number of likelier tokens.
        top_token_ids: the likeliest tokens, the likeliest first.
        top_logprobs: their log-probabilities.
    """

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """The result of a chunk that draws tokens or reports the most likely ones.

    Attributes:
        token_ids: one per entry of `draws`, or the `num_top` most likely, the
            likeliest first. Each is `INVALID_TOKEN` if logits are not finite, `NO_TOKEN` if
            the rules leave none, and `PROCESSOR_FAILED` if a logits processor failed. If the
            chunk has drafts: the tokens drawn one after the other, one more than drafts are equal
            to them, or as many if that last one is negative.
        logprobs: log-softmax of the model's own logits at `token_ids`, if `wants_logprobs`
            or `num_top` is set.
        details: one per entry of `token_ids`, if the chunk's `num_logprobs` asks for them.
        proposals: draft tokens after `token_ids`, at most as many as the chunk asks for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    details: tuple[TokenLogprobs, ...] = ()
    proposals: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step.

    Attributes:
        step: the batch's number.
        chunks: one per chunk; None for a chunk that needs no logits.
        decoded: one token per row of `decode_rows`.
        decoded_logprobs: log-probabilities of `decoded` if any of those rows
            `wants_logprobs`, with NaN for the other rows; else empty.
        decoded_details: one per row of `decode_rows` if the `num_logprobs` of any of them
            asks for it, with None for the other rows; else empty.
        prompt_details: per chunk, one per entry of its `prompt_targets`; empty if no
            chunk has any.
    """

    step: int
    chunks: tuple[ChunkOutput | None, ...] = ()
    decoded: tuple[int, ...] = ()
    decoded_logprobs: tuple[float, ...] = ()
    decoded_details: tuple[TokenLogprobs | None, ...] = ()
    prompt_details: tuple[tuple[TokenLogprobs, ...], ...] = ()
