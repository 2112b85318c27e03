"""Heads that draft a sequence's next tokens from the served model's hidden states.

`MedusaDrafter` drafts several places from one state. `EagleDrafter` drafts one after the other,
with a layer that attends to the positions before. Only positions of which the engine has computed
states are there: those since it began to draft for the sequence. The states of prompts are not
carried from the machine that has computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

import kernels
from baton.common.errors import ConfigurationError
from engine.batch import DraftWork, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.models.heads import Eagle3Head, EagleHead
from engine.runner import ModelInfo
from engine.runtime.device import to_device
from engine.runtime.drafting.drafter import NO_ROWS, Drafter, Drawn, ProposalJob
from engine.runtime.drafting.head_checkpoint import load_eagle, load_eagle3, load_medusa
from engine.runtime.draws.rows import Rows
from engine.runtime.draws.sampler import Scores
from engine.runtime.forward.batch_inputs import KeptMemory, StepInputs
from engine.runtime.forward.recorded_steps import RecordedSteps
from engine.runtime.kv_pool import allocate_pool
from engine.runtime.weights.loader import LoadedModel
from kvstore.layout import KvLayout
from kvstore.mover.pool_objects import view_blocks

__all__ = ["EagleDrafter", "MedusaDrafter"]

_WINDOW = 256  # tokens that an EAGLE head sees
_NUM_TIMED = 4


class _HeadDrafter(Drafter):
    """A drafter that reads states of the served model, and runs only the tokens of a step."""

    _draft_vocabulary: torch.Tensor | None  # `[n]` int64 token ids; None for all
    _wide: torch.Tensor | None = None  # memory for logits of all tokens

    @override
    def time_work(self) -> tuple[float, float]:
        num_drafts = max(1, min(_NUM_TIMED, self._config.max_drafts, self.max_proposals))
        num_drafts = min(num_drafts, self._max_blocks * self._config.block_size - 1)
        return 0.0, self._time(DraftWork(0, (), num_drafts)) / num_drafts

    def _scores_of(self, logits: torch.Tensor) -> Scores:
        """Returns scores of all tokens of the served model from logits of those that the head can
        draft, so that each token is drawn with its own noise. The next call may overwrite them.
        """
        if self._draft_vocabulary is not None:
            logits = self._widen(logits, self._draft_vocabulary)
        return Scores(logits, *kernels.row_maxima(logits))

    def _widen(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits of all tokens, which are -inf but for those of `token_ids`."""
        if self._wide is None or len(self._wide) < len(logits):
            shape = len(logits), self._num_served
            self._wide = torch.full(shape, -torch.inf, dtype=logits.dtype, device=logits.device)
        wide = self._wide[: len(logits)]
        if wide.device.type == "cpu":
            # torch would divide the copy among threads of its own, which go on to spin for
            # milliseconds and slow the next step down.
            wide.numpy()[:, token_ids.numpy()] = logits.numpy()
        else:
            wide.index_copy_(1, token_ids, logits)
        return wide


