"""Computes `TokenLogprobs`: of drawn tokens from a step's scores, of prompts from hidden states.

Nothing here waits for the device; `read` is called once the results are on the host. Memory is
bounded: a few times `_PART_ELEMENTS` numbers, however many tokens are reported.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import kernels
from baton.common.request.sampling_params import SamplingParams
from engine.batch import NO_LOGPROBS, ScheduledBatch, ScheduledChunk, TokenLogprobs
from engine.draw_params import DrawParams
from engine.models.layers import CausalModel
from engine.runtime.device import to_device
from engine.runtime.draws.rows import Rows
from engine.runtime.draws.sampler import Scores, draw_record, draw_table
from kernels.reference.sampling import scaled_logits
from kernels.row_state import DrawTable, draw_kinds

__all__ = [
    "DecodeReports",
    "DecodedTokens",
    "PromptTokens",
    "ReportedTokens",
    "part_bytes",
    "reports_model_logprobs",
]

_PART_ELEMENTS = 2**23


@dataclass(frozen=True, slots=True)
class ReportedTokens:
    """The drawn tokens of a step whose `TokenLogprobs` are reported; one or more.

    Attributes:
        nums: `[n]` int64; per drawn token, the number of likeliest tokens to report, or
            `NO_LOGPROBS`.
        tokens: `[m]` int64; indices of the reported tokens among the drawn ones.
        rows: `[m]` int64; the row of the scores that each was drawn from.
        draws: the parameters of the `m` draws, whose distributions are reported. No temperature
            is 0. None to report the model's own distributions.
        filtered: whether any of the draws filters.
    """

    nums: np.ndarray
    tokens: torch.Tensor
    rows: torch.Tensor
    draws: DrawTable | None
    filtered: bool

    @classmethod
    def among(
        cls,
        nums: np.ndarray,
        rows: np.ndarray,
        records: np.ndarray,
        device: torch.device,
        *,
        is_processed: bool,
    ) -> "ReportedTokens | None":
        """Returns the reported tokens; None if `nums` asks for none.

        Args:
            nums: `[n]` int64; as the attribute.
            rows: `[n]` int64; per drawn token, the row of the scores.
            records: `[n]` of `DRAW_RECORD`; the draws' parameters.
            device: the scores' device.
            is_processed: whether to report the distributions that tokens are drawn from.
        """
        chosen = np.flatnonzero(nums > NO_LOGPROBS)
        if not len(chosen):
            return None
        is_random, is_filtered = draw_kinds(records[chosen])
        # Greedy draws take the likeliest token of the unscaled logits.
        drawn = np.where(is_random, records[chosen], np.array(_UNCHANGED, records.dtype))
        return cls(
            nums=nums,
            tokens=to_device(chosen, device),
            rows=to_device(rows[chosen], device),
            draws=draw_table(drawn, device) if is_processed else None,
            filtered=bool(is_filtered.any()),
        )

    def compute(self, scores: Scores, raw: Scores, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Computes log-probabilities, ranks and likeliest tokens.

        Args:
            scores: the scores that tokens were drawn from.
            raw: the model's own scores of the same rows.
            tokens: `[n]` int64; the drawn tokens.

        Returns:
            Tensors on the scores' device, for `read`.
        """
        tokens = tokens.index_select(0, self.tokens)
        num_top, source = int(self.nums.max()), raw if self.draws is None else scores
        size = _part_size(source.logits.shape[-1])
        parts = []
        for part in _parts(len(tokens), size):
            rows = self.rows[part]
            logits = source.logits.index_select(0, rows)
            if self.draws is not None:
                maxima = source.maxima.index_select(0, rows)
                draws = self.draws.part(part)
                logits = scaled_logits(logits, maxima, draws, filtered=self.filtered)
            parts.append(_details(logits, tokens[part], num_top))
        return _joined(parts)

    def read(self, tensors: Sequence[torch.Tensor]) -> tuple[TokenLogprobs | None, ...]:
        """Returns one entry per drawn token; None for those that are not reported.

        Args:
            tensors: the tensors that `compute` returned, on the host.
        """
        nums = self.nums.tolist()
        details = _read(tensors, [num for num in nums if num > NO_LOGPROBS])
        return tuple(next(details) if num > NO_LOGPROBS else None for num in nums)


