"""`DeviceSteps`: computes steps on a GPU, launched ahead of their results if there is one stage.

The host only launches work. A step that only decodes is one CUDA graph, or without graphs the
same calls, on state that lives on the device. A step's tokens are copied to the host behind it
and read by `LaunchedStep.result`; meanwhile the next step may have been launched.

In a pipeline this is the last stage. Its steps wait on the host for the hidden states of the stage
before, and end when the tokens are on their way to the first stage.
"""

import gc
import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from typing_extensions import override

import kernels
from baton.common.request.sampling_params import SamplingParams
from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput
from engine.draw_params import DrawParams
from engine.runtime.device import fetch
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.drawing import ChunkDraws
from engine.runtime.draws.logprobs import DecodeReports, PromptTokens
from engine.runtime.draws.row_processors import RowProcessors
from engine.runtime.draws.rows import drawn_tokens
from engine.runtime.draws.rules import RowRules
from engine.runtime.draws.sampler import Scores
from engine.runtime.forward.batch_inputs import BatchInputs, KeptMemory, StepInputs
from engine.runtime.steps.device_decode import (
    DecodeGraphs,
    DeviceDecode,
    GraphRecorder,
    capture_sizes,
    padded_size,
)
from engine.runtime.steps.steps import LaunchedStep, StepModel, Steps
from kernels import CudaGraphRecorder, DeviceRankGroup, EngineRanks

__all__ = ["DeviceSteps"]

_MEBIBYTE = 2**20
_MAX_WARM_UP_TOKENS = 64  # the profile run has compiled the kernels of longer ones
# By row: without and with the kernels of top-k and top-p.
_WARM_UP_DRAWS = (
    DrawParams(SamplingParams(), seed=0),
    DrawParams(SamplingParams(top_k=50, top_p=0.9), seed=0),
)

_logger = logging.getLogger("baton.engine")