class MedusaDrafter(_HeadDrafter):
    """Drafts with Medusa heads.

    Args:
        config: the engine's flags.
        served: the model to draft for.
        info: its properties.
        device: the device of both.
        name: the checkpoint of the heads.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: LoadedModel,
        info: ModelInfo,
        device: torch.device,
        name: str,
    ) -> None:
        super().__init__(config, served, info, device)
        self._heads, self._draft_vocabulary = load_medusa(name, served, device)
        self.max_proposals = len(self._heads.lm_heads)
        self.kept_layers = (served.model.config.num_layers,)

    @override
    def allocate(self, num_blocks: int) -> None:
        """Does nothing: the heads have no KV."""

    @override
    def _draft(
        self, drawing: Sequence[Drawn], states: torch.Tensor | None
    ) -> Sequence[Sequence[int]]:
        assert states is not None
        # A head's first place is that after the token which was drawn last.
        last = [job.first_state + len(tokens) - 1 for job, tokens in drawing]
        ends = [job.chunk.end + len(tokens) for job, tokens in drawing]
        num_heads = max(job.work.num_proposals for job, _ in drawing)
        rows = to_device(np.array(last, np.int64), states.device)
        rows_states, jobs = states[0].index_select(0, rows), [job for job, _ in drawing]
        by_place = [
            self._draw(
                self._scores_of(self._heads(rows_states, place)),
                jobs,
                [end + place for end in ends],
            )
            for place in range(num_heads)
        ]
        return [
            [tokens[index] for tokens in by_place[: job.work.num_proposals]]
            for index, (job, _) in enumerate(drawing)
        ]

    @override
    def _forget(self) -> None:
        """Does nothing: the heads keep no state of sequences."""


@dataclass(slots=True, eq=False)
class _HeadsRun:
    """The state of one job.

    Attributes:
        job: the job.
        tokens: the tokens that its step has drawn.
        start: the head's position of the first of them.
        draft_tokens: the draft tokens so far.
    """

    job: ProposalJob
    tokens: tuple[int, ...]
    start: int
    draft_tokens: list[int]

    @property
    def lacks_drafts(self) -> bool:
        return len(self.draft_tokens) < self.job.work.num_proposals

    @property
    def next_position(self) -> int:
        """The served model's position of the next draft token."""
        return self.job.chunk.end + len(self.tokens) + len(self.draft_tokens)

    def known_chunk(self) -> ScheduledChunk:
        return ScheduledChunk(self.job.chunk.row, self.tokens, self.start, self.job.chunk.draws)

    def draft_chunk(self) -> ScheduledChunk:
        position = self.start + len(self.tokens) + len(self.draft_tokens) - 1
        tokens = tuple(self.draft_tokens[-1:])
        return ScheduledChunk(self.job.chunk.row, tokens, position, self.job.chunk.draws)


@dataclass(frozen=True, slots=True)
class _Reached:
    """The position of a row's next token.

    Attributes:
        served: its position for the served model.
        own: its position for the head.
    """

    served: int
    own: int