class DecodedTokens(NamedTuple):
    """The last fields of `StepOutput`: what a step's decode rows drew."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    details: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeReports:
    """The log-probabilities that decode rows report; reused while the same rows decode.

    Attributes:
        ranked: `[m]` int64; indices of the rows that are ranked.
        ranked_ids: the same on the device; None if there are none.
        reported: the rows whose `TokenLogprobs` are reported; None if there are none.
        keeps_raw: whether rules change logits that are reported as the model computed them.
    """

    ranked: np.ndarray
    ranked_ids: torch.Tensor | None
    reported: ReportedTokens | None
    keeps_raw: bool

    @classmethod
    def of(
        cls, rows: Rows, ids: np.ndarray, device: torch.device, *, is_processed: bool
    ) -> "DecodeReports":
        """Reads the reported tokens of the rows, which their chunks set.

        Args:
            rows: the state of all rows.
            ids: `[n]` int64; the rows that decode.
            device: the scores' device.
            is_processed: as in `ReportedTokens.among`.
        """
        is_ranked, nums = rows.wants_logprobs[ids], rows.num_logprobs[ids]
        records = rows.draws[ids]
        ranked = np.flatnonzero(is_ranked)
        reports_raw = reports_model_logprobs(is_ranked, nums, is_processed=is_processed)
        return cls(
            ranked=ranked,
            ranked_ids=to_device(ranked, device) if len(ranked) else None,
            reported=ReportedTokens.among(
                nums, np.arange(len(ids)), records, device, is_processed=is_processed
            ),
            keeps_raw=bool((reports_raw & rows.has_rules[ids]).any()),
        )

    def compute(self, scores: Scores, raw: Scores, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Computes what the rows report, and does not wait for the device.

        Args:
            scores: the rows' scores, from which the tokens were drawn.
            raw: the model's own scores of the rows.
            tokens: `[n]` int64.

        Returns:
            Tensors on the scores' device for `read`, `tokens` first.
        """
        tensors = [tokens]
        if self.ranked_ids is not None:
            of_ranked = tokens.index_select(0, self.ranked_ids)
            tensors.append(
                kernels.token_logprobs(raw.logits, raw.maxima, of_ranked, self.ranked_ids)
            )
        if self.reported is not None:
            tensors += self.reported.compute(scores, raw, tokens)
        return tensors

    def read(self, tensors: Sequence[torch.Tensor]) -> DecodedTokens:
        """Reads the tensors that `compute` returned, on the host; none if no row decodes."""
        tokens = tuple(tensors[0].tolist()) if tensors else ()
        if len(tensors) < 2:
            return DecodedTokens(tokens)
        logprobs: tuple[float, ...] = ()
        if len(self.ranked):
            of_all = np.full(len(tokens), math.nan)
            of_all[self.ranked] = tensors[1].numpy()
            logprobs = tuple(of_all.tolist())
        details = () if self.reported is None else self.reported.read(tensors[-2:])
        return DecodedTokens(tokens, logprobs, details)


