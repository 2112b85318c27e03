"""`DraftModel`: a small model that drafts a sequence's next tokens for the served one.

This is the speculative decoding of Leviathan et al. 2023 with another rule for accepting draft
tokens (`engine.speculation.drafts`).

The model keeps its own KV, in a pool with as many blocks as the served model's. A sequence's KV
lies in the blocks with the ids of its own table, so that it needs no allocation. What lies in a
block is known by a digest of the sequence up to its end; KV of a prompt that is found there is not
computed again, as with the prefix cache. All other KV is computed when draft tokens first need it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from typing_extensions import override

from baton.common.errors import ConfigurationError
from engine.batch import DraftWork, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.runner import ModelInfo
from engine.runtime.drafting.drafter import NO_ROWS, Drafter, Drawn, ProposalJob
from engine.runtime.draws.rows import Rows, num_leading_equal
from engine.runtime.forward.batch_inputs import StepInputs
from engine.runtime.forward.recorded_steps import RecordedSteps
from engine.runtime.kv_pool import allocate_pool
from engine.runtime.weights.checkpoint import open_checkpoint
from engine.runtime.weights.described_model import DescribedModel
from engine.runtime.weights.loader import LoadedModel, load_model
from engine.speculative_config import DRAFT_MODEL, SpeculativeConfig
from kvstore.layout import KvLayout
from kvstore.mover.pool_objects import view_blocks

__all__ = ["DraftModel", "check_draft_model"]

_NUM_TIMED = 4
_NUM_TIMED_TOKENS = 32


@dataclass(slots=True)
class _Run:
    """The state of one job.

    Attributes:
        job: the job.
        first: position of the first of `tokens`.
        tokens: the tokens that the model must have run before it drafts tokens.
        num_run: number of them that it has run.
        digests: of the sequence up to the end of each block that `tokens` fill, `[n]` uint64.
        draft_tokens: the draft tokens so far.
    """

    job: ProposalJob
    first: int
    tokens: list[int]
    num_run: int
    digests: np.ndarray
    draft_tokens: tuple[int, ...] = ()

    @property
    def row(self) -> int:
        return self.job.chunk.row

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_run

    @property
    def end(self) -> int:
        """Position of the next token to draft."""
        return self.first + len(self.tokens) + len(self.draft_tokens)

    @property
    def lacks_drafts(self) -> bool:
        return len(self.draft_tokens) < self.job.work.num_proposals

    def take(self, num_tokens: int) -> ScheduledChunk:
        """Returns the next tokens to run; the last ones draw a draft token, if one is needed."""
        start, end = self.num_run, self.num_run + num_tokens
        self.num_run = end
        draws = self.job.chunk.draws if self.lacks_drafts and not self.num_pending else ()
        return ScheduledChunk(self.row, tuple(self.tokens[start:end]), self.first + start, draws)


@dataclass(frozen=True, slots=True)
class _LastRun:
    """The last run of the model for a row.

    Attributes:
        position: of the first of `tokens`; -1 if there are none.
        tokens: the tokens that the step has drawn, and the draft tokens after them, but for the
            last one. The next step may begin at any drawn one: a served model with states runs
            accepted draft tokens again.
        num_digested: number of the sequence's tokens that `digest` is of.
        digest: of the sequence up to the end of a block.
    """

    position: int = -1
    tokens: tuple[int, ...] = ()
    num_digested: int = 0
    digest: int = 0


def check_draft_model(speculative: SpeculativeConfig) -> None:
    """Checks, before weights are read, that a draft model has layers that can draft.

    Args:
        speculative: how tokens are drafted, with a draft model or without one.

    Raises:
        ConfigurationError: the checkpoint is missing or invalid, or its layers do not have K and V
            of their own and of one shape.
    """
    if speculative.method != DRAFT_MODEL:
        return
    name = speculative.model
    assert name is not None, "the config names a draft model"
    config = DescribedModel.of(open_checkpoint(name, with_weights=False)).config
    problem = ""
    if config.recurrent_layers:
        number, first = len(config.recurrent_layers), config.recurrent_layers[0]
        problem = f"{number} recurrent layers, the first of them layer {first}"
    elif config.kv_shapes or config.kv_sources:
        problem = "layers that share K and V or have K and V of different shapes"
    if problem:
        raise ConfigurationError(
            f"model of --speculative-config is {name!r}, which has {problem}; such models cannot "
            "draft"
        )


class DraftModel(Drafter):
    """The draft model of an engine.

    Args:
        config: the engine's flags, with a `speculative_config` that names a model.
        served: the model to draft for.
        info: properties of the served model.
        device: device of both models.
        progress: whether loading shows a progress bar.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: LoadedModel,
        info: ModelInfo,
        device: torch.device,
        *,
        progress: bool,
    ) -> None:
        super().__init__(config, served, info, device)
        if None not in info.windows:
            raise ConfigurationError(
                "--speculative-config has a draft model; all layers of the served model have a "
                "sliding window, and its blocks do not hold whole texts"
            )
        self._layer_group = info.windows.index(None)
        assert config.speculative_config is not None
        name = config.speculative_config.model
        assert name is not None, "the config names a draft model"
        loaded = load_model(
            name,
            served.dtype,
            device,
            progress=progress,
            load_format=config.load_format,
            weights_folder=config.weights_folder,
            max_model_len=info.max_model_len,
            quantized_compute=config.quantized_compute,
        )
        _check_fits(name, loaded, served, info.max_model_len)
        self._finds_blocks = config.enable_prefix_caching
        self._model = loaded.model
        self._layout = KvLayout(
            num_layers=len(loaded.sliding_windows),
            num_kv_heads=loaded.num_kv_heads,
            block_size=config.block_size,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
            num_parts=loaded.num_kv_parts,
        )
        self.block_bytes = self._layout.block_bytes
        self._rows = Rows(1, config.max_running, self._max_blocks)
        self._last_runs: dict[int, _LastRun] = {}  # by row

    @override
    def allocate(self, num_blocks: int) -> None:
        pool = allocate_pool(num_blocks, self._layout, self._device)
        slots = [(0, index) for index in range(self._layout.num_layers)]
        inputs = StepInputs(
            self._rows, self._config.max_step_tokens, self._config.block_size, self._device
        )
        views = view_blocks(pool, self._layout)
        self._steps = RecordedSteps(self._model, views, slots, inputs)
        # 0 if it is not known what a block holds.
        self._digest_of_block = np.zeros(num_blocks, np.uint64)

    @override
    def time_work(self) -> tuple[float, float]:
        most = min(_NUM_TIMED_TOKENS, self._config.max_step_tokens)
        num_tokens = min(most, self._max_blocks * self._layout.block_size - _NUM_TIMED)
        tokens = (0,) * max(1, num_tokens - 1)
        return (
            self._time(DraftWork(0, tokens, 0)) / len(tokens),
            self._time(DraftWork(0, (), _NUM_TIMED)) / _NUM_TIMED,
        )

    @override
    def _draft(
        self, drawing: Sequence[Drawn], states: torch.Tensor | None
    ) -> Sequence[Sequence[int]]:
        runs = [self._start(job, tokens) for job, tokens in drawing]
        self._run_known(runs)
        while drafting := [run for run in runs if run.lacks_drafts]:
            self._run_drafts(drafting)
        for run in runs:
            self._note_run(run)
        return [run.draft_tokens for run in runs]

    @override
    def _forget(self) -> None:
        self._last_runs.clear()
        self._digest_of_block[:] = 0

    def _start(self, job: ProposalJob, drawn: Sequence[int]) -> _Run:
        """Finds the tokens that the model has to run: those after what it has run before."""
        chunk, work, size = job.chunk, job.work, self._layout.block_size
        tokens = list(work.token_ids)
        if work.num_proposals:
            tokens += (*chunk.token_ids[: chunk.num_tokens - chunk.num_drafts], *drawn)
        last = self._last_runs.pop(chunk.row, None)
        if last is None or not work.first:
            last = _LastRun(digest=xxhash.xxh3_64_intdigest(work.cache_salt.encode()))
        has_digest = self._finds_blocks and work.first == last.num_digested
        digests = _block_digests(tokens if has_digest else (), size, last.digest)
        blocks = job.table[work.first // size :][: len(digests)]
        num_run = size * _num_leading(self._digest_of_block[blocks] == digests)
        if last.position <= work.first:
            known = last.tokens[work.first - last.position :]
            num_run = max(num_run, num_leading_equal(known, tokens))
        num_run = min(num_run, len(tokens) - (work.num_proposals > 0))
        run = _Run(job, work.first, tokens, num_run, digests)
        # The last draft token is not run.
        end = run.end + max(0, work.num_proposals - 1)
        self._digest_of_block[job.table[(run.first + num_run) // size : -(-end // size)]] = 0
        self._rows.tables[0, chunk.row] = job.table
        return run

    def _note_run(self, run: _Run) -> None:
        """Notes the tokens that the model has run for a sequence."""
        size, num_digests = self._layout.block_size, len(run.digests)
        position = min(run.job.chunk.end, run.first + len(run.tokens))
        if num_digests:
            self._digest_of_block[run.job.table[run.first // size :][:num_digests]] = run.digests
        self._last_runs[run.row] = _LastRun(
            position=position,
            tokens=(*run.tokens[position - run.first :], *run.draft_tokens[:-1]),
            num_digested=run.first + num_digests * size,
            digest=int(run.digests[-1]) if num_digests else 0,
        )

    def _run_known(self, runs: Sequence[_Run]) -> None:
        """Runs all known tokens, in as many steps as needed, and draws the first draft tokens."""
        pending = sorted((run for run in runs if run.num_pending), key=lambda run: run.num_pending)
        while pending:
            room, chunks, drafting = self._config.max_step_tokens, [], []
            for run in pending[:room]:
                chunks.append(run.take(min(room, run.num_pending)))
                room -= chunks[-1].num_tokens
                if run.lacks_drafts and not run.num_pending:
                    drafting.append(run)
                if not room:
                    break
            self._fill(chunks)
            if drafting:
                self._draw_drafts(drafting)
            else:
                self._steps.run()
            pending = [run for run in pending if run.num_pending]

    def _run_drafts(self, drafting: Sequence[_Run]) -> None:
        """Runs the newest draft token of each sequence, and draws the next one."""
        self._fill(
            [
                ScheduledChunk(run.row, run.draft_tokens[-1:], run.end - 1, run.job.chunk.draws)
                for run in drafting
            ]
        )
        self._draw_drafts(drafting)

    def _fill(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Fills the inputs of the next step, with tokens that the model has."""
        most = self._model.config.vocab_size - 1
        clamped = tuple(
            replace(chunk, token_ids=tuple(np.clip(chunk.token_ids, 0, most).tolist()))
            for chunk in chunks
        )
        self._steps.inputs.fill(ScheduledBatch(0, clamped), self._rows, NO_ROWS)

    def _draw_drafts(self, drafting: Sequence[_Run]) -> None:
        """Runs a step with a logit row for each sequence, and draws their draft tokens."""
        scores = self._steps.scores()
        jobs, positions = [run.job for run in drafting], [run.end for run in drafting]
        for run, token in zip(drafting, self._draw(scores, jobs, positions), strict=True):
            run.draft_tokens = (*run.draft_tokens, token)


def _block_digests(tokens: Sequence[int], block_size: int, before: int) -> np.ndarray:
    """Returns digests of a sequence up to the end of each full block, `[n]` uint64, not 0.

    Args:
        tokens: tokens of the sequence, from the beginning of a block on.
        block_size: tokens per block.
        before: digest of the sequence before them; 0 if there is nothing.
    """
    ids, digests = np.array(tokens, np.int32), list[int]()
    for end in range(block_size, len(ids) + 1, block_size):
        data = ids[end - block_size : end].tobytes()
        before = xxhash.xxh3_64_intdigest(data, seed=before) or 1
        digests.append(before)
    return np.array(digests, np.uint64)


def _num_leading(flags: np.ndarray) -> int:
    """Returns how many of the first flags are true."""
    return len(flags) if flags.all() else int(flags.argmin())


def _check_fits(name: str, draft: LoadedModel, served: LoadedModel, max_model_len: int) -> None:
    """Checks that a draft model's tokens are those of the served model.

    Raises:
        ConfigurationError: they are not, or its texts are too short.
    """
    digests = draft.tokenizer_digest, served.tokenizer_digest
    is_same = len(set(digests)) == 1 if all(digests) else draft.vocab_size == served.vocab_size
    if not is_same:
        raise ConfigurationError(
            f"model of --speculative-config is {name!r}, whose tokenizer is not the served model's"
        )
    if draft.max_model_len < max_model_len:
        raise ConfigurationError(
            f"model of --speculative-config is {name!r}, which takes {draft.max_model_len} tokens; "
            f"set --max-model-len {draft.max_model_len}, or use a draft model that takes "
            f"{max_model_len}"
        )
