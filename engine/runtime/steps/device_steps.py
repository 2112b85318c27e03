"""`DeviceSteps`: computes steps on a GPU, launched ahead of their results if there is one stage.

The host only launches work. It sends what a step needs in one copy; a forward pass of a captured
shape is one CUDA graph, others are the same calls. Both work on state that lives on the device. A
step's tokens are copied to the host behind it and read by `LaunchedStep.result`; meanwhile the next
step may have been launched.

In a pipeline this is the last stage. Its steps wait on the host for the hidden states of the stage
before, and end when the tokens are on their way to the first stage.
"""

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from typing_extensions import override

from baton.common.request.sampling_params import SamplingParams
from engine.batch import ScheduledBatch, ScheduledChunk, StepOutput
from engine.draw_params import DrawParams
from engine.runtime.device import current, fetch, to_device
from engine.runtime.draws.device_rows import DeviceRows
from engine.runtime.draws.drawing import ChunkDraws
from engine.runtime.draws.logprobs import DecodeReports, PromptTokens
from engine.runtime.draws.row_processors import RowProcessors
from engine.runtime.draws.rows import drawn_tokens
from engine.runtime.draws.rules import RowRules
from engine.runtime.draws.sampler import Scores
from engine.runtime.steps.decode_draws import DecodeDraws
from engine.runtime.steps.device_forward import DeviceForward, GraphRecorder, StepGraphs
from engine.runtime.steps.sent_steps import BegunStep, SentStep
from engine.runtime.steps.step_shapes import StepShape, captured_shapes
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

_NO_DRAWS = np.zeros((2, 0), np.int64)

_logger = logging.getLogger("baton.engine")