class DeviceSteps(Steps):
    """`Steps` on a GPU, of the only or the last stage.

    Args:
        model: the model and its limits.
        record: records graphs of decode steps; None for `CudaGraphRecorder`.
    """

    num_spare_blocks = 1  # receives the KV of the rows that pad a step

    def __init__(self, model: StepModel, record: GraphRecorder | None = None) -> None:
        self._model, self._part = model, model.model.part
        self.is_asynchronous = self._part.num_stages == 1
        spare_block = model.num_blocks - 1
        self._rows = DeviceRows(
            model.num_layer_groups, model.max_rows, model.max_blocks, spare_block, model.device
        )
        if model.states is not None:
            spare_slot = len(model.states.slots) - 1
            self._rows.state.tables[model.states.layer_group, self._rows.spare_row] = spare_slot
        self._hidden = None if self._part.is_first else model.new_hidden()
        limits = model.max_tokens, model.block_size
        self._inputs = StepInputs(
            self._rows.host,
            *limits,
            model.device,
            self._hidden,
            model.max_drafts,
            has_states=model.states is not None,
        )
        self._decode = DeviceDecode(model, self._rows, self._hidden)
        sizes = () if model.enforce_eager else capture_sizes(model.max_rows)
        vocab_size = model.model.config.vocab_size
        self._group = None if model.ranks is None else model.ranks.device_group
        self._rules = RowRules(model.max_rows, model.max_model_len, vocab_size, model.device)
        self._processors = RowProcessors(model.processors)
        # All graphs write their results here; otherwise each would keep its own memory for them.
        self._results = self._new_results(max(sizes, default=0))
        self._graphs = DecodeGraphs(sizes, self._run_in_place, record or CudaGraphRecorder())
        self._decode_rows: tuple[int, ...] = ()
        self._decode_ids = np.zeros(0, np.int64)
        self._reports = self._decode_reports()

    @override
    @torch.inference_mode()
    def update(self, batch: ScheduledBatch) -> None:
        self._rows.update_tables(batch.table_updates)
        if batch.decode_rows is not self._decode_rows:
            self._decode_ids = np.array(batch.decode_rows, np.int64)
            self._reports = self._decode_reports()
            self._decode.set_rows(self._decode_ids)
            self._decode_rows = batch.decode_rows

    @override
    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        num_decodes = len(self._decode_ids)
        draws = ChunkDraws(batch.chunks, is_processed=self._model.reports_processed)
        prompts = PromptTokens(batch)
        # With copies of the tables, which later steps may change before this one's tokens are read.
        jobs = self._model.proposal_jobs(batch, self._rows.host)
        scores, positions = self._compute_scores(batch, keeps_states=bool(jobs))
        if self._group is not None and self._group.rank > 0:
            prompts.compute_part(self._model.model, scores.hidden)
            return self._follow(batch, self._group)
        of_prompts = prompts.compute(self._model.model, scores.hidden)
        # Until here the logits are the model's own.
        raw = scores.copy() if draws.keeps_raw or self._reports.keeps_raw else scores
        if draws.with_processors:
            self._processors.apply(draws.with_processors, scores)
        for of_one_place in draws.ruled:
            self._rules.apply_to_chunks(of_one_place, scores)
        if num_decodes:
            self._draw_decodes(scores.last(num_decodes), positions)
        of_chunks = draws.draw(scores, raw)
        if draws.single:
            self._rows.keep_drawn(draws.single, of_chunks[0])
        if self._group is not None and self._part.is_first:
            self._group.broadcast(self._rows.state.last_tokens)
        reports, of_decodes = self._reports, list[torch.Tensor]()
        if num_decodes:
            tokens = self._decode.tokens[:num_decodes]
            of_decodes = reports.compute(scores.last(num_decodes), raw.last(num_decodes), tokens)
        num_drawn = len(of_decodes) + len(of_chunks)
        states = scores.states

        def read(tensors: Sequence[torch.Tensor]) -> StepOutput:
            chunks = draws.outputs(tensors[len(of_decodes) : num_drawn])
            decoded = reports.read(tensors[: len(of_decodes)])
            chunks = self._model.propose(jobs, chunks, states)
            if not self._part.is_first:
                tokens = drawn_tokens(batch.chunks, chunks, decoded.tokens)
                self._ranks.send_tokens(tokens.tobytes())
            return StepOutput(
                batch.step, tuple(chunks), *decoded, prompts.read(tensors[num_drawn:])
            )

        results = [*of_decodes, *of_chunks, *of_prompts]
        return LaunchedStep(fetch(self._model.device, results), read, self._group)

    def _follow(self, batch: ScheduledBatch, group: DeviceRankGroup) -> LaunchedStep:
        """Ends a step of another rank than 0, which draws the tokens."""
        self._decode.advance(len(self._decode_ids))
        if self._part.is_first:  # other stages read no tokens
            group.broadcast(self._rows.state.last_tokens)
        fetched = fetch(self._model.device, ())
        return LaunchedStep(fetched, lambda _: StepOutput(batch.step), group)

    @override
    def graph_bytes(self) -> int:
        """Measures the two largest graphs; every further graph counts as the second largest."""
        gc.collect()
        largest_first = self._graphs.sizes[::-1]
        measured = [self._bytes_of_graph(size) for size in largest_first[:2]]
        return sum(measured[:1]) + sum(measured[1:]) * (len(largest_first) - 1)

    @override
    def warm_up(self) -> None:
        """Compiles the kernels of every kind of step, and captures graphs of decode steps."""
        for batch in _warm_up_batches(self._model):
            self._run_and_wait(batch)
        self._rules.warm_up()
        self.update(ScheduledBatch(0))  # so that capturing advances only the spare row
        start, free_before = time.perf_counter(), _free_bytes(self._model.device)
        with torch.inference_mode():
            self._graphs.capture()
        if self._graphs.sizes:
            _logger.info(
                "captured %d CUDA graphs of up to %d rows in %.1f s, %.0f MiB",
                len(self._graphs.sizes),
                self._graphs.sizes[-1],
                time.perf_counter() - start,
                (free_before - _free_bytes(self._model.device)) / _MEBIBYTE,
            )

        for row in range(min(2, self._model.max_rows)):
            self._run_and_wait(_warm_up_batch(row, 1, ()))
            self._run_and_wait(ScheduledBatch(0, decode_rows=(row,)))
        self.finish()

    @property
    def _ranks(self) -> EngineRanks:
        ranks = self._model.ranks
        assert ranks is not None, "one rank has one stage"
        return ranks

    def _new_results(self, num_rows: int) -> torch.Tensor:
        """Allocates memory for the results of decode steps of up to `num_rows` rows."""
        model = self._model.model
        num_columns, dtype = model.config.vocab_size, torch.float32
        if not self._part.is_last:
            num_columns, dtype = model.config.hidden_size, self._model.dtype
        elif self._group is not None and self._group.rank > 0:
            num_columns = self._group.cut(num_columns).size
        return torch.empty((num_rows, num_columns), dtype=dtype, device=self._model.device)

    def _decode_reports(self) -> DecodeReports:
        model, rows = self._model, self._rows.host
        is_processed = model.reports_processed
        return DecodeReports.of(rows, self._decode_ids, model.device, is_processed=is_processed)

    def _run_and_wait(self, batch: ScheduledBatch) -> None:
        self.update(batch)
        self.launch(batch).result()

    def _bytes_of_graph(self, size: int) -> int:
        device = self._model.device
        with torch.inference_mode():
            self._decode.run(size)  # torch keeps memory for it that is not the graph's
            free_before = _free_bytes(device)
            self._graphs.capture_one(size)
        return max(0, free_before - _free_bytes(device))

    def _run_in_place(self, size: int) -> torch.Tensor:
        """Runs `DeviceDecode.run` and copies its result to the memory that all graphs share."""
        return self._results[:size].copy_(self._decode.run(size))

    def _compute_scores(
        self, batch: ScheduledBatch, *, keeps_states: bool
    ) -> tuple[Scores, torch.Tensor]:
        """Computes a step; returns its scores, and the positions of the tokens that decoding rows
        draw.

        Args:
            batch: the step.
            keeps_states: whether a step with chunks keeps the states that the drafter reads.
        """
        num_decodes = len(self._decode_ids)
        if not batch.chunks:
            scores = self._decode.scores(self._run_decode())
            return scores, self._decode.draw_positions[:num_decodes]
        inputs = self._chunk_inputs(batch)
        kept = self._model.new_kept(self._inputs.num_logit_rows) if keeps_states else None
        return self._scores_of(inputs, kept), inputs.positions[
            len(inputs.positions) - num_decodes :
        ] + 1

    def _run_decode(self) -> torch.Tensor:
        """Computes a step that only decodes; returns the rows' part of `DeviceDecode.run`."""
        num_rows = len(self._decode_ids)
        self._rows.advance((), self._decode_ids)
        self._receive_hidden(num_rows)
        size = padded_size(self._graphs.sizes, num_rows)
        result = self._decode.run(num_rows) if size is None else self._graphs.run(size)
        return result[:num_rows]

    def _chunk_inputs(self, batch: ScheduledBatch) -> BatchInputs:
        """Returns the inputs of a step of chunks and decoding rows, whose tokens only the device
        knows.
        """
        self._inputs.fill(batch, self._rows.host, self._decode_ids)
        self._rows.advance(batch.chunks, self._decode_ids)
        inputs, num_decodes = self._inputs.tensors(), len(self._decode_ids)
        first = len(inputs.token_ids) - num_decodes
        last_tokens, row_ids = self._rows.state.last_tokens, self._decode.row_ids[:num_decodes]
        inputs.token_ids[first:] = last_tokens.index_select(0, row_ids)
        self._receive_hidden(len(inputs.token_ids))
        return inputs

    def _receive_hidden(self, num_tokens: int) -> None:
        """Waits for the hidden states of the stage before, and copies them to the device; does
        nothing on the first stage.
        """
        if self._hidden is None:
            return
        target = self._hidden[:num_tokens]
        is_on_gpu = target.device.type == "cuda"
        # New for each step: torch reuses pinned memory only once the copies from it are complete.
        received = torch.empty(target.shape, dtype=target.dtype, pin_memory=is_on_gpu)
        self._ranks.receive_hidden(received)
        target.copy_(received, non_blocking=True)

    def _draw_decodes(self, scores: Scores, positions: torch.Tensor) -> None:
        """Draws the tokens of the rows that decode, from logits that follow their rules."""
        if self._decode.ruled is not None:
            last_tokens = self._rows.state.last_tokens
            self._rules.apply_to_decodes(self._decode.ruled, scores, last_tokens, positions)
        self._decode.draw(scores, positions)

    def _scores_of(self, inputs: BatchInputs, kept: KeptMemory | None) -> Scores:
        model = self._model
        kv = model.paged_kv(inputs.layer_groups, inputs.logit_rows)
        to_keep = kept and kept.states_of(inputs, self._inputs.num_logit_rows)
        states = model.model(inputs.of_model, inputs.positions, kv, to_keep)
        logits = model.model.logits(inputs.logit_states(states))
        hidden = states if self._inputs.needs_all_hidden else None
        if not len(logits):
            nothing = logits.new_empty(0)
            return Scores(logits, nothing, nothing.long(), hidden)
        memory = None if kept is None else kept.memory
        return Scores(logits, *kernels.row_maxima(logits), hidden, memory)


def _warm_up_batches(model: StepModel) -> Iterator[ScheduledBatch]:
    """Yields short chunks of every kind of length, alone and beside a row that decodes.

    Their KV goes to block 0, which unset tables name, and is never read.
    """
    longest = min(model.max_tokens - 1, model.max_model_len - 1, _MAX_WARM_UP_TOKENS)
    num_tokens = 1
    while num_tokens <= longest and model.max_rows > 1:
        yield _warm_up_batch(0, num_tokens, ())
        yield _warm_up_batch(1, num_tokens, (0,))
        num_tokens *= 2


def _warm_up_batch(row: int, num_tokens: int, decode_rows: tuple[int, ...]) -> ScheduledBatch:
    chunk = ScheduledChunk(row, (0,) * num_tokens, 0, (_WARM_UP_DRAWS[row],), wants_logprobs=True)
    return ScheduledBatch(0, (chunk,), decode_rows)


def _free_bytes(device: torch.device) -> int:
    """Returns the free memory of a GPU; 0 on a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