class EagleDrafter(_HeadDrafter):
    """Drafts with a head of EAGLE or EAGLE-3.

    Each row has as many blocks of its own as the head's window needs, and uses them in turn.

    Args:
        config: the engine's flags.
        served: the model to draft for.
        info: its properties.
        device: the device of both.
        name: the checkpoint of the head.
        is_eagle3: whether it is one of EAGLE-3.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: LoadedModel,
        info: ModelInfo,
        device: torch.device,
        name: str,
        *,
        is_eagle3: bool,
    ) -> None:
        super().__init__(config, served, info, device)
        self._draft_vocabulary = None
        self._head: EagleHead | Eagle3Head
        if is_eagle3:
            self._head, self.kept_layers, self._draft_vocabulary = load_eagle3(
                name, served, _WINDOW, device
            )
        else:
            self._head, self.kept_layers = load_eagle(name, served, _WINDOW, device)
        embedding = served.model.word_embedding
        assert embedding is not None, "the head was loaded for it"
        self._embedding = embedding
        size, head_config = config.block_size, self._head.config
        self._layout = KvLayout(
            num_layers=1,
            num_kv_heads=head_config.num_kv_heads,
            block_size=size,
            head_dim=head_config.head_dim,
            dtype=served.dtype,
        )
        # The tokens of one step must not overwrite what its first token sees.
        num_seen = _WINDOW + 2 * (1 + config.max_drafts)
        self._num_ring = min(self._max_blocks, 1 + -(-num_seen // size))
        self._num_blocks = config.max_running * self._num_ring
        self._max_tokens = min(config.max_step_tokens, config.max_running * (1 + config.max_drafts))
        input_bytes = self._max_tokens * 2 * self._hidden_size * self._dtype.itemsize
        self.fixed_bytes = self._num_blocks * self._layout.block_bytes + input_bytes
        self._rows = Rows(1, config.max_running, self._max_blocks)
        first = np.arange(config.max_running)[:, None] * self._num_ring
        self._rows.tables[0] = first + np.arange(self._max_blocks) % self._num_ring
        self._reached: dict[int, _Reached] = {}  # by row

    @override
    def allocate(self, num_blocks: int) -> None:
        width, sizes = self._hidden_size, (self._max_tokens, self._config.block_size)
        try:
            pool = allocate_pool(self._num_blocks, self._layout, self._device)
            self._inputs = torch.empty(
                (self._max_tokens, 2 * width), dtype=self._dtype, device=self._device
            )
        except (ConfigurationError, RuntimeError) as error:
            raise ConfigurationError(
                f"cannot allocate {self.fixed_bytes // 2**20} MiB for the states of an EAGLE head; "
                "set --max-num-seqs lower"
            ) from error
        inputs = StepInputs(self._rows, *sizes, self._device, self._inputs)
        kept = KeptMemory.allocate((1,), inputs.max_logit_rows, width, self._dtype, self._device)
        views = view_blocks(pool, self._layout)
        self._steps = RecordedSteps(self._head, views, [(0, 0)], inputs, kept)

    @override
    def _draft(
        self, drawing: Sequence[Drawn], states: torch.Tensor | None
    ) -> Sequence[Sequence[int]]:
        assert states is not None
        runs = [self._start(job, tokens) for job, tokens in drawing]
        drafting, head_states = runs, self._run_known(runs, states)
        while left := [index for index, run in enumerate(drafting) if run.lacks_drafts]:
            if len(left) < len(drafting):
                drafting = [drafting[index] for index in left]
                head_states = head_states.index_select(
                    0, to_device(np.array(left, np.int64), self._device)
                )
            self._fill([run.draft_chunk() for run in drafting], head_states)
            head_states = self._run_step(drafting)
        return [run.draft_tokens for run in runs]

    @override
    def _forget(self) -> None:
        self._reached.clear()

    def _start(self, job: ProposalJob, tokens: tuple[int, ...]) -> _HeadsRun:
        """Finds the head's position: it goes on if it has seen the states of all tokens before the
        last known one. A served model with states runs accepted draft tokens again, so there may
        be several known tokens.
        """
        chunk, start = job.chunk, 0
        reached = self._reached.get(chunk.row)
        is_same = job.work.first == chunk.start_position  # as the sequence drafted for last
        if reached is not None and is_same and reached.served == chunk.end - 1:
            start = reached.own
        num_places = self._max_blocks * self._layout.block_size
        if start + len(tokens) + job.work.num_proposals > num_places:
            start = 0
        end = chunk.end + len(tokens) - 1
        self._reached[chunk.row] = _Reached(end, start + len(tokens))
        return _HeadsRun(job, tokens, start, [])

    def _run_known(self, runs: Sequence[_HeadsRun], states: torch.Tensor) -> torch.Tensor:
        """Runs the tokens that the step has drawn, with the served model's states; returns the
        head's own states, as `_run_step` does.
        """
        rows = np.concatenate(
            [run.job.first_state + np.arange(len(run.tokens)) for run in runs], dtype=np.int64
        )
        of_tokens = states.index_select(1, to_device(rows, states.device))
        if isinstance(self._head, Eagle3Head):
            mixed = self._head.mix(torch.cat(tuple(of_tokens), dim=1))
        else:
            mixed = of_tokens[0]
        self._fill([run.known_chunk() for run in runs], mixed)
        return self._run_step(runs)

    def _fill(self, chunks: Sequence[ScheduledChunk], states: torch.Tensor) -> None:
        """Fills the inputs of the next step with the tokens' embeddings and states."""
        self._steps.inputs.fill(ScheduledBatch(0, tuple(chunks)), self._rows, NO_ROWS)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        # A draft token is negative if its logits were not finite.
        ids = to_device(np.maximum(token_ids, 0), self._device)
        target = self._inputs[: len(token_ids)]
        target[:, : self._hidden_size] = self._embedding(ids)
        target[:, self._hidden_size :] = states

    def _run_step(self, drafting: Sequence[_HeadsRun]) -> torch.Tensor:
        """Runs a step, whose logit rows are those of the sequences, and draws their draft tokens.

        Returns:
            `[len(drafting), hidden_size]`; the head's own states, which the next step overwrites.
        """
        scores = self._steps.scores()
        assert scores.states is not None, "the steps keep them"
        head_states: torch.Tensor = scores.states[0]
        if self._draft_vocabulary is not None:
            scores = self._scores_of(scores.logits)
        jobs, positions = [run.job for run in drafting], [run.next_position for run in drafting]
        for run, token in zip(drafting, self._draw(scores, jobs, positions), strict=True):
            run.draft_tokens.append(token)
        return head_states
