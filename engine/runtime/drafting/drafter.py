"""`Drafter`: drafts the next tokens of sequences with a model, behind a step of the served one.

The draft tokens are checked in the next step (`engine.speculation.drafts`). A draft token is drawn
with the parameters and the noise of its place, as the served model's token there will be, so that
two models that agree on probabilities mostly draw the same token at any temperature.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.common.request.sampling_params import SamplingParams
from engine.batch import ChunkOutput, DraftWork, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.draw_params import DrawParams
from engine.runner import ModelInfo
from engine.runtime.device import current, wait_for
from engine.runtime.draws.rows import Rows
from engine.runtime.draws.sampler import Scores, draw_record, draw_tokens
from engine.runtime.weights.loader import LoadedModel
from engine.speculative_config import MAX_SPECULATIVE_TOKENS
from kernels import DRAW_RECORD

__all__ = ["NO_ROWS", "Drafter", "Drawn", "ProposalJob"]

NO_ROWS = np.zeros(0, np.int64)
"""The rows that decode in a step of a drafter."""

_logger = logging.getLogger("baton.engine")

_DUMMY_DRAW = DrawParams(SamplingParams(), seed=0)
_NUM_TIMED = 4


@dataclass(frozen=True, slots=True)
class ProposalJob:
    """A chunk that draft tokens are made for.

    Attributes:
        index: index of the chunk in its batch.
        chunk: the chunk.
        work: what to do for it.
        table: `[max_blocks]` int32; the row's blocks at the time of its step.
        first_state: index of the chunk's last known token among the tokens whose states the step
            keeps; its drafts follow.
    """

    index: int
    chunk: ScheduledChunk
    work: DraftWork
    table: np.ndarray
    first_state: int

    @property
    def draw(self) -> DrawParams:
        """The parameters that its draft tokens are drawn with."""
        return self.chunk.draws[0]


Drawn = tuple[ProposalJob, tuple[int, ...]]
"""A job, and the tokens that its step has drawn, one or more."""


class Drafter(ABC):
    """Drafts tokens for the sequences of an engine with one rank.

    Args:
        config: the engine's flags.
        served: the model to draft for.
        info: its properties.
        device: device of both models.

    Attributes:
        kept_layers: the states of the served model that it reads, as in `KeptStates.layers`.
        block_bytes: bytes that it needs for each block of the served model's pool.
        fixed_bytes: bytes that it needs, however many blocks there are.
        max_proposals: the most tokens that it drafts for a sequence after a step.
    """

    kept_layers: tuple[int, ...] = ()
    block_bytes: int = 0
    fixed_bytes: int = 0
    max_proposals: int = MAX_SPECULATIVE_TOKENS
    _layer_group: int = 0  # the layer group of `ProposalJob.table`

    def __init__(
        self, config: EngineConfig, served: LoadedModel, info: ModelInfo, device: torch.device
    ) -> None:
        self._config, self._device = config, device
        self._max_blocks = -(-info.max_model_len // config.block_size)
        self._num_served = served.vocab_size
        self._hidden_size = served.model.config.hidden_size
        self._dtype: torch.dtype = getattr(torch, served.dtype)

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocates its pool of KV, if it has any.

        Args:
            num_blocks: number of blocks of the served model's pool.

        Raises:
            ConfigurationError: the device does not have that much memory.
        """

    @abstractmethod
    def time_work(self) -> tuple[float, float]:
        """Measures the seconds in which it runs one more known token, and in which it drafts one,
        both at the beginning of one sequence.
        """

    def jobs_of(self, batch: ScheduledBatch, rows: Rows) -> list[ProposalJob]:
        """Returns the chunks of a step that draft tokens are made for.

        Args:
            batch: the step.
            rows: the rows, with the step's table updates applied.
        """
        jobs, num_states = [], 0
        for index, chunk in enumerate(batch.chunks):
            if chunk.draft_work is not None:
                table = rows.tables[self._layer_group, chunk.row].copy()
                jobs.append(ProposalJob(index, chunk, chunk.draft_work, table, num_states))
            if chunk.needs_logits:
                num_states += 1 + chunk.num_drafts
        return jobs

    @torch.inference_mode()
    def propose(
        self,
        jobs: Sequence[ProposalJob],
        outputs: Sequence[ChunkOutput | None],
        states: torch.Tensor | None,
    ) -> list[ChunkOutput | None]:
        """Drafts the tokens that follow those which a step has drawn. If that fails, the step is
        still good: the error is logged, and its sequences get no draft tokens.

        Args:
            jobs: as `jobs_of` has returned them for the step.
            outputs: one per chunk of the step.
            states: `[len(kept_layers), num_logit_rows, hidden_size]`; the states that the step has
                kept; None if `kept_layers` is empty.

        Returns:
            The outputs with the draft tokens.
        """
        drawing, proposed = list[Drawn](), list(outputs)
        for job in jobs:
            output = outputs[job.index]
            assert output is not None, "a chunk with draft tokens draws a token"
            if min(output.token_ids) >= 0:
                drawing.append((job, output.token_ids))
        if not drawing:
            return proposed
        try:
            with current(self._device):  # the thread that reads a step's tokens may have another
                draft_tokens = self._draft(drawing, states)
        except Exception:
            _logger.exception("drafting has failed; the step's sequences get no draft tokens")
            self._forget()
            return proposed
        for (job, _), of_job in zip(drawing, draft_tokens, strict=True):
            output = proposed[job.index]
            assert output is not None
            proposed[job.index] = replace(output, proposals=self._valid(of_job))
        return proposed

    @abstractmethod
    def _draft(
        self, drawing: Sequence[Drawn], states: torch.Tensor | None
    ) -> Sequence[Sequence[int]]:
        """Returns the draft tokens of each job, at most `num_proposals` of its work.

        Args:
            drawing: the jobs, one or more.
            states: as in `propose`.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Drops the state of all sequences, as their KV may be wrong."""

    @torch.inference_mode()
    def _time(self, work: DraftWork) -> float:
        """Measures the seconds of some work, whose KV goes to block 0 or to row 0."""
        chunk = ScheduledChunk(0, (0,), 0, (_DUMMY_DRAW,))
        job = ProposalJob(0, chunk, work, np.zeros(self._max_blocks, np.int32), 0)
        shape = len(self.kept_layers), 1, self._hidden_size
        states = torch.zeros(shape, dtype=self._dtype, device=self._device)
        durations_s = []
        for _ in range(_NUM_TIMED):  # the first time compiles and records
            start = time.perf_counter()
            self._draft([(job, (0,))], states)
            wait_for(self._device)
            durations_s.append(time.perf_counter() - start)
            self._forget()
        return min(durations_s)

    def _draw(
        self, scores: Scores, jobs: Sequence[ProposalJob], positions: Sequence[int]
    ) -> list[int]:
        """Draws one token from each row of the scores.

        Args:
            scores: `[n]` rows.
            jobs: the job of each.
            positions: the positions of the tokens.
        """
        records = np.array([draw_record(job.draw) for job in jobs], DRAW_RECORD)
        tokens = draw_tokens(scores, records, range(len(jobs)), np.array(positions, np.int64))
        drawn: list[int] = tokens.tolist()
        return drawn

    def _valid(self, draft_tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the draft tokens before the first that the served model does not have."""
        for index, token in enumerate(draft_tokens):
            if not 0 <= token < self._num_served:
                return tuple(draft_tokens[:index])
        return tuple(draft_tokens)
