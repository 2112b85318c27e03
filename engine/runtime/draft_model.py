"""`DraftModel`: a small model that guesses a sequence's next tokens for the served one.

After Leviathan et al. 2023, but for how guesses are accepted (`engine.speculation.drafts`). A guess
is drawn with the parameters and the noise of its place, as the served model's token there will be,
so that two models that agree on probabilities mostly draw the same token at any temperature.

The model keeps its own KV, in a pool with as many blocks as the served model's. A sequence's KV
lies in the blocks with the ids of its own table, so that it needs no allocation. What lies in a
block is known by a digest of the sequence up to its end; KV of a prompt that is found there is not
computed again, as with the prefix cache. All other KV is computed when guesses first need it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import xxhash

from baton.errors import ConfigurationError
from engine.batch import ChunkOutput, DrawParams, ScheduledBatch, ScheduledChunk
from engine.config import EngineConfig
from engine.runtime.batch_inputs import StepInputs
from engine.runtime.kv_pool import allocate_pool
from engine.runtime.loader import LoadedModel, load_model
from engine.runtime.recorded_steps import RecordedSteps
from engine.runtime.rows import Rows
from engine.runtime.sampler import DRAW_RECORD, draw_record, draw_tokens
from kvstore.layout import KvLayout
from kvstore.mover.pool_objects import view_blocks

__all__ = ["DraftModel", "ProposalJob"]

_DUMMY_DRAW = DrawParams(temperature=1.0, top_k=0, top_p=1.0, seed=0)
_NUM_TIMED = 4
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class ProposalJob:
    """A chunk that guesses are made for.

    Attributes:
        index: of the chunk in its batch.
        chunk: the chunk.
        table: `[max_blocks]` int32; the row's blocks at the time of its step.
    """

    index: int
    chunk: ScheduledChunk
    table: np.ndarray


@dataclass(slots=True)
class _Guessing:
    """The state of one job.

    Attributes:
        job: the job.
        tokens: all tokens of the sequence from `first` on.
        first: position of the first of them.
        num_run: number of them that the model has run.
        guesses: the guesses so far.
    """

    job: ProposalJob
    tokens: list[int]
    first: int
    num_run: int
    guesses: list[int] = field(default_factory=list)

    @property
    def row(self) -> int:
        return self.job.chunk.row

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_run

    @property
    def end(self) -> int:
        """Position of the next token to guess."""
        return self.first + len(self.tokens) + len(self.guesses)

    def take(self, num_tokens: int, draws: tuple[DrawParams, ...] = ()) -> ScheduledChunk:
        """Returns the next tokens to run."""
        start, end = self.num_run, self.num_run + num_tokens
        self.num_run = end
        return ScheduledChunk(self.row, tuple(self.tokens[start:end]), self.first + start, draws)


class DraftModel:
    """The draft model of an engine with one rank.

    Args:
        config: the engine's flags, with a `speculative_config` that names a model.
        served: the model to guess for.
        layer_group: a layer group of the served model whose tables hold whole sequences.
        max_model_len: of the engine.
        device: device of both models.
        progress: whether loading shows a progress bar.

    Attributes:
        layout: shape of a block of its KV.

    Raises:
        ConfigurationError: the checkpoint is invalid, or does not fit the served model.
    """

    def __init__(
        self,
        config: EngineConfig,
        served: LoadedModel,
        layer_group: int,
        max_model_len: int,
        device: torch.device,
        *,
        progress: bool,
    ) -> None:
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
        )
        _check_fits(name, loaded, served, max_model_len)
        self._config, self._device = config, device
        self._layer_group = layer_group
        self._model = loaded.model
        self._num_served = served.vocab_size
        self.layout = KvLayout(
            num_layers=len(loaded.sliding_windows),
            num_kv_heads=loaded.num_kv_heads,
            block_size=config.block_size,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )
        max_blocks = -(-max_model_len // config.block_size)
        self._rows = Rows(1, config.max_running, max_blocks)
        # By row: position and ids of tokens that the model ran as guesses.
        self._ran: dict[int, tuple[int, list[int]]] = {}

    def allocate(self, num_blocks: int) -> None:
        """Allocates its pool.

        Raises:
            ConfigurationError: the device does not have that much memory.
        """
        pool = allocate_pool(num_blocks, self.layout, self._device)
        slots = [(0, index) for index in range(self.layout.num_layers)]
        inputs = StepInputs(
            self._rows, self._config.max_num_batched_tokens, self._config.block_size, self._device
        )
        views = view_blocks(pool, self.layout)
        self._steps = RecordedSteps(self._model, views, slots, inputs)
        self._digests = np.zeros(num_blocks, np.uint64)  # 0 if a block's content is not known

    def jobs_of(self, batch: ScheduledBatch, rows: Rows) -> list[ProposalJob]:
        """Returns the chunks of a step that guesses are made for.

        Args:
            batch: the step.
            rows: the rows, with the step's table updates applied.
        """
        return [
            ProposalJob(index, chunk, rows.tables[self._layer_group, chunk.row].copy())
            for index, chunk in enumerate(batch.chunks)
            if chunk.num_proposals
        ]

    def time_proposal(self) -> float:
        """Measures the seconds in which it guesses one token of one sequence."""
        chunk = ScheduledChunk(0, (0,), 0, (_DUMMY_DRAW,), num_proposals=_NUM_TIMED)
        job = ProposalJob(0, chunk, self._rows.tables[0, 0])
        for _ in range(2):  # the first time compiles and records
            start = time.perf_counter()
            self.propose([job], [ChunkOutput((0,))])
            seconds = time.perf_counter() - start
        self._ran.clear()
        return seconds / _NUM_TIMED

    @torch.inference_mode()
    def propose(
        self, jobs: Sequence[ProposalJob], outputs: Sequence[ChunkOutput | None]
    ) -> list[ChunkOutput | None]:
        """Guesses the tokens that follow those which a step has drawn.

        Args:
            jobs: as `jobs_of` has returned them for the step.
            outputs: one per chunk of the step.

        Returns:
            The outputs with the guesses.
        """
        proposed, guessing = list(outputs), list[_Guessing]()
        for job in jobs:
            output = outputs[job.index]
            assert output is not None, "a chunk with guesses draws a token"
            if min(output.token_ids) >= 0:
                guessing.append(self._start(job, output.token_ids))
        if guessing:
            self._run_known(guessing)
        drawing = guessing
        while drawing := [e for e in drawing if len(e.guesses) < e.job.chunk.num_proposals]:
            self._run_guesses(drawing)
        for each in guessing:
            self._keep(each)
            output = proposed[each.job.index]
            assert output is not None
            proposed[each.job.index] = replace(output, proposals=self._valid(each.guesses))
        return proposed

    def _start(self, job: ProposalJob, drawn: Sequence[int]) -> _Guessing:
        """Finds the tokens that the model has to run: those after what it has run before."""
        chunk = job.chunk
        known = chunk.token_ids[: chunk.num_tokens - chunk.num_drafts]
        tokens = [*chunk.undrafted, *known, *drawn]
        first = chunk.start_position - len(chunk.undrafted)
        position, ran = self._ran.pop(chunk.row, (0, []))
        num_run = 0
        if first == 0:
            digests = self._digests_of(tokens)
            is_found = self._digests[job.table[: len(digests)]] == digests
            num_run = _num_leading(is_found) * self.layout.block_size
        elif first == position:
            num_equal = min(len(ran), len(tokens))
            num_run = _num_leading(np.array(ran[:num_equal]) == tokens[:num_equal])
        guessing = _Guessing(job, tokens, first, min(num_run, len(tokens) - 1))
        size = self.layout.block_size
        written = slice(
            (first + guessing.num_run) // size, -(-(guessing.end + chunk.num_proposals) // size)
        )
        self._digests[job.table[written]] = 0
        self._rows.tables[0, chunk.row] = job.table
        return guessing

    def _keep(self, guessing: _Guessing) -> None:
        """Notes what the model has run for a sequence."""
        ran = [guessing.tokens[-1], *guessing.guesses[:-1]]
        last = guessing.first + len(guessing.tokens) - 1
        self._ran[guessing.row] = last, ran
        if guessing.first == 0:
            digests = self._digests_of(guessing.tokens)
            self._digests[guessing.job.table[: len(digests)]] = digests

    def _digests_of(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns a digest of the tokens up to the end of each full block, `[n]` uint64, not 0."""
        size, digest = self.layout.block_size, 0
        ids, digests = np.array(tokens, np.int32), list[int]()
        for end in range(size, len(ids) + 1, size):
            digest = xxhash.xxh3_64_intdigest(ids[end - size : end].tobytes(), seed=digest) or 1
            digests.append(digest)
        return np.array(digests, np.uint64)

    def _run_known(self, guessing: Sequence[_Guessing]) -> None:
        """Runs all known tokens, in as many steps as needed, and draws the first guesses."""
        most = self._config.max_num_batched_tokens // len(guessing)
        long = guessing
        while long := [each for each in long if each.num_pending > most]:
            self._fill([each.take(most) for each in long])
            self._steps.run()
        self._fill([each.take(each.num_pending, each.job.chunk.draws) for each in guessing])
        self._draw(guessing)

    def _run_guesses(self, guessing: Sequence[_Guessing]) -> None:
        """Runs the newest guess of each sequence, and draws the next one."""
        self._fill(
            [
                ScheduledChunk(each.row, (each.guesses[-1],), each.end - 1, each.job.chunk.draws)
                for each in guessing
            ]
        )
        self._draw(guessing)

    def _fill(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Fills the inputs of the next step, with tokens that the model has."""
        most = self._model.config.vocab_size - 1
        clamped = tuple(
            replace(chunk, token_ids=tuple(np.clip(chunk.token_ids, 0, most).tolist()))
            for chunk in chunks
        )
        self._steps.inputs.fill(ScheduledBatch(0, clamped), self._rows, _NO_ROWS)

    def _draw(self, guessing: Sequence[_Guessing]) -> None:
        """Runs a step, whose logit rows are those of the sequences, and draws their guesses."""
        draws = [draw_record(each.job.chunk.draws[0]) for each in guessing]
        positions = np.array([each.end for each in guessing], np.int64)
        rows, scores = range(len(guessing)), self._steps.scores()
        tokens = draw_tokens(scores, np.array(draws, DRAW_RECORD), rows, positions)
        for each, token in zip(guessing, tokens.tolist(), strict=True):
            each.guesses.append(token)

    def _valid(self, guesses: Sequence[int]) -> tuple[int, ...]:
        """Returns the guesses before the first that the served model does not have."""
        ids = np.array(guesses)
        return tuple(guesses[: _num_leading((ids >= 0) & (ids < self._num_served))])


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