class DeviceSteps(Steps):
    """`Steps` on a GPU, of the only or the last stage.

    Args:
        model: the model and its limits.
        record: records graphs of forward passes; None for `CudaGraphRecorder`.
    """

    num_spare_blocks = 1  # receives the KV of the tokens that pad a step

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
        shapes = [] if model.enforce_eager else self._shapes()
        self._forward = DeviceForward(model, self._rows, self._hidden, shapes)
        self._decode = DecodeDraws(self._rows, model.max_rows, model.device)
        vocab_size = model.model.config.vocab_size
        self._group = None if model.ranks is None else model.ranks.device_group
        self._rules = RowRules(model.max_rows, model.max_model_len, vocab_size, model.device)
        self._processors = RowProcessors(model.processors)
        # All graphs write their results here; otherwise each would keep its own memory for them.
        self._results = self._new_results(self._forward.max_result_rows)
        run = partial(self._forward.run, out=self._results)
        self._graphs = StepGraphs(shapes, run, record or CudaGraphRecorder())
        self._decode_rows: tuple[int, ...] = ()
        self._decode_ids = np.zeros(0, np.int64)
        self._reports = self._decode_reports()
        # The step whose sequences the device has, if these only decode.
        self._sent_decode: BegunStep | None = None

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
        draws = ChunkDraws(batch.chunks, is_processed=self._model.reports_processed)
        prompts = PromptTokens(batch)
        # With copies of the tables, which later steps may change before this one's tokens are read.
        jobs = self._model.proposal_jobs(batch, self._rows.host)
        step = self._begin(batch, draws)
        scores = self._compute_scores(step, needs_hidden=batch.reports_prompts)
        states = self._forward.kept_states(len(scores.logits)) if jobs else None
        if self._group is not None and self._group.rank > 0:
            prompts.compute_part(self._model.model, scores.hidden)
            return self._follow(step, self._group)
        of_prompts = prompts.compute(self._model.model, scores.hidden)
        # Until here the logits are the model's own.
        raw = scores.copy() if draws.keeps_raw or self._reports.keeps_raw else scores
        if draws.with_processors:
            self._processors.apply(draws.with_processors, scores)
        for of_one_place in draws.ruled:
            self._rules.apply_to_chunks(of_one_place, scores)
        of_decodes = self._draw_decodes(step, scores, raw)
        of_chunks = draws.draw(scores, raw, step.draw_inputs)
        if len(step.single[0]):
            drawn = of_chunks[0].index_select(0, step.single[1])
            self._rows.keep_drawn(step.single[0], drawn)
        if self._group is not None and self._part.is_first:
            self._group.broadcast(self._rows.state.last_tokens)
        num_drawn = len(of_decodes) + len(of_chunks)
        reports = self._reports

        def read(tensors: Sequence[torch.Tensor]) -> StepOutput:
            chunks = draws.outputs(tensors[len(of_decodes) : num_drawn])
            decoded = reports.read(tensors[: len(of_decodes)])
            with current(self._model.device):
                chunks = self._model.propose(jobs, chunks, states)
            if not self._part.is_first:
                tokens = drawn_tokens(batch.chunks, chunks, decoded.tokens)
                self._ranks.send_tokens(tokens.tobytes())
            return StepOutput(
                batch.step, tuple(chunks), *decoded, prompts.read(tensors[num_drawn:])
            )

        results = [*of_decodes, *of_chunks, *of_prompts]
        return LaunchedStep(fetch(self._model.device, results), read, self._group)

    def _follow(self, step: BegunStep, group: DeviceRankGroup) -> LaunchedStep:
        """Ends a step of another rank than 0, which draws the tokens."""
        self._decode.advance(self._forward.row_ids(step.decode_seqs))
        if self._part.is_first:  # other stages read no tokens
            group.broadcast(self._rows.state.last_tokens)
        fetched, number = fetch(self._model.device, ()), step.number
        return LaunchedStep(fetched, lambda _: StepOutput(number), group)

    @override
    def graph_bytes(self) -> int:
        """Measures the two largest graphs; every further graph counts as the second largest."""
        gc.collect()
        largest_first = self._graphs.largest_first()
        measured = [self._bytes_of_graph(shape) for shape in largest_first[:2]]
        return sum(measured[:1]) + sum(measured[1:]) * (len(largest_first) - 1)

    @override
    def warm_up(self) -> None:
        """Compiles the kernels of every kind of step, and captures graphs of forward passes."""
        for batch in _warm_up_batches(self._model):
            self._run_and_wait(batch)
        self._rules.warm_up()
        start, free_before = time.perf_counter(), _free_bytes(self._model.device)
        with torch.inference_mode():
            self._capture()
        shapes = self._graphs.shapes
        if shapes:
            _logger.info(
                "captured %d CUDA graphs of up to %d tokens in %.1f s, %.0f MiB",
                len(shapes),
                max(shape.num_tokens for shape in shapes),
                time.perf_counter() - start,
                (free_before - _free_bytes(self._model.device)) / _MEBIBYTE,
            )

        for row in range(min(2, self._model.max_rows)):
            self._run_and_wait(_warm_up_batch(row, 1, ()))
            self._run_and_wait(ScheduledBatch(0, decode_rows=(row,)))
        if self._model.max_rows > 1:
            # The logits of a decoding row behind those of a chunk may have another alignment.
            self._run_and_wait(_warm_up_batch(0, 1, (1,)))
        self.finish()

    def _capture(self) -> None:
        """Captures all graphs, of passes in which every sequence is in the spare row."""
        self._sent_decode = None
        gc.collect()  # freeing garbage during a capture may abort it
        for shape in self._graphs.largest_first():
            self._send_padding(shape)
            self._graphs.capture_one(shape)

    def _send_padding(self, shape: StepShape) -> None:
        """Sends the words of a pass that only runs padding."""
        nothing = SentStep(ScheduledBatch(0), np.zeros(0, np.int64), 0)
        self._forward.upload.send([nothing.words(shape, self._rows.spare_row)])

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

    def _shapes(self) -> list[StepShape]:
        model = self._model
        return captured_shapes(
            max_rows=model.max_rows,
            max_tokens=model.max_tokens,
            max_model_len=model.max_model_len,
            max_drafts=model.max_drafts,
            is_last=self._part.is_last,
        )

    def _run_and_wait(self, batch: ScheduledBatch) -> None:
        self.update(batch)
        self.launch(batch).result()

    def _bytes_of_graph(self, shape: StepShape) -> int:
        device = self._model.device
        with torch.inference_mode():
            self._send_padding(shape)
            self._forward.run(shape)  # torch keeps memory for it that is not the graph's
            free_before = _free_bytes(device)
            self._graphs.capture_one(shape)
        return max(0, free_before - _free_bytes(device))

    def _begin(self, batch: ScheduledBatch, draws: ChunkDraws | None = None) -> BegunStep:
        """Sends a step to the device, and advances the rows past it.

        Args:
            batch: the step.
            draws: the draws of its chunks; None on a stage without draws.
        """
        rows, ids = self._rows, self._decode_ids
        if self._is_sent(batch):
            assert self._sent_decode is not None
            rows.host.advance((), ids)
            if rows.has_unsent_tables:
                rows.store_tables(to_device(rows.table_words(), self._model.device))
            return replace(self._sent_decode, number=batch.step)
        self._sent_decode = None
        sent = SentStep(batch, ids, self._max_context_len(batch), has_logits=self._part.is_last)
        captured = None if batch.reports_prompts else self._graphs.fitting(sent.shape)
        words = sent.words(captured or sent.shape, rows.spare_row)
        is_planned = self._forward.plans and captured is None and sent.shape.max_query_len > 1
        on_host = sent.on_host(rows.host) if is_planned else None
        rows.host.advance(batch.chunks, ids)
        drawing = (_NO_DRAWS, _NO_DRAWS) if draws is None else (draws.inputs(), draws.single)
        _, of_chunks, inputs, single, of_tables = self._forward.upload.send(
            [words, rows.chunk_words(batch.chunks), *drawing, rows.table_words()]
        )
        rows.store_tables(of_tables)
        rows.store_chunks(of_chunks)
        step = BegunStep.of(batch, sent.shape, captured, len(ids), inputs, single, on_host)
        if not batch.chunks:
            self._sent_decode = step
        return step

    def _is_sent(self, batch: ScheduledBatch) -> bool:
        """Whether the device has the sequences of a step, because the last one had the same."""
        sent = self._sent_decode
        return sent is not None and not batch.chunks and sent.decode_rows is batch.decode_rows

    def _max_context_len(self, batch: ScheduledBatch) -> int:
        """Returns the most tokens of a context; of steps that only decode, of any such step."""
        if not batch.chunks:
            return self._model.max_model_len
        positions = self._rows.host.positions[self._decode_ids]
        ends = [chunk.start_position + chunk.num_tokens for chunk in batch.chunks]
        return max(1 + int(positions.max(initial=0)), *ends)

    def _compute_scores(self, step: BegunStep, *, needs_hidden: bool) -> Scores:
        """Computes the forward pass of a step.

        Args:
            step: the step.
            needs_hidden: whether the final hidden states of all its tokens are needed.
        """
        self._receive_hidden(step.num_tokens)
        if needs_hidden:
            return self._forward.scores(*self._forward.run_with_hidden(step.shape, step.on_host))
        return self._forward.scores(self._run(step)[: step.num_logit_rows])

    def _run(self, step: BegunStep) -> torch.Tensor:
        if step.is_captured:
            return self._graphs.run(step.shape)
        return self._forward.run(step.shape, on_host=step.on_host)

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

    def _draw_decodes(self, step: BegunStep, scores: Scores, raw: Scores) -> list[torch.Tensor]:
        """Draws the tokens of the rows that decode, from logits that follow their rules.

        Returns:
            The tensors of `DecodeReports.compute`; none if no row decodes.
        """
        num_rows = len(self._decode_ids)
        if not num_rows:
            return []
        scores, raw = scores.last(num_rows), raw.last(num_rows)
        positions = self._forward.draw_positions(step.decode_tokens)
        if self._decode.ruled is not None:
            last_tokens = self._rows.state.last_tokens
            self._rules.apply_to_decodes(self._decode.ruled, scores, last_tokens, positions)
        self._decode.draw(scores, positions, self._forward.row_ids(step.decode_seqs))
        return self._reports.compute(scores, raw, self._decode.tokens[:num_rows])


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