class PromptTokens:
    """The tokens of a step's prompts whose `TokenLogprobs` are reported.

    Args:
        batch: the step.
    """

    def __init__(self, batch: ScheduledBatch) -> None:
        self._chunks = batch.chunks
        self._has_any = batch.reports_prompts

    def compute(self, model: CausalModel, hidden: torch.Tensor | None) -> list[torch.Tensor]:
        """Computes the logits of a few tokens at a time, and what `read` needs of them.

        Args:
            model: the model.
            hidden: `[num_tokens, hidden_size]`; the final hidden states of the step's tokens.
                None if there is nothing to report.

        Returns:
            Tensors on the device of `hidden`.
        """
        if not self._has_any:
            return []
        assert hidden is not None, "steps with targets compute all hidden states"
        return self._compute(model, hidden)

    @torch.inference_mode()
    def compute_part(self, model: CausalModel, hidden: torch.Tensor | None) -> None:
        """Computes a rank's part of the logits that `compute` needs on rank 0; see there."""
        if self._has_any:
            assert hidden is not None, "steps with targets compute all hidden states"
            for chunk, states in self._reporting(hidden):
                for part in self._parts(model, chunk):
                    model.logits(states[part])

    @torch.inference_mode()
    def _compute(self, model: CausalModel, hidden: torch.Tensor) -> list[torch.Tensor]:
        tensors = []
        for chunk, states in self._reporting(hidden):
            targets = to_device(np.array(chunk.prompt_targets, np.int64), hidden.device)
            parts = [
                _details(model.logits(states[part]), targets[part], chunk.num_prompt_logprobs)
                for part in self._parts(model, chunk)
            ]
            tensors += _joined(parts)
        return tensors

    def _reporting(self, hidden: torch.Tensor) -> Iterator[tuple[ScheduledChunk, torch.Tensor]]:
        """Yields the chunks with targets, and the hidden states before those."""
        first = 0
        for chunk in self._chunks:
            if chunk.prompt_targets:
                yield chunk, hidden[first : first + len(chunk.prompt_targets)]
            first += chunk.num_tokens

    @staticmethod
    def _parts(model: CausalModel, chunk: ScheduledChunk) -> Iterator[slice]:
        """Yields the targets of a chunk whose logits are computed at a time."""
        return _parts(len(chunk.prompt_targets), _part_size(model.config.vocab_size))

    def read(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[TokenLogprobs, ...], ...]:
        """Returns `StepOutput.prompt_details`.

        Args:
            tensors: the tensors that `compute` returned, on the host.
        """
        if not self._has_any:
            return ()
        remaining, details = iter(tensors), []
        for chunk in self._chunks:
            nums = [chunk.num_prompt_logprobs] * len(chunk.prompt_targets)
            pair = (next(remaining), next(remaining)) if nums else ()
            details.append(tuple(_read(pair, nums)))
        return tuple(details)


def reports_model_logprobs(
    wants_logprobs: np.ndarray, num_logprobs: np.ndarray, *, is_processed: bool
) -> np.ndarray:
    """Returns which draws report log-probabilities of the model's own distribution, `[n]` bool.

    Args:
        wants_logprobs: `[n]` bool; `ScheduledChunk.wants_logprobs`.
        num_logprobs: `[n]` int64; `ScheduledChunk.num_logprobs`.
        is_processed: as in `ReportedTokens.among`.
    """
    if is_processed:
        return wants_logprobs
    return wants_logprobs | (num_logprobs > NO_LOGPROBS)


# Neither scales nor filters.
_UNCHANGED = draw_record(DrawParams(SamplingParams(), seed=0))


def part_bytes() -> int:
    """Returns the size of the logits that are processed at a time for prompts, in bytes."""
    return _PART_ELEMENTS * torch.float32.itemsize


def _part_size(vocab_size: int) -> int:
    """Returns the number of rows of logits that are processed at a time."""
    return max(1, _PART_ELEMENTS // vocab_size)


def _parts(count: int, size: int) -> Iterator[slice]:
    """Yields slices of at most `size` that cover `count` entries."""
    return (slice(start, start + size) for start in range(0, count, size))


def _details(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[torch.Tensor]:
    """Computes log-probabilities, ranks and likeliest tokens.

    Args:
        logits: `[n, vocab]`.
        tokens: `[n]` int64; negative tokens count as token 0, and their results are not used.
        num_top: number of likeliest tokens.

    Returns:
        Log-probabilities `[n, 1 + num_top]` float32, those of `tokens` first; and the ranks of
        `tokens`, followed by the likeliest tokens, `[n, 1 + num_top]` int64.
    """
    drawn = logits.gather(-1, tokens.clamp(min=0).unsqueeze(-1))
    ranks = (logits > drawn).sum(dim=-1, keepdim=True) + 1
    top, top_ids = logits.topk(min(num_top, logits.shape[-1]), dim=-1)
    values = torch.cat((drawn, top), dim=-1) - logits.logsumexp(dim=-1, keepdim=True)
    return [values.float(), torch.cat((ranks, top_ids), dim=-1)]


def _joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(of_one_kind) for of_one_kind in zip(*parts, strict=True)]


def _read(tensors: Sequence[torch.Tensor], nums: Sequence[int]) -> Iterator[TokenLogprobs]:
    """Yields the results of `_details`, with `nums[i]` likeliest tokens for token i."""
    if not nums:
        return
    values, ids = (tensor.tolist() for tensor in tensors)
    for num, (drawn, *top), (rank, *top_ids) in zip(nums, values, ids, strict=True):
        yield TokenLogprobs(drawn, rank, tuple(top_ids[:num]), tuple(top[:num]))
